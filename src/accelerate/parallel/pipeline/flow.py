# SPDX-License-Identifier: Apache-2.0
"""How data flows between the units of a model, seen in one forward on example inputs: in which order, and how far.

The forward runs on tensors without content where the model allows it. Of each tensor it is known which units' outputs
it was made from, by operations outside of units; a unit whose output is used when a later unit than the next has
computed is one that a pipeline carries along.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core import trees
from .. import materialize
from .absent import Absent

logger = logging.getLogger(__name__)

# Behind all units.
END = ""


@dataclass
class Flow:
    """`called`: units in the order in which they compute. `used`: unit -> the one behind which its output was used
    last. `random`: units of whose output something is made at random outside of units. `calls`: every call of a unit.
    `reads`: parameter or buffer -> the units that use it though they do not own it, or what is made from it; END
    where the model's output does. `written`: parameters and buffers that units change.
    """

    called: list[str]
    used: dict[str, str] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    reads: dict[str, set[str]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def order(self, units: Sequence[str]) -> list[str]:
        """All of the units, those that were not called behind what they are registered behind."""
        found = list(self.called)
        for place, name in enumerate(units):
            if name not in found:
                found.insert(found.index(units[place - 1]) + 1 if place else 0, name)
        return found

    def carried(self, units: Sequence[str], begins: Sequence[int]) -> list[str]:
        """Those of the units (in order) whose output is used behind the next stage's begin; stages begin at places."""
        places = {name: place for place, name in enumerate(units)}
        spans = {name: (places[name] + 1, places[last] + 1) for name, last in self.used.items()}
        return [name for name, (first, last) in spans.items() if any(first < begin <= last for begin in begins)]


