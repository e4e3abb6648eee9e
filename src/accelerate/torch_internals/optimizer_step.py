# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose step runs inside of something else, which torch's schedulers count as the optimizer's own.

And those with groups that have no parameters.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import Internal

COUNTED_STEP = Internal(
    name="counted_step",
    what="_opt_called of an optimizer and _wrapped_by_lr_sched of its step, by which schedulers count steps",
    versions="2.11 to 2.14",
    upstream="not reported; the count is from https://github.com/pytorch/pytorch/issues/20124",
    needed_by="FSDP2 and tensor parallelism, master weights, OptimizerOffloadKwargs: a scheduler that is made after "
    "prepare, as transformers.Trainer makes it",
    without="AttributeError: 'function' object has no attribute '__func__' when such a scheduler is made",
    test="tests/torch_internals/test_optimizer_step.py::test_schedulers_count_a_step_that_was_replaced",
)

EMPTY_GROUPS = Internal(
    name="empty_groups",
    what="nothing private: groups without parameters are omitted while torch loads a flattened "
    "state",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="load_state with SHARDED_STATE_DICT of LoRA by transformers.Trainer, whose group without weight decay "
    "(norms and biases) is empty",
    without="IndexError: list index out of range in load_state",
    test="tests/torch_internals/test_optimizer_step.py::test_a_group_may_be_empty",
)

# Takes the optimizer, the step that it had, and a closure or None.
RunStep = Callable[[Any, Callable[..., Any], Any], Any]


def replace_step(optimizer: Any, run: RunStep) -> None:
    """Make `optimizer.step(closure)` call `run(optimizer, former_step, closure)` from now on.

    The former step may be a replacement too: by the user, or by a scheduler that counts steps. The optimizer is in no
    reference cycle.
    """
    kind, reference = type(optimizer), weakref.ref(optimizer)
    replaced = optimizer.__dict__.get("step")

    @functools.wraps(kind.step)
    def step(closure: Any = None) -> Any:
        present: Any = reference()
        if COUNTED_STEP.is_on:
            present._opt_called = True
        return run(
            present,
            functools.partial(kind.step, present) if replaced is None else replaced,
            closure,
        )

    if COUNTED_STEP.is_on:
        # By this mark torch's schedulers know that `_opt_called` is set.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.is_replacement = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step


def replace_step_below_hooks(optimizer: Any, run: RunStep) -> None:
    """As `replace_step`, with hooks of the step before and after `run`, which is given the step without hooks."""
    plain: Any = type(optimizer).step
    if getattr(plain, "hooked", False):
        plain = plain.__wrapped__
    replaced = optimizer.__dict__.get("step")
    if not hasattr(replaced, "is_replacement") and hasattr(replaced, "_wrapped_by_lr_sched"):
        # That of a scheduler, which only counts.
        replaced = None

    def below_hooks(present: Any, closure: Any = None) -> Any:
        return run(
            present, functools.partial(plain, present) if replaced is None else replaced, closure
        )

    hooked = type(optimizer).profile_hook_step(below_hooks)
    replace_step(
        optimizer,
        lambda present, _, closure: hooked(present, *(() if closure is None else (closure,))),
    )


@contextlib.contextmanager
def without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which an optimizer has only its groups with parameters. The others come back as they were."""
    if not EMPTY_GROUPS.is_on:
        yield
        return
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        # Loading a state replaces the groups.
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]
