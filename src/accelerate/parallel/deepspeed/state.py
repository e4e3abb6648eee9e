# SPDX-License-Identifier: Apache-2.0
"""The full state of a DeepSpeed engine of any ZeRO stage, as in a plain run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import CheckpointError, ConfigurationError
from ...torch_internals import deepspeed
from ..materialize import canonical_name, complete, named_parameters, skeleton, without_storage

if TYPE_CHECKING:
    from .engine import Engine


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
        return [
            {names[id(p)]: list(getattr(p, "ds_shape", p.shape)) for p in group if id(p) in names}
            for group in self.parameters
        ]

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
                "Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save` in DeepSpeed "
                "config is False. Set it to True there, or `zero3_save_16bit_model` in the plugin. `save_state` saves "
                "all of the fp32 weights; `model.save_checkpoint(folder)` the engine's own checkpoint, from which "
                "`zero_to_fp32.py` takes them."
            )
        return self.model_state(master_weights=False)

    def model_state(self, master_weights: bool = True) -> dict[str, Any]:
        """The full state, with the optimizer's fp32 weights: on the host of rank 0, empty on the others."""
        from deepspeed.utils import safe_get_full_fp32_param

        kept: dict[str, Any] = {}
        is_main = dist.get_rank() == 0
        taken: dict[int, torch.Tensor | None] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and id(value) not in taken:
                # Every rank takes part in gathering a tensor, once for all of its names; rank 0 keeps it.
                full: torch.Tensor | None = (
                    safe_get_full_fp32_param(value)
                    if master_weights and has_master(value)
                    else None
                )
                if full is not None:
                    full = full.view(getattr(value, "ds_shape", value.shape))
                else:
                    with GatheredParameters(value):
                        full = value.detach().clone()
                if is_main:
                    taken[id(value)] = full.detach().to("cpu", copy=True)
                else:
                    taken[id(value)] = None
            if is_main:
                if isinstance(value, torch.Tensor):
                    kept[canonical_name(name)] = taken[id(value)]
                else:
                    kept[canonical_name(name)] = value
        return kept

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a full state, which every rank has. Raises CheckpointError for names that one of the two lacks."""
        full = complete(state, self.light)
        if strict and (
            differing := sorted(set(state) - set(self.light) | set(self.light) - set(full))
        ):
            raise CheckpointError(
                f"the state and the model differ in {len(differing)} names: {', '.join(differing[:5])}"
            )
        for name, value in full.items():
            shape = getattr(self.light[name], "shape", None)
            if isinstance(value, torch.Tensor) and value.shape != shape:
                sharded = " ZeRO stage 3 had sharded it when the state was taken: accelerator.get_state_dict gathers."
                raise CheckpointError(
                    f"{name} has the shape {list(value.shape)} in the state and {list(shape or ())} in the model."
                    + ("" if value.numel() else sharded)
                )
        for name, target in self.module.state_dict(keep_vars=True).items():
            value = full.get(canonical_name(name))
            if not isinstance(target, torch.Tensor) or value is None:
                continue
            with GatheredParameters(target, modifier_rank=0):
                target.data.copy_(value)
            if has_master(target):
                self._set(target, value, None)

    @staticmethod
    def _own(parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """This rank's padded shard of a full value of a parameter that ZeRO-3 shards."""
        size = parameter.ds_tensor.ds_numel
        own = value.detach().flatten()[size * dist.get_rank() :][:size]
        return torch.nn.functional.pad(own, (0, size - own.numel()))

    # -- optimizer

    @property
    def inner(self) -> Any:
        """The optimizer that steps; ZeRO's own is around it."""
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer steps the model's own parameters: no ZeRO, no master weights."""
        parameters = itertools.chain(*self.parameters)
        return not any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in parameters)

    def _keys(self) -> list[str]:
        """The entries that are tensors of a parameter's shape (exp_avg, ...)."""
        entries = [entry for entry in self.inner.state.values() if entry]
        return sorted(
            {
                k
                for entry in entries
                for k, v in entry.items()
                if isinstance(v, torch.Tensor) and v.dim()
            }
        )

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
        first: dict[str, Any] = next((entry for entry in self.inner.state.values() if entry), {})
        scalars = {k: v for k, v in first.items() if k not in keys}
        found: dict[int, dict[str, Any]] = {}
        for position, parameter in enumerate(itertools.chain(*self.parameters)):
            full = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
            if dist.get_rank() == 0 and all(value is not None for value in full.values()) and keys:
                shape = getattr(parameter, "ds_shape", parameter.shape)
                found[position] = {
                    **{
                        k: v.clone() if isinstance(v, torch.Tensor) else v
                        for k, v in scalars.items()
                    },
                    **{key: value.view(shape).to("cpu", copy=True) for key, value in full.items()},
                }
        if dist.get_rank() == 0:
            return {"state": found, "param_groups": self._options()}
        return {}

    def _options(self) -> list[dict[str, Any]]:
        """The options of each group, with its parameters by number."""
        options: list[dict[str, Any]] = []
        first = 0
        for group, members in zip(
            self.engine.optimizer.param_groups, self.parameters, strict=False
        ):
            kept = {
                key: value
                for key, value in group.items()
                if key != "params"
                and isinstance(value, int | float | str | tuple | list | torch.Tensor | None)
            }
            options.append({**kept, "params": list(range(first, first + len(members)))})
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
        for position, parameter in enumerate(itertools.chain(*self.parameters)):
            for key, value in state["state"].get(position, {}).items():
                if key in keys:
                    self._set(parameter, value, key)
        for group, saved in zip(
            self.engine.optimizer.param_groups, state["param_groups"], strict=False
        ):
            group.update(
                {key: value for key, value in saved.items() if key in group and key != "params"}
            )

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
                if isinstance(value, torch.Tensor) and value.dim():
                    entry.setdefault(key, torch.zeros_like(flat))
                # DeepSpeed's own optimizers count in integers
                elif isinstance(entry.get(key), int):
                    entry[key] = int(value)
                else:
                    if isinstance(value, torch.Tensor):
                        entry[key] = value.clone()
                    else:
                        entry[key] = value
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
            value = self._own(parameter, value)
        elif not hasattr(parameter, "_hp_mapping"):
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
    """A block in which parameters that ZeRO-3 shards are unsharded on every rank. Others are left as they are.

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
    return value.requires_grad and (hasattr(value, "_z3_optimizer") or not hasattr(value, "ds_id"))
