# SPDX-License-Identifier: Apache-2.0
"""The flow of data between the units of a model, observed in one forward on example inputs.

The forward runs on fake tensors where the model allows it. For each tensor, the tracer records from which units'
outputs it was computed by operations outside of units. A pipeline has to carry along the output of a unit that is used
after a later unit than the next one has computed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core import trees
from .. import materialize
from .remote_tensor import RemoteTensor

logger: logging.Logger = logging.getLogger(__name__)

# The model's output, as a user of tensors.
END = ""


@dataclass
class DataFlow:
    """What one forward has shown.

    Fields:
        called: units in the order in which they compute. calls: every call of a unit.
        used: unit -> the unit after which its output was last used.
        random: units whose output a random operation outside of units uses.
        reads: parameter or buffer -> the units that use it, or what is computed from it, without owning it; END for
            the model's output.
        written: parameters and buffers that units change.
    """

    called: list[str]
    used: dict[str, str] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    reads: dict[str, set[str]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def order(self, units: Sequence[str]) -> list[str]:
        """All units; one that was not called comes after the unit that it is registered after."""
        found = list(self.called)
        for place, name in enumerate(units):
            if name not in found:
                found.insert(found.index(units[place - 1]) + 1 if place else 0, name)
        return found

    def carried(self, units: Sequence[str], begins: Sequence[int]) -> list[str]:
        """The units whose output is used after the next stage begins; `begins` index the ordered `units`."""
        places = {name: place for place, name in enumerate(units)}
        spans = {name: (places[name] + 1, places[last] + 1) for name, last in self.used.items()}
        return [name for name, (first, last) in spans.items() if any(first < begin <= last for begin in begins)]


def observe(
    model: nn.Module,
    units: Sequence[str],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    fake_only: bool = False,
    forward: Callable[..., object] | None = None,
) -> DataFlow:
    """Run the model's forward once, without gradients, and record what its units use of each other.

    Args:
        model: the model.
        units: names of its units.
        args: positional inputs of the forward.
        kwargs: keyword inputs of the forward.
        fake_only: raise the forward's error where it does not run on fake tensors, instead of running on real ones.
        forward: called instead of the model.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    forward = forward or model
    tracer = _Tracer(model, units)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, _with_stand_ins(model, tracer):
            # Inputs are moved to meta where the model is.
            on_meta = next((parameter.is_meta for parameter in model.parameters()), False)
            given = trees.map_leaves(
                lambda leaf: fake.from_tensor(leaf.to("meta") if on_meta else leaf), (tuple(args), dict(kwargs))
            )
            tracer.run(forward, *given)
    except Exception as error:
        if fake_only:
            raise
        # A forward that reads a tensor's data.
        logger.debug("the model's forward runs on its example inputs: on fake tensors it raised %s", error)
        tracer = _Tracer(model, units)
        tracer.run(forward, tuple(args), dict(kwargs))
    return tracer.flow()


@contextlib.contextmanager
def _with_stand_ins(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    """A block in which, under a fake mode, fake tensors replace remote tensors."""
    replaced = []
    for prefix, module in model.named_modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, RemoteTensor):
                replaced.append((module, name, value))
                stand_in = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                module.__dict__[name] = stand_in
                tracer.register(f"{prefix}.{name}" if prefix else name, stand_in, owner=prefix)
    try:
        yield
    finally:
        for module, name, value in replaced:
            module.__dict__[name] = value


