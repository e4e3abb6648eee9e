# SPDX-License-Identifier: Apache-2.0
"""The order in which units of a model compute, and what they use of each other, observed in one forward.

Hooks show the calls. A `TorchFunctionMode` shows from which outputs of units, and from which parameters, each tensor
outside of the units was computed. The forward runs on the meta device where the model allows it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ...core import trees
from ...core.modules import direct_tensors
from .. import materialize

logger: logging.Logger = logging.getLogger(__name__)


@dataclass
class Observation:
    """What one forward has shown.

    Fields:
        calls: every call of a unit, in order.
        last_use: unit -> how many calls had ended when its output was last used.
        reads: parameters that are used outside of the unit that has them.
    """

    calls: list[str] = field(default_factory=list)
    last_use: dict[str, int] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)

    def order(self, units: Sequence[str]) -> list[str]:
        """All units in the order of their first calls; others come after the unit that they are registered after."""
        ordered = list(dict.fromkeys(self.calls))
        for number, name in enumerate(units):
            if name not in ordered:
                ordered.insert(ordered.index(units[number - 1]) + 1 if number else 0, name)
        return ordered

    def used_across(self, units: Sequence[str], begins: Sequence[int]) -> list[str]:
        """The units whose output is used after the next stage begins; `begins` index the ordered `units`."""
        numbers = {name: number for number, name in enumerate(units)}
        ends = {
            name: max(numbers[call] for call in self.calls[:count])
            for name, count in self.last_use.items()
        }
        return [
            name
            for name, last in ends.items()
            if any(numbers[name] + 1 < begin <= last + 1 for begin in begins)
        ]


def observe(
    model: nn.Module,
    units: Sequence[str],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Observation:
    """Run the model's forward once, without gradients, and record what its units use of each other.

    It runs on the meta device; where it does not (it reads values), with the model's weights.

    Args:
        model: the model.
        units: names of its units.
        args: positional inputs of the forward.
        kwargs: keyword inputs of the forward.
    """
    # Under each name, but modules under one name each: torch 2.13 leaves the replacements in one that has two.
    on_meta: dict[str, torch.Tensor] = {}
    replaced: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, tensor in direct_tensors(module).items():
            full_name = f"{prefix}.{name}".removeprefix(".")
            on_meta[full_name] = replaced.setdefault(id(tensor), tensor.to("meta"))

    def run_on_meta() -> object:
        inputs = trees.map_leaves(lambda tensor: tensor.to("meta"), (tuple(args), dict(kwargs)))
        with torch.device("meta"):
            return functional_call(model, on_meta, *inputs, tie_weights=False)

    try:
        return _record(model, units, run_on_meta, on_meta)
    except Exception as error:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise
        logger.debug(
            "the model's forward runs on its example inputs: on the meta device it raised %s", error
        )
        return _record(model, units, lambda: model(*args, **kwargs), dict(model.named_parameters()))


def _record(
    model: nn.Module,
    units: Sequence[str],
    forward: Callable[[], object],
    tensors: Mapping[str, torch.Tensor],
) -> Observation:
    recorder = _Recorder()
    units_of: dict[nn.Parameter, set[str]] = {}
    for unit in units:
        for parameter in model.get_submodule(unit).parameters():
            units_of.setdefault(parameter, set()).add(unit)
    for name, parameter in model.named_parameters():
        if parameter in units_of:
            owned = materialize.canonical_name(name), units_of[parameter]
            recorder.owned[id(tensors[name])] = owned
    with (
        hooked(model, units, recorder.enter, recorder.leave),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        recorder,
    ):
        recorder.use(forward())
    return recorder.seen


class _Recorder(TorchFunctionMode):
    """Sees each torch function. Outside of units it notes from which units' outputs each tensor was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Observation()
        # By the id of a parameter of a unit: its name, and the units that have it.
        self.owned: dict[int, tuple[str, set[str]]] = {}
        # The unit that is computing.
        self.inside: str | None = None
        # Names of units.
        self.origins = trees.Origins[str]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.__name__ == "__get__" and trees.first_leaf(output) is None:
            return output
        for tensor in trees.leaves((args, kwargs)):
            if id(tensor) in self.owned:
                name, units = self.owned[id(tensor)]
                if self.inside not in units:
                    self.seen.reads.add(name)
        # A unit may find outputs of others in objects, as in a cache, which are no arguments of its call.
        origins = self.use((args, kwargs))
        if self.inside is None:
            for tensor in trees.leaves(output):
                self.origins.record(tensor, origins | self.origins.of(tensor))
        return output

    def use(self, value: object) -> frozenset[str]:
        """Record that tensors are used now; the units from whose outputs they were computed."""
        origins = self.origins.of(value)
        self.seen.last_use.update(dict.fromkeys(origins, len(self.seen.calls)))
        return origins

    def enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        """A unit is called."""
        if self.inside is None:
            self.use((args, kwargs))
            self.inside = name

    def leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """A unit has returned."""
        if self.inside == name:
            self.inside = None
            self.seen.calls.append(name)
            for tensor in trees.leaves(output):
                self.origins.record(tensor, frozenset({name}))


@contextlib.contextmanager
def hooked(
    model: nn.Module,
    units: Iterable[str],
    enter: Callable[..., None],
    leave: Callable[..., None],
) -> Iterator[None]:
    """A block in which a unit's call calls `enter(unit, *)` and `leave(unit, *)` as its hooks."""
    handles = []
    for name in units:
        module = model.get_submodule(name)
        pre_hook, hook = functools.partial(enter, name), functools.partial(leave, name)
        handles.append(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
        handles.append(module.register_forward_hook(hook, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