def observe(
    model: nn.Module,
    units: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fake_only: bool = False,
    forward: Callable[..., Any] | None = None,
) -> Flow:
    """Run the model's forward once, without gradients, and see what its units use of each other.

    `fake_only`: without numbers or not at all, then an error of the forward passes through. `forward` is called in
    the place of the model.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    forward = forward or model
    watch = _Watch(model, units)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, _without_absent(model, watch):
            given = trees.map_leaves(lambda leaf: fake.from_tensor(_beside(leaf, model)), (tuple(args), dict(kwargs)))
            watch.run(forward, *given)
    except Exception as error:
        if fake_only:
            raise
        # A forward that asks for a tensor's content.
        logger.debug("the model's forward runs on its example: without content it gave %s", error)
        watch = _Watch(model, units)
        watch.run(forward, tuple(args), dict(kwargs))
    return watch.flow()


def _beside(tensor: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """An input, on meta where the model has no weights yet."""
    weight = next(model.parameters(), tensor)
    return tensor.to("meta") if weight.is_meta else tensor


@contextlib.contextmanager
def _without_absent(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """In the block, under a fake mode, tensors of other stages are tensors like all others."""
    replaced = []
    for prefix, module in model.named_modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, Absent):
                replaced.append((module, name, value))
                stand_in = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                module.__dict__[name] = stand_in
                watch.know(f"{prefix}.{name}" if prefix else name, stand_in, owner=prefix)
    try:
        yield
    finally:
        for module, name, value in replaced:
            module.__dict__[name] = value


class _Watch:
    """What is seen while a forward runs. Places are those in the order of computing."""

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.model, self.units = model, units
        self.order: list[int] = []
        self.calls: list[int] = []
        # Place of a unit -> the last time at which its output was used: as many units had computed.
        self.used: dict[int, int] = {}
        # Storage of a tensor -> the places of the units, and the names of the parameters and buffers, that it was
        # made from, without others between.
        self.origins: dict[int, frozenset[int | str]] = {}
        self.random: set[int] = set()
        # The unit that computes.
        self.inside: int | None = None
        # Storage -> the name of a parameter or buffer; and name -> the units that own it.
        self.names: dict[int, str] = {}
        self.owners: dict[str, set[int]] = {}
        self.reads: dict[str, set[str]] = {}
        self.written: set[str] = set()
        # Storages, so that no address is taken twice.
        self.alive: list[Any] = []
        for name, tensor in materialize.named_tensors(model):
            self.know(name, tensor)
        known = {id(tensor): name for name, tensor in materialize.named_tensors(model)}
        for number, unit in enumerate(units):
            module = model.get_submodule(unit)
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) in known:
                    self.owners.setdefault(known[id(tensor)], set()).add(number)

    def know(self, name: str, tensor: torch.Tensor, owner: str | None = None) -> None:
        if isinstance(tensor, DTensor):
            return
        self.names[self._key(tensor)] = name
        if owner is not None:
            self.owners[name] = {
                number for number, unit in enumerate(self.units) if f"{owner}.".startswith(f"{unit}.")
            }

    def flow(self) -> Flow:
        called = [self.units[number] for number in self.order]
        used = {called[place]: called[count - 1] for place, count in self.used.items()}
        random = {called[place] for place in self.random}
        return Flow(called, used, random, [self.units[number] for number in self.calls], self.reads, self.written)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handles = []
        for number, name in enumerate(self.units):
            module = self.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(number), always_call=True))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _Operations(self):
                self.use(forward(*args, **kwargs), END)
        finally:
            for handle in handles:
                handle.remove()

    def origins_of(self, value: Any) -> frozenset[int | str]:
        """What tensors were made from."""
        found: frozenset[int | str] = frozenset()
        for tensor in trees.leaves(value):
            key = self._key(tensor)
            found |= self.origins.get(key, frozenset())
            if key in self.names:
                found |= {self.names[key]}
        return found

    def use(self, value: Any, by: str | None = None) -> frozenset[int | str]:
        """Tensors are used now, by a unit (END: the output) or an operation outside; what they were made from."""
        found = self.origins_of(value)
        for origin in found:
            if isinstance(origin, int):
                self.used[origin] = len(self.order)
            elif by is not None:
                self.reads.setdefault(origin, set()).add(by)
        return found

    def made(self, value: Any, origins: frozenset[int | str], keep: bool) -> None:
        """Tensors were made from these origins; `keep`: beside those that they had."""
        for tensor in trees.leaves(value):
            key = self._key(tensor)
            self.origins[key] = origins | (self.origins.get(key, frozenset()) if keep else frozenset())

    def use_inside(self, value: Any) -> None:
        """An operation inside of a unit: of parameters and buffers it may use its own."""
        assert self.inside is not None
        for origin in self.origins_of(value):
            if isinstance(origin, str) and self.inside not in self.owners.get(origin, ()):
                self.reads.setdefault(origin, set()).add(self.units[self.inside])

    def wrote(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what an operation inside of a unit changes: then copies on several stages go apart."""
        if not func._schema.is_mutable or self.inside is None:
            return
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written |= {origin for origin in self.origins_of(written) if isinstance(origin, str)}

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return int(storage._cdata)

    def _enter(self, number: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.inside is None:
                self.use((args, kwargs), self.units[number])
                self.inside = number
                self.calls.append(number)

        return hook

    def _leave(self, number: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self.inside != number:
                return
            self.inside = None
            if number not in self.order:
                self.order.append(number)
            self.made(output, frozenset({self.order.index(number)}), keep=False)

        return hook


class _Operations(TorchDispatchMode):
    """Sees each operation."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, kwargs = self.watch, kwargs or {}
        output = func(*args, **kwargs)
        watch.wrote(func, args, kwargs)
        if watch.inside is not None:
            watch.use_inside((args, kwargs))
            return output
        origins = watch.use((args, kwargs))
        if any(isinstance(origin, str) for origin in origins) and trees.first_leaf(output) is None:
            # A number: every stage may take another way by it.
            watch.use((args, kwargs), END)
            for unit in watch.units:
                watch.use((args, kwargs), unit)
        watch.made(output, origins, keep=True)
        if torch.Tag.nondeterministic_seeded in func.tags:
            watch.random |= {origin for origin in origins if isinstance(origin, int)}
        return output
