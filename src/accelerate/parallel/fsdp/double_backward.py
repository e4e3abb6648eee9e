# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and gradients of gradients: a model stays unsharded from a backward with `create_graph=True` to its step.

The graph that such a backward creates reads parameters before any of FSDP2's hooks is called, which gather them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .common import other_parameters
from .units import shard_groups

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class KeptUnsharded:
    """Whether the units of one model stay unsharded.

    Fields:
        active: from a backward that creates a graph to the next step of an optimizer of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._hook: RemovableHandle | None = None
        self.active: bool = False
        for _, group, _ in shard_groups(model):
            group.__class__ = _watched(type(group))  # type: ignore[arg-type]
            vars(group)["_kept"] = self

    def _groups(self) -> Iterator[tuple[FSDPModule, FSDPParamGroup]]:
        model = self._model()
        for module, group, _ in () if model is None else shard_groups(model):
            yield module, group

    def start(self) -> None:
        """A backward creates a graph."""
        if not self.active:
            self.active = True
            # All optimizers have this hook only while a model is unsharded.
            self._hook = register_optimizer_step_pre_hook(functools.partial(_before_step, weakref.ref(self)))

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
            module.reshard()

    def reshard(self) -> None:
        """Shard the parameters between two backwards; the next one needs them unsharded if they were."""
        active = self.active
        self.end()
        if active:
            self.start()

    def gather(self) -> None:
        """Gather what was resharded, as by saving a state."""
        for module, _ in self._groups():
            module.unshard()

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
            state = module._get_fsdp_state()
            if state._is_root:
                state._root_post_backward_final_callback()


def _before_step(reference: weakref.ref[KeptUnsharded], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """The hook of all optimizers. It does not keep a model, or what is kept for it, alive."""
    if (kept := reference()) is not None:
        kept.before_step(optimizer)


def _is_own(shard: FSDPParam, found: object) -> bool:
    return found is shard.sharded_param or found is getattr(shard, "_unsharded_param", None)


def _refuse_others(shards: Iterable[FSDPParam], is_own: Callable[[FSDPParam, object], bool]) -> None:
    """Raise PrepareError for a forward with other parameters, instead of which FSDP2 would compute with its shards."""
    for shard in shards:
        place = shard._module_info
        if not is_own(shard, place.module._parameters.get(place.param_name)):
            raise other_parameters(place.param_name, type(place.module).__name__, "FSDP2")


@functools.cache
def _watched(kind: type[FSDPParamGroup]) -> type[FSDPParamGroup]:
    """The class of a unit's group of parameters, which is resharded unless the model is kept unsharded."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        _kept: KeptUnsharded
        _versions: list[int] | None = None

        def lazy_init(self) -> None:
            # torch takes what the modules have now for the shards.
            _refuse_others(self.fsdp_params, lambda shard, found: isinstance(found, nn.Parameter))
            super().lazy_init()

        def pre_forward(self, *args: object) -> object:
            _refuse_others(self.fsdp_params, _is_own)
            return super().pre_forward(*args)

        def pre_backward(self, *args: object) -> None:
            # Only a backward with `create_graph=True` runs with gradients enabled.
            if torch.is_grad_enabled():
                self._kept.start()
            super().pre_backward(*args)

        def reshard(self) -> None:
            if not self._kept.active:
                super().reshard()

        def unshard(self, *args: bool, **kwargs: bool) -> None:
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
