# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and gradients of gradients: a model stays unsharded from a backward with `create_graph=True` to its step.

The graph that such a backward creates reads parameters before any of FSDP2's hooks is called, which gather them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..report.communication import shard_groups
from .common import other_parameters


class KeptUnsharded:
    """Whether the units of one model stay unsharded.

    Fields:
        active: from a backward that creates a graph to the next step of an optimizer of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._hook: Any = None
        self.active: bool = False
        for _, group, _ in shard_groups(model):
            kind: Any = type(group)
            group.__class__ = _watched(kind)
            group._kept = self

    def _groups(self) -> Iterator[tuple[nn.Module, Any]]:
        model = self._model()
        for module, group, _ in () if model is None else shard_groups(model):
            yield module, group

    def start(self) -> None:
        """A backward creates a graph."""
        if not self.active:
            self.active = True
            # All optimizers have this hook only while a model is unsharded.
            self._hook = register_optimizer_step_pre_hook(_BeforeStep(self))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reshard the model if `optimizer` steps parameters of it."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(shard.sharded_param) in stepped for _, group in self._groups() for shard in group.fsdp_params):
            self.end()

    def end(self) -> None:
        """Shard the parameters again."""
        self.active = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for module, _ in self._groups():
            module.reshard()  # type: ignore[operator]

    def reshard(self) -> None:
        """Shard the parameters between two backwards; the next one needs them unsharded if they were."""
        active = self.active
        self.end()
        if active:
            self.start()

    def gather(self) -> None:
        """Gather what was resharded, as by saving a state."""
        for module, _ in self._groups():
            module.unshard()  # type: ignore[operator]

    def show_shards(self) -> None:
        """After a backward: let the modules have the shards, which have the gradients, until the next unshard."""
        for _, group in self._groups():
            for shard in group.fsdp_params:
                shard._setattr_on_modules(shard.sharded_param)

    def reduce(self) -> None:
        """After a backward: reduce the gradients of units whose outputs, and thus FSDP2's hooks, it did not reach."""
        for _, group in self._groups():
            group._training_state = type(group._training_state).IDLE
        for module in {id(module): module for module, _ in self._groups()}.values():
            state = module._get_fsdp_state()  # type: ignore[operator]
            if state._is_root:
                state._root_post_backward_final_callback()


class _BeforeStep:
    """The hook of all optimizers. It does not keep a model, or what is kept for it, alive."""

    def __init__(self, kept: KeptUnsharded) -> None:
        self._kept = weakref.ref(kept)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (kept := self._kept()) is not None:
            kept.before_step(optimizer)


def _is_own(shard: Any, found: Any) -> bool:
    return found is shard.sharded_param or found is getattr(shard, "_unsharded_param", None)


def _refuse_others(shards: Iterable[Any], is_own: Callable[[Any, Any], bool]) -> None:
    """Raise PrepareError for a forward with other parameters, instead of which FSDP2 would compute with its shards."""
    for shard in shards:
        place = shard._module_info
        if not is_own(shard, place.module._parameters.get(place.param_name)):
            raise other_parameters(place.param_name, type(place.module).__name__, "FSDP2")


@functools.cache
def _watched(kind: Any) -> type[Any]:
    """The class of a unit's group of parameters, which is resharded unless the model is kept unsharded."""

    class Watched(kind):  # type: ignore[misc]
        _kept: KeptUnsharded
        _versions: list[int] | None = None

        def lazy_init(self) -> None:
            # torch takes what the modules have now for the shards.
            _refuse_others(self.fsdp_params, lambda shard, found: isinstance(found, nn.Parameter))
            super().lazy_init()

        def pre_forward(self, *args: Any) -> Any:
            _refuse_others(self.fsdp_params, _is_own)
            return super().pre_forward(*args)

        def pre_backward(self, *args: Any) -> None:
            # Only a backward with `create_graph=True` runs with gradients enabled.
            if torch.is_grad_enabled():
                self._kept.start()
            super().pre_backward(*args)

        def reshard(self) -> None:
            if not self._kept.active:
                super().reshard()

        def unshard(self, *args: Any, **kwargs: Any) -> None:
            if self._kept.active:
                # An optimizer with a closure steps several times between its hooks.
                versions = [shard.sharded_param._local_tensor._version for shard in self.fsdp_params]
                if self.is_unsharded and versions != self._versions:
                    self._to_sharded()
                self._versions = versions
                if self.is_unsharded:
                    for shard in self.fsdp_params:
                        shard._setattr_on_modules(shard.unsharded_param)
            super().unshard(*args, **kwargs)

    return Watched
