# SPDX-License-Identifier: Apache-2.0
"""Whether a step combines values of several parameters, seen in the first one.

Where each rank steps other parameters than the next, as in a pipeline, a norm or a distance over all of them would be
one of a part.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core import trees
from ..core.errors import PrepareError
from ..torch_internals.optimizer_step import replace_step
from .optimizer_step import OPT_OUT

Exchange = Callable[[object], list[Any]]


class _Recorder(TorchFunctionMode):
    """Follows from which parameters and gradients each tensor was computed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.is_paused = False
        self.combines = False
        # Numbers of parameters.
        self.origins = trees.Origins[int]()
        # By the id of a tensor of stacked values, that tensor (so that no id is reused), and the origins of each row.
        self.rows: dict[int, tuple[torch.Tensor, list[frozenset[int]]]] = {}
        self.mark_sources()

    def mark_sources(self) -> None:
        """Record the parameters and their present gradients."""
        parameters: list[torch.Tensor] = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        for number, parameter in enumerate(parameters):
            self.mark([parameter], frozenset({number}))
            if parameter.grad is not None:
                self.mark([parameter.grad], frozenset({number}))

    def evaluate(self, closure: Any) -> object:
        """Call the closure of a step, which computes with the model."""
        self.is_paused = True
        try:
            return closure()
        finally:
            self.is_paused = False
            self.mark_sources()

    def mark(self, tensors: Iterable[torch.Tensor], origins: frozenset[int]) -> None:
        """Record from which parameters tensors were computed."""
        for tensor in tensors:
            self.origins.record(tensor, origins)
        self.combines = self.combines or len(origins) > 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.is_paused:
            return output
        name = func.__name__
        if name.startswith("_foreach"):
            # Entry i of the results is computed from entry i of each list.
            lists = [
                value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)
            ]
            common = [value for value in args if isinstance(value, torch.Tensor)]
            results = output or args[0]
            for result, *entries in zip(results, *lists, strict=False):
                self.mark([result], self.origins.of([entries, common]))
            return output
        rows = self._rows_of(name, args, kwargs)
        if rows:
            self._mark_rows(name, output, rows)
            return output
        origins = self.origins.of((args, kwargs))
        if origins:
            written = [kwargs.get("out")]
            if name.endswith("_") or name.startswith("__i"):
                written.append(args[0])
            self.mark(trees.leaves((output, written)), origins)
        return output

    def _rows_of(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[frozenset[int]]:
        """From which parameters each row of the arguments was computed, where they stack values of parameters."""
        if name == "stack" and not kwargs and len(args) == 1:
            return [self.origins.of(entry) for entry in args[0]]
        stacked = [
            self.rows[id(value)][1]
            for value in trees.leaves((args, kwargs))
            if id(value) in self.rows
        ]
        return [frozenset().union(*origins) for origins in zip(*stacked, strict=False)]

    def _mark_rows(self, name: str, output: object, rows: list[frozenset[int]]) -> None:
        """Record a result of stacked values: rows again, or values of all rows."""
        results = list(trees.leaves(output))
        if name in ("unbind", "split", "chunk") and len(results) == len(rows):
            for tensor, origins in zip(results, rows, strict=True):
                self.mark([tensor], origins)
            return
        for tensor in results:
            if tensor.shape[:1] == (len(rows),):
                self.rows[id(tensor)] = (tensor, rows)
            else:
                self.mark([tensor], frozenset().union(*rows))


def watch_first_step(optimizer: torch.optim.Optimizer, layout: str, exchange: Exchange) -> None:
    """Have the first step of an optimizer raise an error if it combines values of several parameters.

    Args:
        optimizer: `step`, and other methods whose names end with it, are replaced until the first one was called.
        layout: the argument that gives ranks other parameters.
        exchange: returns the objects of all these ranks.

    Raises:
        PrepareError: at the end of the first step, on every rank.
    """
    reference = weakref.ref(optimizer)
    kind = type(optimizer)
    # Those that are not called yet; a step may call another one.
    waiting = {
        name
        for name in dir(kind)
        if name.endswith("step") and name[0] != "_" and callable(getattr(kind, name))
    }
    running: list[str] = []

    def run(name: str, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        if name not in waiting or running:
            return call(*args, **kwargs)
        present = reference()
        assert present is not None
        waiting.discard(name)
        running.append(name)
        recorder = _Recorder(present)
        if name == "step" and args:
            args = (functools.partial(recorder.evaluate, args[0]),)
        try:
            with recorder:
                result = call(*args, **kwargs)
        finally:
            running.clear()
        _compare(present, recorder.combines, layout, exchange)
        return result

    def step(_: object, former: Callable[..., object], closure: object) -> object:
        if closure is None:
            return run("step", former)
        return run("step", former, closure)

    replace_step(optimizer, step)
    for name in waiting - {"step"}:

        def method(*args: object, name: str = name, **kwargs: object) -> object:
            return run(name, getattr(kind, name), reference(), *args, **kwargs)

        optimizer.__dict__[name] = method


def _compare(
    optimizer: torch.optim.Optimizer, combines: bool, layout: str, exchange: Exchange
) -> None:
    """Raise the error where a rank has combined parameters, or has computed other numbers for its groups."""
    numbers: list[dict[str, object]] = []
    for group in optimizer.param_groups:
        entries: dict[str, object] = {
            key: value for key, value in group.items() if isinstance(value, bool | int | float)
        }
        entries.update(
            {key: value.tolist() for key, value in group.items() if isinstance(value, torch.Tensor)}
        )
        numbers.append(entries)
    of_ranks = exchange((combines, numbers))
    different = []
    for _, groups in of_ranks:
        for group, first in zip(groups, of_ranks[0][1], strict=True):
            different += [key for key in group if repr(group[key]) != repr(first.get(key))]
    if different or any(combined for combined, _ in of_ranks):
        name = type(optimizer).__name__
        detail = ""
        if different:
            detail = f" ({', '.join(sorted(set(different)))} of its groups differ between ranks)"
        raise PrepareError(
            f"{name} combines values of several parameters in a step{detail}, and with {layout} a rank has only some "
            "of them: its step differs from that of a single process. Use fsdp_version=2 or tp_size without "
            f"{layout}. If its results do not depend on what it combines, set {name}.{OPT_OUT} = True"
        )
