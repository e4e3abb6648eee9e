# SPDX-License-Identifier: Apache-2.0
"""State of sharded models and optimizers: whole on rank 0, or each rank its part, and their files."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..core.constants import MODEL_NAME, OPTIMIZER_NAME
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import atomic_write
from . import materialize

FSDP_MODEL_NAME = f"{MODEL_NAME}_fsdp"


def full_model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state under plain names, copied to the host of rank 0; empty on the others. Every rank calls it."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return _detached(state)


def load_full_model_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device, strict: bool = True
) -> None:
    """Take a whole state, which rank 0 alone needs to hold, one tensor at a time. Every rank calls it.

    Raises PrepareError for a tensor of the model that the state lacks (with `strict`) or has in another shape, and
    CheckpointError for one that the model lacks.
    """
    targets = _state_tensors(model)
    known = {name for names, _ in targets for name in names}
    if strict and (unknown := [name for name in state if name not in known]):
        raise CheckpointError(f"the state holds {len(unknown)} tensors the model does not: {', '.join(unknown[:5])}")
    # A tied tensor has several names, and a state may hold it under any of them.
    chosen = [(next((name for name in names if name in state), names[0]), tensor) for names, tensor in targets]
    offered = [[name for name, _ in chosen]]
    dist.broadcast_object_list(offered, src=0, device=device)
    chosen = [(name, tensor) for name, (_, tensor) in zip(offered[0], chosen, strict=True)]
    materialize.spread(dict(state), chosen, device, strict=strict)


def _state_tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """(its plain names, tensor) for all that a state dict holds."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    persistent = {materialize.canonical_name(name) for name in model.state_dict()}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            name = materialize.canonical_name(name)
            if name in persistent:
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state by parameter name, copied to the host of rank 0; empty on the others. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # What torch gives aliases the optimizer's counters, which its next step would change under the reader.
    return copy.deepcopy(get_optimizer_state_dict(model, _plain(optimizer), options=options))  # type: ignore[return-value]


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take a whole state, which rank 0 alone needs to hold. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=False)
    set_optimizer_state_dict(model, _plain(optimizer), copy.deepcopy(dict(state)), options=options)


class ShardedState:
    """Models and optimizers that no rank holds whole, as files that any number of ranks can read.

    Writes `pytorch_model_fsdp_<i>` and `optimizer_<i>` folders of torch.distributed.checkpoint.
    `optimizers` are given with the model whose parameters they train.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[tuple[torch.optim.Optimizer, nn.Module]] = ()
    ) -> None:
        self.models = list(models)
        self.optimizers = [(_plain(optimizer), model) for optimizer, model in optimizers]
        self._group: dist.ProcessGroup | None = None

    def stage(self) -> Callable[[Path], None]:
        """Copy this rank's part to host memory; the callable writes it below a folder, also from another thread."""
        if self._group is None:
            # Writing talks too; on a group of its own it cannot get between the training's messages.
            self._group = dist.new_group(backend="gloo")
        writing = self._group
        staged = {name: _host_copy(state) for name, state in self._states().items()}

        def write(folder: Path) -> None:
            for name, state in staged.items():
                dcp.save(state, checkpoint_id=str(folder / name), process_group=writing)

        return write

    def load(self, folder: Path, strict: bool = True) -> None:
        """Read this rank's part of what any number of ranks has written below a folder."""
        for name, state in self._states().items():
            _read(state, folder / name, strict)
            self._set(name, state, strict)

    def _states(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for index, model in enumerate(self.models):
            found[f"{FSDP_MODEL_NAME}_{index}"] = {"model": get_model_state_dict(model)}
        for index, (optimizer, model) in enumerate(self.optimizers):
            found[f"{OPTIMIZER_NAME}_{index}"] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        return found

    def _set(self, name: str, state: dict[str, Any], strict: bool) -> None:
        index = int(name.rpartition("_")[2])
        if "model" in state:
            options = StateDictOptions(strict=strict)
            set_model_state_dict(self.models[index], state["model"], options=options)
        else:
            optimizer, model = self.optimizers[index]
            set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _read(state: dict[str, Any], folder: Path, strict: bool) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"rank {dist.get_rank()}: {folder} is not there; it would hold this part of the state")
    planner = dcp.DefaultLoadPlanner(allow_partial_load=not strict)
    try:
        dcp.load(state, checkpoint_id=str(folder), planner=planner)
    except (RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"rank {dist.get_rank()} cannot read {folder}: {error}") from error


