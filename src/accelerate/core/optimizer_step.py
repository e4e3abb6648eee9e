# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose step runs inside of something else: on shards, on master weights, on state from host memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

# Takes the optimizer, the step that it had, and a closure or None.
RunStep = Callable[[Any, Callable[..., Any], Any], Any]


def replace_step(optimizer: Any, run: RunStep) -> None:
    """Make `optimizer.step(closure)` call `run(optimizer, former_step, closure)` from now on.

    The former step may be a replacement too: by the user, or by a scheduler that counts steps. The optimizer is in no
    reference cycle.
    """
    kind, reference = type(optimizer), weakref.ref(optimizer)
    given = optimizer.__dict__.get("step")

    @functools.wraps(kind.step)
    def step(closure: Any = None) -> Any:
        own: Any = reference()
        own._opt_called = True
        return run(own, functools.partial(kind.step, own) if given is None else given, closure)

    # By this mark torch's schedulers know that `_opt_called` is set.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step
