# SPDX-License-Identifier: Apache-2.0
"""Checkpoints brought into a model: one tensor at a time, each to the place that a device map gives it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError, ConfigurationError
from ..core.modules import model_has_dtensor
from .names import DeviceMap, Place, as_device_map, entry_for, tensor_at
from .offload import load_offloaded_weight, offload_weight, save_offload_index
from .sizes import as_dtype
from .tensors import PACKED, as_device, quantize_8bit, set_module_tensor_to_device
from .tied import find_tied_parameters, retie_parameters
from .weight_files import SafetensorsFile, checkpoint_files, open_weights

logger = logging.getLogger(__name__)

# How many bytes are handed to `load_state_dict` at once: each call visits all modules, each byte takes memory.
_PORTION = 32 * 2**20


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None) -> dict[str, Any]:
    """The whole state dict in a file of safetensors or of `torch.save` (tensors only, no code is run).

    Each tensor is on the device that `device_map` gives it; on the CPU where that is `"disk"` or nothing.
    """
    state: dict[str, Any] = {}
    with open_weights(checkpoint_file, mapped=False) as weights:
        for name in weights:
            entry = None if device_map is None else entry_for(name, device_map)
            place = "cpu" if entry is None or device_map is None else device_map[entry]
            tensor = weights[name]
            state[name] = tensor if place in ("cpu", "disk") else tensor.to(as_device(place))
    return state


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint (a file, the index of a sharded one, or a folder with either) into `model`, in place.

    With `device_map` each tensor goes where the map says: to a device, or (`"disk"`) as a file to `offload_folder`,
    and the model may be on the meta device. Without one the model keeps its devices. No more than one tensor of the
    checkpoint is in memory besides the model's own.

    `dtype` is what floating point weights are converted to, but for those in `keep_in_fp32_modules` (parts of names).
    `offload_state_dict` puts the CPU's weights to disk until the last file is read; `offload_buffers` writes buffers
    to disk like weights; `offload_8bit_bnb` quantises what is offloaded from 8-bit layers. With `strict` a key that
    the model does not know, or lacks, is a CheckpointError; without, it is named in the log.

    `full_state_dict=False` says that the checkpoint has the shards of this process, for a sharded model;
    `broadcast_from_rank0` that rank 0 alone reads it and sends it to all (both without a device map).

    Tie the weights of the model first. Raises ValueError where a folder for offloaded weights is missing, a tensor
    has no device in the map, or another shape than the model's.
    """
    tied = find_tied_parameters(model)
    casts = _Casts(as_dtype(dtype), keep_in_fp32_modules)
    if device_map is None:
        sharded = model_has_dtensor(model)
        if sharded and dtype is not None:
            raise ConfigurationError(
                f"dtype={dtype}: the parameters of {type(model).__name__} are sharded already and keep their dtype. "
                "Convert the model before it is sharded, or use mixed precision."
            )
        if sharded or not full_state_dict or broadcast_from_rank0:
            result = _load_distributed(model, checkpoint, full_state_dict, broadcast_from_rank0, tied)
        else:
            result = _load_whole(model, checkpoint_files(checkpoint), tied)
        casts.apply(model, result.loaded)
    else:
        if offload_folder is None and "disk" in device_map.values():
            raise ValueError(
                "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`."
            )
        files = checkpoint_files(checkpoint)
        placement = _Placement(model, device_map, offload_folder, casts, offload_buffers, offload_8bit_bnb)
        result = placement.survey(files)
        result.settle(model, tied)
        result.refuse(model, checkpoint, strict)
        placement.load(files, spill=offload_state_dict)
    # The name that was loaded is the one to keep: the others may hold what the model was initialised with.
    retie_parameters(model, [sorted(group, key=lambda name: name not in result.loaded) for group in tied])
    result.refuse(model, checkpoint, strict)
    result.tell(model, checkpoint)


