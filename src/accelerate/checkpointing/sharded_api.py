# SPDX-License-Identifier: Apache-2.0
"""The API's own functions for sharded models: saved and loaded in torch.distributed.checkpoint's format."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..config.fsdp import FullyShardedDataParallelPlugin
from ..core.constants import MODEL_NAME, OPTIMIZER_NAME
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import user_path
from ..core.tensor_files import write_atomically
from ..optimizer import plain_optimizer
from ..parallel.fsdp.state import full_options, optimizer_state
from ..state import AcceleratorState, is_initialized
from .compat import load_pickled
from .layout import model_shards, numbered, optimizer_shards
from .run_state import StateDict
from .sharded import FLAT, load_optimizer, read_shards, save_entries

_FSDP_MODEL = f"{MODEL_NAME}_fsdp"


class _Waits(Protocol):
    """An `Accelerator`, or any other object with this method."""

    def wait_for_everyone(self) -> None: ...


def _kind(fsdp_plugin: FullyShardedDataParallelPlugin) -> str:
    """FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT, from torch's enum or its name."""
    kind = fsdp_plugin.state_dict_type
    name = getattr(kind, "name", kind)
    if name not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"):
        raise ConfigurationError(
            f"state_dict_type={kind!r}: choose FULL_STATE_DICT or SHARDED_STATE_DICT"
        )
    return str(name)


def _default_options(model: torch.nn.Module) -> StateDictOptions | None:
    if is_initialized():
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
    else:
        plugin = None
    if plugin is not None and _kind(plugin) == "FULL_STATE_DICT":
        return full_options(model, getattr(plugin, "state_dict_config", None))
    return None


def _get_model_state_dict(
    model: torch.nn.Module, adapter_only: bool = False, sd_options: StateDictOptions | None = None
) -> StateDict:
    """The weights of a sharded model, by default in the state dict type of the run's plugin; every rank calls it."""
    return _weights(model, sd_options or _default_options(model), adapter_only)


def _set_model_state_dict(
    model: torch.nn.Module,
    state_dict: StateDict,
    adapter_only: bool = False,
    sd_options: StateDictOptions | None = None,
) -> Any:
    """Load what `_get_model_state_dict` gave into a sharded model; every rank calls it."""
    if sd_options is None:
        is_full, strict = _default_options(model) is not None, not adapter_only
        if is_full:
            sd_options = _from_rank_0(strict)
        else:
            sd_options = StateDictOptions(strict=strict)
    if adapter_only:
        # peft leaves the adapter's name out of its keys; the values are those of the model.
        weights = _weights(model, None, adapter_only=False)
        names = {id(value): name for name, value in weights.items()}
        adapter = _adapter(model, weights)
        state_dict = {
            names[id(value)]: state_dict[key] for key, value in adapter.items() if key in state_dict
        }
    return set_model_state_dict(model, state_dict, options=sd_options)


def _weights(
    model: torch.nn.Module, options: StateDictOptions | None, adapter_only: bool
) -> StateDict:
    state = dict(get_model_state_dict(model, options=options))
    if adapter_only:
        return _adapter(model, state)
    return state


def _adapter(model: torch.nn.Module, state: StateDict) -> StateDict:
    inner: Any = getattr(model, "module", model)
    if not state or not hasattr(inner, "peft_config"):
        return state  # rank 0 alone has a full state
    from peft import get_peft_model_state_dict

    return dict(
        get_peft_model_state_dict(inner, state_dict=state, adapter_name=inner.active_adapter)
    )


