# SPDX-License-Identifier: Apache-2.0
"""Prepared models of DeepSpeed: an engine, whose full state is as in a plain run, and a model without an engine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import CheckpointError, ConfigurationError
from ...precision.base import Precision
from ...torch_internals import deepspeed
from ..materialize import canonical_name, complete, named_parameters, skeleton, without_storage
from ..prepared import GroupShapes, PreparedModel, PreparedOptimizer

if TYPE_CHECKING:
    from .engine import Engine


# The types of the options of a parameter group; the engine adds entries of others.
_OPTIONS = (int, float, str, tuple, list, torch.Tensor, type(None))


class EngineState:
    """An engine and the parameters that its optimizer was made with, by group."""

    def __init__(self, engine: Engine, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self.parameters: list[list[nn.Parameter]] = [list(group) for group in groups]
        self.light: dict[str, object] = without_storage(self.module.state_dict(keep_vars=True))
        self.skeleton: nn.Module = skeleton(type(self.module).__qualname__, self.light)

    def groups(self) -> list[dict[str, list[int]]]:
        """{plain name: shape} of the parameters in each group."""
        names = {id(parameter): name for name, parameter in named_parameters(self.module)}
        shapes_of_groups = []
        for group in self.parameters:
            named = [parameter for parameter in group if id(parameter) in names]
            shapes_of_groups.append({names[id(p)]: list(_full_shape(p)) for p in named})
        return shapes_of_groups

    # -- weights

    def computing_weights(self) -> dict[str, Any]:
        """The weights that the engine computes with: on every rank below stage 3, on rank 0 with stage 3.

        Raises ConfigurationError (a ValueError) if stage 3 is not configured to gather them.
        """
        engine: Any = self.engine
        if not engine.zero_optimization_partition_weights():
            from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

            return dict(clone_tensors_for_torch_save(self.module.state_dict()))
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "Cannot get 16bit model weights because "
                "`stage3_gather_16bit_weights_on_model_save` in DeepSpeed config is False. Set "
                "it to True there, or `zero3_save_16bit_model` in the plugin. `save_state` saves "
                "all fp32 weights; `model.save_checkpoint(folder)` saves the engine's own "
                "checkpoint, from which `zero_to_fp32.py` extracts them."
            )
        return self.model_state(master_weights=False)

    def model_state(self, master_weights: bool = True) -> dict[str, Any]:
        """The full state, with the optimizer's fp32 weights: on the host of rank 0, empty on the others."""
        from deepspeed.utils import safe_get_full_fp32_param

        state: dict[str, Any] = {}
        is_main = dist.get_rank() == 0
        gathered: dict[int, torch.Tensor | None] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                state[canonical_name(name)] = value
                continue
            if id(value) not in gathered:
                # Every rank takes part in gathering a tensor, once for all of its names; rank 0 keeps it.
                full: torch.Tensor | None = None
                if master_weights and has_master(value):
                    full = safe_get_full_fp32_param(value)
                if full is not None:
                    full = full.view(_full_shape(value))
                else:
                    with GatheredParameters(value):
                        full = value.detach().clone()
                gathered[id(value)] = None
                if is_main:
                    gathered[id(value)] = full.detach().to("cpu", copy=True)
            state[canonical_name(name)] = gathered[id(value)]
        if is_main:
            return state
        return {}

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a full state, which every rank has. Raises CheckpointError for names that one of the two lacks."""
        full = complete(state, self.light)
        differing = sorted(set(state) - set(self.light) | set(self.light) - set(full))
        if strict and differing:
            raise CheckpointError(
                f"the state and the model differ in {len(differing)} names: {', '.join(differing[:5])}"
            )
        for name, value in full.items():
            shape = getattr(self.light[name], "shape", None)
            if isinstance(value, torch.Tensor) and value.shape != shape:
                text = (
                    f"{name} has the shape {list(value.shape)} in the state but "
                    f"{list(shape or ())} in the model."
                )
                if not value.numel():
                    text += (
                        " ZeRO stage 3 had sharded it when the state was read: use "
                        "accelerator.get_state_dict, which gathers it."
                    )
                raise CheckpointError(text)
        for name, target in self.module.state_dict(keep_vars=True).items():
            value = full.get(canonical_name(name))
            if not isinstance(target, torch.Tensor) or value is None:
                continue
            with GatheredParameters(target, modifier_rank=0):
                target.data.copy_(value)
            if has_master(target):
                self._set(target, value, None)

    # -- optimizer

    @property
    def inner(self) -> Any:
        """The optimizer that steps; ZeRO's own is around it."""
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer steps the model's own parameters: no ZeRO, no master weights."""
        for parameter in itertools.chain(*self.parameters):
            if hasattr(parameter, "ds_id") or deepspeed.has_fp32_fragment(parameter):
                return False
        return True

    def _keys(self) -> list[str]:
        """The entries that are tensors of a parameter's shape (exp_avg, ...)."""
        keys: set[str] = set()
        for entry in self.inner.state.values():
            keys |= {key for key, value in entry.items() if _has_dimensions(value)}
        return sorted(keys)

    def optimizer_state(self) -> dict[str, Any]:
        """As `optimizer.state_dict()` of a plain run gives it: on the host of rank 0, empty on the other ranks."""
        if self.is_plain:
            state: dict[str, Any] = self.engine.optimizer.state_dict()
            if dist.get_rank() == 0:
                return state
            return {}
        from deepspeed.utils import safe_get_full_optimizer_state

        keys = self._keys()
        if keys:
            self._link()
        # Counters, which all parameters have in common.
        scalars: dict[str, Any] = {}
        for present in self.inner.state.values():
            if present:
                scalars = {key: value for key, value in present.items() if key not in keys}
                break
        is_main = dist.get_rank() == 0
        entries: dict[int, dict[str, Any]] = {}
        for position, parameter in enumerate(itertools.chain(*self.parameters)):
            full = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
            if not is_main or not full or any(value is None for value in full.values()):
                continue
            entry = {key: _copied(value) for key, value in scalars.items()}
            shape = _full_shape(parameter)
            for key, value in full.items():
                entry[key] = value.view(shape).to("cpu", copy=True)
            entries[position] = entry
        if is_main:
            return {"state": entries, "param_groups": self._options()}
        return {}

    def _options(self) -> list[dict[str, Any]]:
        """The options of each group, with its parameters by number."""
        options: list[dict[str, Any]] = []
        first = 0
        groups = self.engine.optimizer.param_groups
        for group, members in zip(groups, self.parameters, strict=False):
            group_options = {key: v for key, v in group.items() if isinstance(v, _OPTIONS)}
            group_options["params"] = list(range(first, first + len(members)))
            options.append(group_options)
            first += len(members)
        return options

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of a plain run's optimizer, which every rank has."""
        if self.is_plain:
            self.engine.optimizer.load_state_dict(state)
            return
        self._fill_in(next(iter(state["state"].values()), {}))
        keys = self._keys()
        entries = state["state"]
        for position, parameter in enumerate(itertools.chain(*self.parameters)):
            saved = entries.get(position, {})
            for key in keys:
                if key in saved:
                    self._set(parameter, saved[key], key)
        groups = self.engine.optimizer.param_groups
        for group, saved in zip(groups, state["param_groups"], strict=False):
            for key in group.keys() & saved.keys() - {"params"}:
                group[key] = saved[key]

    def _fill_in(self, saved: Mapping[str, Any]) -> None:
        """Create the inner optimizer's entries of a saved state: tensors are zero, counters have the saved value."""
        zero = self.engine.optimizer
        names = (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        )
        for flat in next((getattr(zero, name) for name in names if hasattr(zero, name)), []):
            entry = self.inner.state[flat]
            for key, value in saved.items():
                if _has_dimensions(value):
                    entry.setdefault(key, torch.zeros_like(flat))
                elif isinstance(entry.get(key), int):
                    # DeepSpeed's own optimizers count in integers.
                    entry[key] = int(value)
                else:
                    entry[key] = _copied(value)
        self._link()

    def _link(self) -> None:
        """Connect parameters to the entries of their state.

        ZeRO does so once, after the first group has stepped, when the other groups have no entries yet.
        """
        deepspeed.link_optimizer_state(self.engine.optimizer)

    def _set(self, parameter: Any, value: torch.Tensor, key: str | None) -> None:
        """Fill this rank's partition of a parameter's fp32 weights, or of an entry of its state."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
        from deepspeed.utils.tensor_fragment import (
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.detach().to(device=self.engine.device, dtype=torch.float32)
        set_weights, set_entry = safe_set_full_fp32_param, safe_set_full_optimizer_state
        if hasattr(parameter, "ds_id"):
            # The last rank's partition is padded, which DeepSpeed's functions for full values do not handle.
            set_weights, set_entry = safe_set_local_fp32_param, safe_set_local_optimizer_state
            size = parameter.ds_tensor.ds_numel
            shard = value.flatten()[size * dist.get_rank() :][:size]
            value = torch.nn.functional.pad(shard, (0, size - shard.numel()))
        elif not deepspeed.has_fp32_fragment(parameter):
            return
        if key is None:
            set_weights(parameter, value)
        else:
            set_entry(parameter, value, key)


@contextlib.contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which parameters that ZeRO-3 shards are unsharded on every rank. Others are unchanged.

    Args:
        params: one parameter or several.
        modifier_rank: the rank whose changes all ranks get at the end of the block; None if none writes.
        fwd_module: the module whose forward uses the parameters, if it is not their owner.
        enabled: whether to gather at all.
    """
    if isinstance(params, torch.Tensor):
        listed = [params]
    else:
        listed = list(params)
    # DeepSpeed marks each parameter that it shards.
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in listed):
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(listed, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


def has_master(value: torch.Tensor) -> bool:
    """Whether an engine trains a parameter. Stage 3 also shards models for inference, without an optimizer."""
    if hasattr(value, "ds_id") and not deepspeed.is_trained_by_zero3(value):
        return False
    return value.requires_grad


def _full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter that ZeRO 3 may have sharded."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _has_dimensions(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value


if TYPE_CHECKING:
    from .engine import Engine


class EngineModel(PreparedModel):
    """A DeepSpeed engine. `state` takes and loads its full state."""

    is_partial = True

    module: Engine

    def __init__(self, engine: Engine, precision: Precision, state: EngineState) -> None:
        super().__init__(engine, precision)
        self.state = state

    @property
    def inner(self) -> nn.Module:
        """The module inside the engine."""
        return self.module.module

    @property
    def template(self) -> nn.Module:
        """The user's names and shapes, which ZeRO's parameters do not have."""
        return self.state.skeleton

    def state_dict(self) -> dict[str, Any]:
        """The weights that the engine computes with. Raises ValueError if stage 3 is not configured to gather them."""
        return self.state.computing_weights()

    def checkpoint_state_dict(self) -> dict[str, Any]:
        """The full state with the optimizer's fp32 weights: on the host of rank 0, empty on the other ranks."""
        return self.state.model_state()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which every rank has."""
        self.state.load_model_state(state, strict)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the engine made this optimizer."""
        return getattr(self.module, "optimizer", None) is optimizer

    def prepared_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        """The engine's optimizer."""
        return EngineOptimizer(optimizer, self)

    def release(self) -> None:
        """Free the engine's memory and hooks."""
        self.module.destroy()


class EngineOptimizer(PreparedOptimizer):
    """The optimizer of an `EngineModel`."""

    model: EngineModel

    def state_dict(self) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        return self.model.state.optimizer_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer state of a single process, which every rank has."""
        self.model.state.load_optimizer_state(state)

    def group_shapes(self) -> GroupShapes:
        """Names and shapes in each group, as the optimizer had them before ZeRO."""
        return self.model.state.groups()


class UntrainedModel(PreparedModel):
    """A model that does not train, next to an engine: each process has all of it, and sends nothing for it."""