class _Tracer:
    """Records the data flow of a forward. Units are numbered in the order in which they compute (`place`)."""

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.model, self.units = model, units
        self.order: list[int] = []
        self.calls: list[int] = []
        # Place of a unit -> how many units had computed when its output was last used.
        self.used: dict[int, int] = {}
        # Storage of a tensor -> the places of the units, and the names of the parameters and buffers, from which it
        # was computed outside of units.
        self.origins: dict[int, frozenset[int | str]] = {}
        self.random: set[int] = set()
        # The unit that is computing.
        self.inside: int | None = None
        # Storage -> the name of a parameter or buffer. Name -> the units that own it.
        self.names: dict[int, str] = {}
        self.owners: dict[str, set[int]] = {}
        self.reads: dict[str, set[str]] = {}
        self.written: set[str] = set()
        # Keeps storages alive, so that no address is reused.
        self.alive: list[torch.UntypedStorage] = []
        for name, tensor in materialize.named_tensors(model):
            self.register(name, tensor)
        known = {id(tensor): name for name, tensor in materialize.named_tensors(model)}
        for number, unit in enumerate(units):
            module = model.get_submodule(unit)
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) in known:
                    self.owners.setdefault(known[id(tensor)], set()).add(number)

    def register(self, name: str, tensor: torch.Tensor, owner: str | None = None) -> None:
        if isinstance(tensor, DTensor):
            return
        self.names[self._key(tensor)] = name
        if owner is not None:
            self.owners[name] = {
                number for number, unit in enumerate(self.units) if f"{owner}.".startswith(f"{unit}.")
            }

    def flow(self) -> DataFlow:
        called = [self.units[number] for number in self.order]
        used = {called[place]: called[count - 1] for place, count in self.used.items()}
        random = {called[place] for place in self.random}
        return DataFlow(called, used, random, [self.units[number] for number in self.calls], self.reads, self.written)

    def run(self, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
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

    def origins_of(self, value: object) -> frozenset[int | str]:
        """From what tensors were computed."""
        found: frozenset[int | str] = frozenset()
        for tensor in trees.leaves(value):
            key = self._key(tensor)
            found |= self.origins.get(key, frozenset())
            if key in self.names:
                found |= {self.names[key]}
        return found

    def use(self, value: object, by: str | None = None) -> frozenset[int | str]:
        """Record that tensors are used now, by a unit, the output (END) or an operation outside; their origins."""
        found = self.origins_of(value)
        for origin in found:
            if isinstance(origin, int):
                self.used[origin] = len(self.order)
            elif by is not None:
                self.reads.setdefault(origin, set()).add(by)
        return found

    def made(self, value: object, origins: frozenset[int | str], keep: bool) -> None:
        """Record that tensors were computed from these origins; `keep`: in addition to those they had."""
        for tensor in trees.leaves(value):
            key = self._key(tensor)
            self.origins[key] = origins | (self.origins.get(key, frozenset()) if keep else frozenset())

    def use_inside(self, unit: int, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Record what an operation inside of a unit uses of tensors that the unit does not own, and what it changes.

        Copies of what it changes would diverge on several stages.
        """
        for place, argument in enumerate(func._schema.arguments) if func._schema.is_mutable else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written |= {origin for origin in self.origins_of(written) if isinstance(origin, str)}
        for origin in self.origins_of((args, kwargs)):
            if isinstance(origin, str) and unit not in self.owners.get(origin, ()):
                self.reads.setdefault(origin, set()).add(self.units[unit])

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return int(storage._cdata)

    def _enter(self, number: int) -> Callable[[nn.Module, object, object], None]:
        def hook(_: nn.Module, args: object, kwargs: object) -> None:
            if self.inside is None:
                self.use((args, kwargs), self.units[number])
                self.inside = number
                self.calls.append(number)

        return hook

    def _leave(self, number: int) -> Callable[[nn.Module, object, object], None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if self.inside != number:
                return
            self.inside = None
            if number not in self.order:
                self.order.append(number)
            self.made(output, frozenset({self.order.index(number)}), keep=False)

        return hook


class _Operations(TorchDispatchMode):
    """Reports each operation to the tracer."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        tracer, kwargs = self.tracer, kwargs or {}
        output = func(*args, **kwargs)
        if tracer.inside is not None:
            tracer.use_inside(tracer.inside, func, args, kwargs)
            return output
        origins = tracer.use((args, kwargs))
        if any(isinstance(origin, str) for origin in origins) and trees.first_leaf(output) is None:
            # A Python number, by which the forward may branch on every stage.
            tracer.use((args, kwargs), END)
            for unit in tracer.units:
                tracer.use((args, kwargs), unit)
        tracer.made(output, origins, keep=True)
        if torch.Tag.nondeterministic_seeded in func.tags:
            tracer.random |= {origin for origin in origins if isinstance(origin, int)}
        return output