# The API's functions, with its files. `accelerator` gives the processes and the device.


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model below `output_dir`, in the form of `fsdp_plugin.state_dict_type`. Every rank calls it.

    FULL: `pytorch_model_fsdp[_i].bin`; SHARDED: the folder `pytorch_model_fsdp_<i>`, or one file a rank without
    `use_dcp`. `adapter_only` leaves out frozen parameters.
    """
    folder, model = Path(output_dir), _sharded(model)
    folder.mkdir(parents=True, exist_ok=True)
    kind = fsdp_plugin.state_dict_type.name
    if kind == "FULL_STATE_DICT":
        state: dict[str, Any] = full_model_state(model)
        if accelerator.is_main_process:
            _save(_adapters(model, state) if adapter_only else state, folder / _file(FSDP_MODEL_NAME, model_index))
    else:
        state = get_model_state_dict(model)
        state = _adapters(model, state) if adapter_only else state
        target = folder / f"{FSDP_MODEL_NAME}_{model_index}"
        _save_shards({"model": state}, state, target, use_dcp)
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_model` has saved into a sharded model. Every rank calls it."""
    folder, model = Path(input_dir), _sharded(model)
    if fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT":
        path = folder / _file(FSDP_MODEL_NAME, model_index)
        state = _load(path) if accelerator.is_main_process else {}
        load_full_model_state(model, state, accelerator.device, strict=not adapter_only)
        return
    source = folder / f"{FSDP_MODEL_NAME}_{model_index}"
    state = get_model_state_dict(model)
    state = _adapters(model, state) if adapter_only else state
    _load_shards({"model": state}, state, source, use_dcp)
    set_model_state_dict(model, state, options=StateDictOptions(strict=not adapter_only))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the optimizer of a sharded model: FULL `optimizer[_i].bin`, SHARDED `optimizer_<i>`. Every rank calls it."""
    folder, model = Path(output_dir), _sharded(model)
    folder.mkdir(parents=True, exist_ok=True)
    if fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT":
        state = full_optimizer_state(model, optimizer)
        if accelerator.is_main_process:
            _save(state, folder / _file(OPTIMIZER_NAME, optimizer_index))
    else:
        state = get_optimizer_state_dict(model, _plain(optimizer))  # type: ignore[assignment]
        _save_shards({"optimizer": state}, state, folder / f"{OPTIMIZER_NAME}_{optimizer_index}", use_dcp)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` has saved. Every rank calls it. An optimizer holds what is trained in any case,
    so that `adapter_only` changes nothing here."""
    folder, model = Path(input_dir), _sharded(model)
    if fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT":
        path = folder / _file(OPTIMIZER_NAME, optimizer_index)
        load_full_optimizer_state(model, optimizer, _load(path) if accelerator.is_main_process else {})
        return
    state: Any = get_optimizer_state_dict(model, _plain(optimizer))
    _load_shards({"optimizer": state}, state, folder / f"{OPTIMIZER_NAME}_{optimizer_index}", use_dcp)
    set_optimizer_state_dict(model, _plain(optimizer), state)


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Put a folder of shards together into `output_path`: model.safetensors or pytorch_model.bin. One process does it.

    Raises CheckpointError for a folder that holds no shards of a model.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    folder, target = Path(checkpoint_dir), Path(output_path)
    if not (folder / ".metadata").is_file():
        nested = sorted(path.parent.name for path in folder.glob(f"{FSDP_MODEL_NAME}_*/.metadata"))
        hint = f" Its folder {nested[0]} does: pass that." if nested else ""
        raise CheckpointError(f"{folder} holds no shards (there is no .metadata file).{hint}")
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(str(folder))
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    weights = state["model"] if list(state) == ["model"] else state
    if not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{folder} holds something else than a model's weights (an optimizer's state?)")
    target.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        from safetensors.torch import save_file

        contiguous = {name: value.clone().contiguous() for name, value in weights.items()}
        save_file(contiguous, str(target / "model.safetensors"), metadata={"format": "pt"})
    else:
        _save(weights, target / f"{MODEL_NAME}.bin")
    if remove_checkpoint_dir:
        shutil.rmtree(folder)


def _save_shards(named: dict[str, Any], state: Any, target: Path, use_dcp: bool) -> None:
    if use_dcp:
        dcp.save(named, checkpoint_id=str(target))
    else:
        _save(_local(state), target.with_name(f"{target.name}_rank{dist.get_rank()}.bin"))


def _load_shards(named: dict[str, Any], state: Any, source: Path, use_dcp: bool) -> None:
    if use_dcp:
        _read(named, source, strict=True)
        return
    path = source.with_name(f"{source.name}_rank{dist.get_rank()}.bin")
    try:
        _fill(state, _load(path))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"rank {dist.get_rank()}: {path} was written by another layout ({error}); only use_dcp=True reshards"
        ) from error


def _local(value: Any) -> Any:
    """A state with this rank's part of each tensor, copied."""
    if isinstance(value, DTensor):
        return value.to_local().detach().cpu().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _local(item) for key, item in value.items()}
    return [_local(item) for item in value] if isinstance(value, list) else value


@torch.no_grad()
def _fill(state: Any, source: Any) -> Any:
    """Write the parts of `_local` back into a state of the same structure, in place."""
    if isinstance(state, torch.Tensor):
        target = state.to_local() if isinstance(state, DTensor) else state
        if target.shape != source.shape:
            raise RuntimeError(f"a part of shape {tuple(source.shape)} where {tuple(target.shape)} is expected")
        target.copy_(source)
        return state
    if isinstance(state, Mapping):
        for key in state:
            state[key] = _fill(state[key], source[key])  # type: ignore[index]
        return state
    if isinstance(state, list) and any(isinstance(item, (Mapping, torch.Tensor)) for item in state):
        return [_fill(item, part) for item, part in zip(state, source, strict=True)]
    return source


def _host_copy(value: Any) -> Any:
    """A copy in host memory that nothing in the run shares; a sharded tensor stays one."""
    if isinstance(value, DTensor):
        part = value.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(
            part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _host_copy(item) for key, item in value.items()}
    return [_host_copy(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def _detached(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that shares no memory with the model; names of one tied tensor share theirs with each other."""
    copies: dict[int, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]

    return {name: own(value) for name, value in state.items()}


def _adapters(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    trained = {materialize.canonical_name(name) for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: value for name, value in state.items() if name in trained}
    if state and not kept:
        raise ConfigurationError("adapter_only=True, but the model has no parameter that is trained")
    return kept


def _sharded(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, FSDPModule):
        raise CheckpointError(f"{type(model).__name__} is not sharded by FSDP2: hand over the model as prepared")
    return inner


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]


def _file(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _save(state: Any, path: Path) -> None:
    with atomic_write(path) as file:
        torch.save(state, file)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    return torch.load(path, map_location="cpu", weights_only=True)