def _from_rank_0(strict: bool = True) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=dist.is_initialized(), strict=strict
    )


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def _master_weights(
    accelerator: Any, model: torch.nn.Module, *optimizers: torch.optim.Optimizer
) -> contextlib.AbstractContextManager[object]:
    """A block with fp32 master weights instead of cast parameters, where the object is an Accelerator."""
    precision: Any = getattr(accelerator, "precision", None)
    if precision is None:
        return contextlib.nullcontext()
    inner = [plain_optimizer(optimizer) for optimizer in optimizers]
    context: contextlib.AbstractContextManager[object]
    context = precision.swap_in_master_weights(
        [model], inner, [accelerator.prepared_model(model).swappable()]
    )
    return context


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: _Waits,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model below `output_dir`; every rank calls it.

    `pytorch_model_fsdp.bin` for a full state, the folder `pytorch_model_fsdp_<index>` for a sharded one; without
    `use_dcp` a sharded state is one file a rank, as a local one is.
    """
    folder = user_path(output_dir, "output_dir")
    # Each rank of transformers' Trainer (4.57, 5.24) looks for this folder just before this call. If the first rank
    # created it at once, the ranks would disagree about the best checkpoint.
    accelerator.wait_for_everyone()
    folder.mkdir(parents=True, exist_ok=True)
    kind = _kind(fsdp_plugin)
    with _master_weights(accelerator, model):
        if kind == "FULL_STATE_DICT":
            config = getattr(fsdp_plugin, "state_dict_config", None)
            options = full_options(model, config)
            state = _weights(model, options, adapter_only)
            if _rank() == 0:
                write_atomically(state, folder / numbered(_FSDP_MODEL, model_index, ".bin"))
        elif kind == "SHARDED_STATE_DICT" and use_dcp:
            writer = dcp.FileSystemWriter(str(model_shards(folder, model_index)))
            save_entries({"model": _weights(model, None, adapter_only)}, writer)
        else:
            write_atomically(
                _local(_weights(model, None, adapter_only)),
                folder / _rank_file(_FSDP_MODEL, model_index),
            )
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: _Waits,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load what `save_fsdp_model` wrote into a sharded model; every rank calls it.

    A sharded state is read in the form that is there; where both are, `use_dcp` chooses.
    """
    folder = user_path(input_dir, "input_dir")
    options = StateDictOptions(strict=not adapter_only)
    kind = _kind(fsdp_plugin)
    accelerator.wait_for_everyone()
    with _master_weights(accelerator, model):
        if kind == "FULL_STATE_DICT":
            path = folder / numbered(_FSDP_MODEL, model_index, ".bin")
            state = load_pickled(path) if _rank() == 0 else {}
            return _set_model_state_dict(model, state, adapter_only, _from_rank_0(options.strict))
        state = _weights(model, None, adapter_only)
        shards, own = (
            model_shards(folder, model_index),
            folder / _rank_file(_FSDP_MODEL, model_index),
        )
        if shards.is_dir() and (use_dcp or not own.exists()):
            read_shards(shards, state, strict=not adapter_only)
        else:
            _fill_local(state, load_pickled(own))
        return _set_model_state_dict(model, state, adapter_only, options)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: _Waits,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the optimizer of a sharded model: `optimizer.bin` for a full state, else the folder `optimizer_<index>`."""
    folder = user_path(output_dir, "output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    inner = plain_optimizer(optimizer)
    with _master_weights(accelerator, model, optimizer):
        if _kind(fsdp_plugin) == "FULL_STATE_DICT" or not use_dcp:
            config = getattr(fsdp_plugin, "optim_state_dict_config", None)
            options = full_options(model, config)
            state = optimizer_state(model, inner, options)
            if _rank() == 0:
                write_atomically(state, folder / numbered(OPTIMIZER_NAME, optimizer_index, ".bin"))
        else:
            state = optimizer_state(model, inner, FLAT)
            writer = dcp.FileSystemWriter(str(optimizer_shards(folder, optimizer_index)))
            save_entries({"optimizer": state}, writer)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: _Waits,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` wrote; every rank calls it. With `adapter_only` parameters may be missing.

    It is read in the form that is there; where both are, `use_dcp` chooses.
    """
    folder = user_path(input_dir, "input_dir")
    inner = plain_optimizer(optimizer)
    accelerator.wait_for_everyone()
    path = optimizer_shards(folder, optimizer_index)
    file = folder / numbered(OPTIMIZER_NAME, optimizer_index, ".bin")
    with _master_weights(accelerator, model, optimizer):
        if not path.is_dir() or (file.exists() and not use_dcp):
            set_optimizer_state_dict(
                model, inner, load_pickled(file) if _rank() == 0 else {}, options=_from_rank_0()
            )
            return
        load_optimizer(path, model, inner, strict=not adapter_only)


def _rank_file(name: str, index: int) -> str:
    middle = "" if index == 0 else f"_{index}"
    return f"{name}{middle}_rank{_rank()}.bin"


def _local(state: StateDict) -> StateDict:
    return {
        name: value.to_local() if hasattr(value, "to_local") else value
        for name, value in state.items()
    }


def _fill_local(state: StateDict, saved: StateDict) -> None:
    with torch.no_grad():
        for name, value in _local(state).items():
            if name not in saved or saved[name].shape != value.shape:
                raise CheckpointError(
                    f"rank {_rank()}: the local shards do not hold {name} in the shape of this layout"
                )
            value.copy_(saved[name])