class _Result:
    """Which names of a checkpoint reached the model, which it did not know, and which it lacks."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.unexpected: set[str] = set()
        self.missing: set[str] = set()

    def settle(self, model: nn.Module, tied: list[list[str]]) -> None:
        """Find what is missing: a name that is tied to one that was loaded is not."""
        had = self.loaded.union(*(group for group in tied if self.loaded.intersection(group)))
        self.missing = {name for name in model.state_dict() if name not in had and not name.endswith("_extra_state")}

    def refuse(self, model: nn.Module, checkpoint: Any, strict: bool) -> None:
        """Raises CheckpointError where the two must match and do not."""
        if strict and (self.unexpected or self.missing):
            parts = [
                f"{title}: {', '.join(sorted(names))}"
                for title, names in (
                    ("unknown to the model", self.unexpected),
                    ("not in the checkpoint", self.missing),
                )
                if names
            ]
            kind = type(model).__name__
            raise CheckpointError(f"{checkpoint} does not fit {kind} (strict=True): {'; '.join(parts)}")

    def tell(self, model: nn.Module, checkpoint: Any) -> None:
        """Name what did not match in the log."""
        kind = type(model).__name__
        if self.unexpected:
            logger.warning(
                f"Some weights of the model checkpoint at {checkpoint} were not used when initializing {kind}: "
                f"{sorted(self.unexpected)}. This may or may not be an issue - make sure that the checkpoint does not "
                "have unnecessary parameters, or that the model definition correctly corresponds to the checkpoint."
            )
        if self.missing:
            logger.warning(f"Some weights of {kind} are not in the checkpoint {checkpoint}: {sorted(self.missing)}.")


class _Casts:
    """What each tensor of a checkpoint is converted to."""

    def __init__(self, dtype: torch.dtype | None, keep_in_fp32: list[str] | None) -> None:
        self.dtype = dtype
        self.keep = keep_in_fp32 or []

    def wanted(self, name: str, tensor: torch.Tensor) -> torch.dtype | None:
        """The dtype for a tensor, or None where it takes that of the model."""
        if self.dtype is None or not tensor.is_floating_point():
            return None
        kept = any(name == part or f"{part}." in name for part in self.keep)
        return torch.float32 if kept else self.dtype

    def apply(self, model: nn.Module, names: set[str]) -> None:
        """Convert the named tensors of a model where they are."""
        if self.dtype is None:
            return
        # Tied names first become one parameter again after this; each of them is converted on its own.
        for name in sorted(names):
            tensor = tensor_at(model, name)
            wanted = self.wanted(name, tensor)
            if wanted not in (None, tensor.dtype):
                set_module_tensor_to_device(model, name, tensor.device, dtype=wanted)


def _load_whole(model: nn.Module, files: list[str], tied: list[list[str]]) -> _Result:
    """Load into a model that keeps its devices, some modules at a time, by its own `load_state_dict`."""
    result = _Result()
    result.missing = set(model.state_dict())

    def flush(part: dict[str, Any]) -> None:
        if not part:
            return
        answer = model.load_state_dict(part, strict=False)
        result.unexpected.update(answer.unexpected_keys)
        result.missing.intersection_update(answer.missing_keys)
        result.loaded.update(part.keys() - answer.unexpected_keys)
        part.clear()

    for file in files:
        with open_weights(file) as weights:
            part: dict[str, Any] = {}
            for names in _portions(model, weights):
                part.update((name, weights[name]) for name in names)
                if sum(tensor.nbytes for tensor in part.values() if isinstance(tensor, torch.Tensor)) > _PORTION:
                    flush(part)
            flush(part)
    for group in tied:
        if result.loaded.intersection(group):
            result.missing.difference_update(group)
    return result


def _portions(model: nn.Module, weights: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names in a file in portions that hold whole modules; all at once where a module loads more than its own."""
    whole = any(
        module._load_state_dict_pre_hooks
        or (type(module)._load_from_state_dict is not nn.Module._load_from_state_dict and any(module.children()))
        or type(module).load_state_dict is not nn.Module.load_state_dict
        for module in model.modules()
    )
    if whole or not isinstance(weights, SafetensorsFile):
        # What torch.load maps stays mapped as long as the state dict lives.
        yield list(weights)
        return
    modules = {name: "" for name, _ in model.named_modules()}
    groups: dict[str, list[str]] = {}
    for name in weights:
        groups.setdefault(entry_for(name, modules) or "", []).append(name)
    yield from groups.values()


