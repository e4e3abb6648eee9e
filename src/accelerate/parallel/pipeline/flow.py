# SPDX-License-Identifier: Apache-2.0
"""How data flows between the units of a model, seen in one forward on example inputs: in which order, and how far.

The forward runs on tensors without content where the model allows it. Of each tensor it is known which units' outputs
it was made from, by operations outside of units; a unit whose output is used when a later unit than the next has
computed is one that a pipeline carries along.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...core import trees

logger = logging.getLogger(__name__)


@dataclass
class Flow:
    """`called`: units in the order in which they compute. `used`: unit -> the one behind which its output was used
    last. `random`: units of whose output something is made at random outside of units.
    """

    called: list[str]
    used: dict[str, str] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)

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


def observe(model: nn.Module, units: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flow:
    """Run the model's forward once, without gradients, and see what its units use of each other."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = _Watch()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            given = trees.map_leaves(fake.from_tensor, (tuple(args), dict(kwargs)))
            watch.run(model, units, *given)
    except Exception as error:
        # A forward that asks for a tensor's content.
        logger.debug("the model's forward runs on its example: without content it gave %s", error)
        watch = _Watch()
        watch.run(model, units, tuple(args), dict(kwargs))
    called = [units[number] for number in watch.order]
    used = {called[place]: called[count - 1] for place, count in watch.used.items()}
    return Flow(called, used, {called[place] for place in watch.random})


@dataclass
class _Watch:
    """What is seen while a forward runs. Places are those in the order of computing."""

    order: list[int] = field(default_factory=list)
    # Place of a unit -> the last time at which its output was used: as many units had computed.
    used: dict[int, int] = field(default_factory=dict)
    # Address of a tensor's storage -> the places of the units that it was made from, without others between.
    origins: dict[int, frozenset[int]] = field(default_factory=dict)
    random: set[int] = field(default_factory=set)
    inside: bool = False
    # Storages, so that no address is taken twice.
    alive: list[Any] = field(default_factory=list)

    def run(self, model: nn.Module, units: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handles = []
        for number, name in enumerate(units):
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(number), always_call=True))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _Operations(self):
                self.use(model(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()

    def use(self, value: Any) -> frozenset[int]:
        """Tensors are used now; what they were made from."""
        found: frozenset[int] = frozenset()
        for tensor in trees.leaves(value):
            found |= self.origins.get(self._key(tensor), frozenset())
        for place in found:
            self.used[place] = len(self.order)
        return found

    def made(self, value: Any, origins: frozenset[int], keep: bool) -> None:
        """Tensors were made from these units' outputs; `keep`: beside those that they had."""
        for tensor in trees.leaves(value):
            key = self._key(tensor)
            self.origins[key] = origins | (self.origins.get(key, frozenset()) if keep else frozenset())

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return int(storage._cdata)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.inside:
            self.use((args, kwargs))
        self.inside = True

    def _leave(self, number: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self.inside = False
            if number not in self.order:
                self.order.append(number)
            self.made(output, frozenset({self.order.index(number)}), keep=False)

        return hook


class _Operations(TorchDispatchMode):
    """Sees each operation outside of units."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.watch.inside:
            origins = self.watch.use((args, kwargs))
            self.watch.made(output, origins, keep=True)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.watch.random |= origins
        return output