def _load_distributed(
    model: nn.Module, checkpoint: Any, full: bool, broadcast: bool, tied: list[list[str]]
) -> _Result:
    """Load into a model whose parameters may be sharded, all processes together; rank 0 may be alone to read."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if broadcast and not dist.is_initialized():
        raise ValueError(
            "broadcast_from_rank0=True sends the weights from one process to the others, and this one is alone: the "
            "process group has not been initialized (a PartialState or an Accelerator does it)"
        )
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=False)
    result = _Result()
    if not broadcast:
        for file in checkpoint_files(checkpoint):
            with open_weights(file) as weights:
                answer = set_model_state_dict(model, dict(weights), options=options)
                result.unexpected.update(answer.unexpected_keys)
                result.loaded |= set(weights)
    else:
        files, error = _agreed(checkpoint)
        if error is not None:
            raise CheckpointError(f"rank 0 found no checkpoint to send: {error}")
        for file in files:
            with ExitStack() as stack:
                weights = stack.enter_context(open_weights(file)) if dist.get_rank() == 0 else {}
                names = [list(weights)]
                dist.broadcast_object_list(names, src=0)
                set_model_state_dict(model, dict(weights), options=options)
            result.loaded.update(names[0])
        result.unexpected = result.loaded - set(model.state_dict())
    result.loaded -= result.unexpected
    result.settle(model, tied)
    return result


def _agreed(checkpoint: Any) -> tuple[list[str], str | None]:
    """The files that rank 0 found, or why it found none, on every rank: the others may not see them."""
    import torch.distributed as dist

    answer: list[Any] = [([], None)]
    if dist.get_rank() == 0:
        try:
            answer = [(checkpoint_files(checkpoint), None)]
        except (ValueError, CheckpointError) as error:
            answer = [([], str(error))]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


class _Placement:
    """The tensors of a checkpoint on their way to the devices, the disk or the CPU."""

    def __init__(
        self,
        model: nn.Module,
        device_map: DeviceMap,
        offload_folder: str | os.PathLike[str] | None,
        casts: _Casts,
        offload_buffers: bool,
        offload_8bit: bool,
    ) -> None:
        self.model = model
        self.device_map = as_device_map(device_map)
        self.folder = offload_folder
        self.casts = casts
        self.offload_8bit = offload_8bit
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.known = parameters | buffers
        self.to_disk = self.known if offload_buffers else parameters
        self.index: dict[str, Any] = {}
        self.spilled: dict[str, Any] = {}

    def survey(self, files: list[str]) -> _Result:
        """What the files hold, before any of it is read."""
        result = _Result()
        for file in files:
            with open_weights(file) as weights:
                names = set(weights)
            result.loaded |= names & self.known
            result.unexpected |= {name for name in names - self.known if not _belongs_to_8bit(name, self.known)}
        return result

    def load(self, files: list[str], spill: bool) -> None:
        with ExitStack() as stack:
            spill_folder = stack.enter_context(tempfile.TemporaryDirectory()) if spill else None
            for file in files:
                with open_weights(file) as weights:
                    for name in weights:
                        if name in self.known:
                            self._place(name, weights, spill_folder)
            if self.folder is not None:
                save_offload_index(self.index, self.folder)
            if spill_folder is not None:
                load_offloaded_weights(self.model, self.spilled, spill_folder)

    def _place(self, name: str, weights: Mapping[str, Any], spill_folder: str | None) -> None:
        entry = entry_for(name, self.device_map)
        if entry is None:
            raise ValueError(f"{name} doesn't have any device set.")
        place = self.device_map[entry]
        tensor = weights[name]
        wanted = self.casts.wanted(name, tensor)
        statistics = weights.get(statistics_name(name)) if tensor.dtype == torch.int8 else None
        stays_whole = not self.offload_8bit or type(tensor_at(self.model, name)).__name__ != "Int8Params"
        if place in ("cpu", "disk") and tensor.is_floating_point() and not stays_whole:
            tensor, statistics = quantize_8bit(tensor)
            wanted = None
        if place == "disk" and name in self.to_disk:
            self._offload(name, tensor, wanted, statistics, self.folder, self.index)
        elif place in ("cpu", "disk") and spill_folder is not None:
            self._offload(name, tensor, wanted, statistics, spill_folder, self.spilled)
        else:
            # A buffer that is not offloaded runs with its module: it waits on the CPU until the model is dispatched.
            device: Place = "cpu" if place == "disk" else place
            if device == "cpu" and not isinstance(weights, SafetensorsFile):
                tensor = tensor.clone()
            set_module_tensor_to_device(
                self.model, name, device, value=tensor, dtype=wanted, fp16_statistics=statistics, clear_cache=False
            )

    def _offload(
        self,
        name: str,
        tensor: torch.Tensor,
        wanted: torch.dtype | None,
        statistics: torch.Tensor | None,
        folder: Any,
        index: dict[str, Any],
    ) -> None:
        old = tensor_at(self.model, name)
        if old.shape != tensor.shape and type(old).__name__ not in PACKED:
            raise ValueError(
                f'Trying to set a tensor of shape {tensor.shape} in "{name}" (which has shape {old.shape}), this '
                "looks incorrect."
            )
        set_module_tensor_to_device(self.model, name, "meta", dtype=wanted, clear_cache=False)
        offload_weight(tensor if wanted is None else tensor.to(wanted), name, folder, index)
        if statistics is not None:
            offload_weight(statistics, statistics_name(name), folder, index)


def statistics_name(weight_name: str) -> str:
    """The name under which the row scales of an 8-bit weight are stored: `layer.SCB` for `layer.weight`."""
    return weight_name.replace("weight", "SCB") if weight_name.endswith("weight") else f"{weight_name}.SCB"


def _belongs_to_8bit(name: str, known: set[str]) -> bool:
    """Whether an entry is one of those that go with an 8-bit weight: its scales, or how it is laid out."""
    stem, _, leaf = name.rpartition(".")
    return leaf in ("SCB", "weight_format") and (f"{stem}.weight" if stem else "weight") in known


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Bring the weights of an index of `offload_weight` back into `model`, on the CPU; the folder may go then."""
    for name, entry in (index or {}).items():
        if name.endswith("SCB"):
            continue
        path = os.path.join(offload_folder, f"{name}.dat")
        scales = statistics_name(name)
        statistics = None
        if index and scales in index:
            statistics = load_offloaded_weight(os.path.join(offload_folder, f"{scales}.dat"), index[scales]).clone()
        weight = load_offloaded_weight(path, entry).clone()
        set_module_tensor_to_device(model, name, "cpu", value=weight, fp16_statistics=statistics)
