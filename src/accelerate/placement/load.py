# SPDX-License-Identifier: Apache-2.0
"""Loading checkpoints into a model, one tensor at a time, each to its device in a device map."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import CheckpointError, ConfigurationError, WeightFileError
from ..core.modules import model_has_dtensor
from ..core.objects import names_in_words, size_of
from . import logger
from .names import DeviceMap, Place, complete_device_map, device_for, entry_for, join, tensor_at
from .offload import (
    check_folder,
    index_entry,
    load_offloaded_weight,
    offload_weight,
    path_of,
    save_offload_index,
)
from .sizes import as_dtype
from .tensors import (
    PACKED,
    as_device,
    check_devices,
    main_device,
    quantize_8bit,
    set_module_tensor_to_device,
)
from .tied import find_tied_parameters, retie_parameters
from .weight_files import SafetensorsFile, checkpoint_files, indexed_files, open_weights, shapes_in


class Quantizer(Protocol):
    """Quantizes the weights whose names it contains."""

    def __contains__(self, name: str) -> bool: ...

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight `name`, quantized, on the same device."""
        ...


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None
) -> dict[str, Any]:
    """Read the state dict in a safetensors or `torch.save` file (only tensors; no code is run).

    Each tensor is on the device that `device_map` gives it; on the CPU where that is `"disk"` or nothing.
    """
    places = device_map or {}
    state: dict[str, Any] = {}
    for name, tensor in open_weights(checkpoint_file, mapped=False).items():
        state[name] = tensor
        entry = entry_for(name, places)
        if entry is not None and places[entry] != "disk":
            state[name] = tensor.to(as_device(places[entry]))
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
    *,
    fill_meta: bool = False,
    quantizer: Quantizer | None = None,
) -> None:
    """Load a checkpoint into a model, in place. Tie the weights of the model first.

    Tensors of safetensors files are mapped, and read one by one to their devices.

    Args:
        model: the model. With `device_map` it may be on the meta device.
        checkpoint: a file of weights, the index of several files, or a folder with either.
        device_map: name of a module -> device, "cpu" or "disk". None: the model keeps its devices.
        offload_folder: folder for the weights on the disk and their index. Weights are copied to it only if they
            cannot be read from the checkpoint: if that is not in safetensors files, or has another dtype.
        dtype: dtype to which floating point weights are cast.
        offload_state_dict: keep the weights of the CPU in files until the last file of the checkpoint is read.
        offload_buffers: also keep the buffers of modules on the disk there.
        keep_in_fp32_modules: parts of names. Weights whose names contain one are not cast to `dtype`.
        offload_8bit_bnb: quantize what is offloaded from 8-bit layers.
        strict: raise an error if the names in the checkpoint differ from those of the model. Otherwise log them.
        full_state_dict: False if the checkpoint has the shards of this process, for a sharded model.
        broadcast_from_rank0: rank 0 reads the checkpoint and sends it to all. Only without `device_map`.
        fill_meta: raise an error if a weight on the meta device is not in the checkpoint.
        quantizer: quantizes the weights whose names it contains, each when it is read. Only with `device_map`.

    Raises:
        ValueError: a folder for offloaded weights is missing, or a tensor does not have a device in the map, or its
            shape differs from the model's. Nothing is loaded.
        ConfigurationError: this machine does not have a device of the map. Nothing is loaded.
        CheckpointError: no weight of the checkpoint belongs to the model, or `strict` or `fill_meta` find a
            difference. Nothing is loaded if there is a `device_map`.
        RuntimeError: without `device_map`, raised by torch: a tensor's shape differs from the model's.

    Example:
        with init_empty_weights():
            model = Model(config)
        load_checkpoint_in_model(model, "checkpoint", device_map={"": "cuda:0"})
    """
    tied = find_tied_parameters(model)
    casts = _Casts(as_dtype(dtype), keep_in_fp32_modules)
    if device_map is None:
        if quantizer is not None:
            raise ConfigurationError(
                "quantizer needs a `device_map`: weights are quantized on their way to a device"
            )
        sharded = model_has_dtensor(model)
        if sharded and dtype is not None:
            raise ConfigurationError(
                f"dtype={dtype}: the parameters of {type(model).__name__} are already sharded and "
                "keep their dtype. Convert the model before sharding it, or use mixed precision."
            )
        if sharded or not full_state_dict or broadcast_from_rank0:
            result = _load_distributed(
                model, checkpoint, full_state_dict, broadcast_from_rank0, tied
            )
        else:
            result = _load_unsharded(model, checkpoint, tied)
        casts.apply(model, result.loaded)
    else:
        if offload_folder is None and "disk" in device_map.values():
            raise ValueError(
                "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`."
            )
        check_devices(device_map)
        files = checkpoint_files(checkpoint)
        placement = _Placement(
            model, device_map, offload_folder, casts, offload_buffers, offload_8bit_bnb, quantizer
        )
        result = placement.check(checkpoint, files)
        result.find_missing(model, tied)
        result.check_strict(model, checkpoint, strict)
        result.check_fits(model, checkpoint, fill_meta)
        if offload_folder is not None:
            check_folder(offload_folder)
        placement.load(files, spill=offload_state_dict)
    # The name that was loaded is the one to keep: the others may have the values that the model was initialised with.
    retie_parameters(
        model, [sorted(group, key=lambda name: name not in result.loaded) for group in tied]
    )
    result.check_strict(model, checkpoint, strict)
    result.log_differences(model, checkpoint)


@dataclass
class _Result:
    """Which names of a checkpoint were loaded, which the model does not have, and which the checkpoint lacks."""

    loaded: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)

    def find_missing(self, model: nn.Module, tied: list[list[str]]) -> None:
        """Compare with the names of the model. A name that is tied to a loaded one is not missing."""
        present = set(self.loaded)
        for group in tied:
            if self.loaded.intersection(group):
                present.update(group)
        missing = set(model.state_dict()) - present
        self.missing = {name for name in missing if not name.endswith("_extra_state")}

    def check_strict(self, model: nn.Module, checkpoint: Any, strict: bool) -> None:
        """Raise CheckpointError for any difference where `strict`."""
        if not strict:
            return
        differences = []
        if self.unexpected:
            differences.append(f"unknown to the model: {', '.join(sorted(self.unexpected))}")
        if self.missing:
            differences.append(f"not in the checkpoint: {', '.join(sorted(self.missing))}")
        if differences:
            raise CheckpointError(
                f"{checkpoint} does not fit {type(model).__name__} (strict=True): {'; '.join(differences)}"
            )

    def check_fits(self, model: nn.Module, checkpoint: Any, fill_meta: bool) -> None:
        """Raise CheckpointError where the checkpoint is incomplete or of another model.

        That is: a file lacks a weight of the model that the index names; nothing would be loaded; with `fill_meta` a
        weight would get no values.
        """
        kind = type(model).__name__
        indexed = indexed_files(checkpoint)
        absent = [name for name in indexed if name in self.missing]
        if absent:
            name = absent[0]
            others = ""
            if len(absent) > 1:
                others = f" ({len(absent) - 1} more weights are missing in the same way)"
            raise CheckpointError(
                f"the index of {checkpoint} names {indexed[name]} for {name}, but that file does "
                f"not contain it{others}. The files belong to different checkpoints: download or "
                "save the checkpoint again"
            )
        if self.unexpected and self.missing and not self.loaded:
            raise CheckpointError(
                f"{checkpoint} does not have any weight of {kind}: it has "
                f"{names_in_words(sorted(self.unexpected))}, but the model has "
                f"{names_in_words(sorted(self.missing))}. The architecture or the prefix of the "
                "names differs. Nothing was loaded."
            )
        if not fill_meta:
            return
        empty = {name for name in self.missing if tensor_at(model, name).is_meta}
        if empty:
            raise CheckpointError(
                f"{checkpoint} does not have {names_in_words(sorted(empty))} of {kind}, which is "
                "on the meta device and would not get values. Initialize these weights on a "
                "device, or tie them. Nothing was loaded."
            )

    def log_differences(self, model: nn.Module, checkpoint: Any) -> None:
        kind = type(model).__name__
        if self.unexpected:
            logger.warning(
                f"Some weights of the model checkpoint at {checkpoint} were not used when "
                f"initializing {kind}: {sorted(self.unexpected)}. Check that the checkpoint "
                "belongs to this model."
            )
        if self.missing:
            logger.warning(
                f"Some weights of {kind} are not in the checkpoint {checkpoint}: {sorted(self.missing)}."
            )


def _survey(files: list[str]) -> dict[str, tuple[int, ...] | None]:
    """{name: shape} of what the files hold, None for an entry that is no tensor.

    Every file is opened and its header checked, so that a damaged one is found before anything is loaded.
    """
    shapes: dict[str, tuple[int, ...] | None] = {}
    for file in files:
        shapes.update(shapes_in(open_weights(file)))
    return shapes


class _Casts:
    """What each tensor of a checkpoint is converted to."""

    def __init__(self, dtype: torch.dtype | None, keep_in_fp32: list[str] | None) -> None:
        self.dtype = dtype
        self.keep = keep_in_fp32 or []

    def wanted(self, name: str, tensor: torch.Tensor) -> torch.dtype | None:
        """The dtype for a tensor, or None where it takes that of the model."""
        if self.dtype is None or not tensor.is_floating_point():
            return None
        if any(name == part or f"{part}." in name for part in self.keep):
            return torch.float32
        return self.dtype

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


def _load_unsharded(model: nn.Module, checkpoint: Any, tied: list[list[str]]) -> _Result:
    """Load into a model that keeps its devices, file by file, by its own `load_state_dict`."""
    files = checkpoint_files(checkpoint)
    result = _Result(missing=set(model.state_dict()))
    for name in result.missing.intersection(_survey(files)):
        if name.endswith("_extra_state"):
            continue
        tensor = tensor_at(model, name)
        if tensor.is_meta and not is_lazy(tensor):
            empty = torch.empty_like(tensor, device="cpu")
            set_module_tensor_to_device(model, name, "cpu", value=empty)
            retie_parameters(model, [group for group in tied if name in group])
    for file in files:
        weights = dict(open_weights(file))
        answer = model.load_state_dict(weights, strict=False)
        result.unexpected.update(answer.unexpected_keys)
        result.missing.intersection_update(answer.missing_keys)
        result.loaded.update(weights.keys() - answer.unexpected_keys)
    for group in tied:
        if result.loaded.intersection(group):
            result.missing.difference_update(group)
    result.check_fits(model, checkpoint, fill_meta=False)
    return result


def _load_distributed(
    model: nn.Module, checkpoint: Any, full: bool, broadcast: bool, tied: list[list[str]]
) -> _Result:
    """Load into a model whose parameters may be sharded, all processes together; rank 0 may be alone to read."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if broadcast and not dist.is_initialized():
        raise ValueError(
            "broadcast_from_rank0=True sends the weights from one process to the others, but "
            "this process is alone: the process group is not initialized (create a PartialState "
            "or an Accelerator first)"
        )
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=False)
    result = _Result()
    if not broadcast:
        files = checkpoint_files(checkpoint)
        _survey(files)
        for file in files:
            state = dict(open_weights(file))
            answer = set_model_state_dict(model, state, options=options)
            result.unexpected.update(answer.unexpected_keys)
            result.loaded.update(state)
    else:
        files, error = _files_of_rank_0(checkpoint)
        if error is not None:
            raise CheckpointError(f"rank 0 found no checkpoint to send: {error}")
        for file in files:
            state = {}
            if dist.get_rank() == 0:
                state = dict(open_weights(file))
            names = [list(state)]
            dist.broadcast_object_list(names, src=0)
            set_model_state_dict(model, state, options=options)
            result.loaded.update(names[0])
        result.unexpected = result.loaded - set(model.state_dict())
    result.loaded -= result.unexpected
    result.find_missing(model, tied)
    return result


def _files_of_rank_0(checkpoint: Any) -> tuple[list[str], str | None]:
    """On every rank: the files that rank 0 has found and can read, or why not. The other ranks may not see them."""
    import torch.distributed as dist

    files: list[str] = []
    reason = None
    if dist.get_rank() == 0:
        try:
            files = checkpoint_files(checkpoint)
            _survey(files)
        except (CheckpointError, OSError) as error:
            reason = str(error)
    answer = [files, reason]
    dist.broadcast_object_list(answer, src=0)
    return answer[0], answer[1]  # type: ignore[return-value]


@dataclass
class _Placement:
    """The tensors of a checkpoint on their way to the devices, the disk or the CPU."""

    model: nn.Module
    device_map: DeviceMap
    folder: str | os.PathLike[str] | None
    casts: _Casts
    offload_buffers: bool
    offload_8bit: bool
    quantizer: Quantizer | None
    index: dict[str, Any] = field(default_factory=dict)
    spilled: dict[str, Any] = field(default_factory=dict)
    copied: int = 0  # bytes written to the offload folder

    def __post_init__(self) -> None:
        self.device_map = complete_device_map(self.model, self.device_map)
        named = nn.Module.named_parameters(self.model, remove_duplicate=False)
        parameters = {name for name, _ in named}
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self.names = parameters | buffers
        self.to_disk = parameters
        if self.offload_buffers:
            self.to_disk = self.names

    def check(self, checkpoint: Any, files: list[str]) -> _Result:
        """Compare what the files hold with the model and the device map, before a tensor is read."""
        result = _Result()
        for name, shape in _survey(files).items():
            if name not in self.names:
                stem, _, leaf = name.rpartition(".")
                # The scales of an 8-bit weight, and its memory format.
                if leaf not in ("SCB", "weight_format") or join(stem, "weight") not in self.names:
                    result.unexpected.add(name)
                continue
            result.loaded.add(name)
            if entry_for(name, self.device_map) is None:
                raise ValueError(
                    f"{name} doesn't have any device set. Add it, a module that it is in, or '' for all others to the "
                    "device map."
                )
            old = tensor_at(self.model, name)
            if shape is None:
                raise CheckpointError(f"{checkpoint}: {name} is not a tensor")
            if shape != old.shape and type(old).__name__ not in PACKED:
                raise WeightFileError(
                    f'Trying to set a tensor of shape {torch.Size(shape)} in "{name}" (which has shape {old.shape}), '
                    f"this looks incorrect. {checkpoint} does not fit the model."
                )
        return result

    def load(self, files: list[str], spill: bool) -> None:
        with ExitStack() as stack:
            spill_folder = None
            if spill:
                spill_folder = stack.enter_context(tempfile.TemporaryDirectory())
            for file in files:
                weights = open_weights(file)
                for name in weights:
                    if name in self.names:
                        self._place(name, weights, spill_folder)
            if self.folder is not None:
                os.makedirs(self.folder, exist_ok=True)
                save_offload_index(self.index, self.folder)
            if self.copied:
                logger.warning(
                    f"{size_of(self.copied)} of offloaded weights were copied to {self.folder}: "
                    "only weights in safetensors files can be read in place, and only in the "
                    "dtype of the file."
                )
            if spill_folder is not None:
                load_offloaded_weights(self.model, self.spilled, spill_folder)

    def _place(self, name: str, weights: Mapping[str, Any], spill_folder: str | None) -> None:
        device = device_for(name, self.device_map)
        tensor = weights[name]
        wanted = self.casts.wanted(name, tensor)
        is_offloaded = device in ("cpu", "disk")
        statistics = None
        if tensor.dtype == torch.int8:
            statistics = weights.get(statistics_name(name))
        is_8bit = type(tensor_at(self.model, name)).__name__ == "Int8Params"
        if is_8bit and self.offload_8bit and is_offloaded and tensor.is_floating_point():
            tensor, statistics = quantize_8bit(tensor)
            wanted = None
        quantized = self.quantizer is not None and name in self.quantizer
        if quantized:
            tensor = self._quantize(name, tensor, wanted, device)
            wanted = tensor.dtype
        is_mapped = isinstance(weights, SafetensorsFile)
        if device == "disk" and name in self.to_disk:
            as_it_is = not quantized and statistics is None and wanted in (None, tensor.dtype)
            if as_it_is and isinstance(weights, SafetensorsFile):
                self._refer(name, tensor, weights.path)
                return
            if not quantized:
                self.copied += tensor.nbytes
            self._offload(name, tensor, wanted, statistics, self.folder, self.index)
        elif is_offloaded and spill_folder is not None:
            self._offload(name, tensor, wanted, statistics, spill_folder, self.spilled)
        else:
            if device == "disk":
                # A buffer that is not offloaded runs with its module: it waits on the CPU for the dispatch.
                device = "cpu"
            if device == "cpu" and not quantized and not is_mapped:
                tensor = tensor.clone()
            set_module_tensor_to_device(
                self.model,
                name,
                device,
                value=tensor,
                dtype=wanted,
                fp16_statistics=statistics,
                clear_cache=False,
            )

    def _quantize(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None, device: Place
    ) -> torch.Tensor:
        """A weight quantized on the device where it runs, then on the CPU if it is kept there or on disk."""
        assert self.quantizer is not None
        if dtype is None:
            dtype = tensor_at(self.model, name).dtype
        if device in ("cpu", "disk"):
            weight = tensor.to(device=main_device(), dtype=dtype)
            return self.quantizer(name, weight).to("cpu")
        return self.quantizer(name, tensor.to(device=as_device(device), dtype=dtype))

    def _refer(self, name: str, tensor: torch.Tensor, path: str) -> None:
        """Offload a weight without a copy: it is read from the checkpoint."""
        set_module_tensor_to_device(self.model, name, "meta", clear_cache=False)
        self.index[name] = {
            "safetensors_file": os.path.abspath(path),
            "weight_name": name,
            **index_entry(tensor),
        }

    def _offload(
        self,
        name: str,
        tensor: torch.Tensor,
        wanted: torch.dtype | None,
        statistics: torch.Tensor | None,
        folder: Any,
        index: dict[str, Any],
    ) -> None:
        set_module_tensor_to_device(self.model, name, "meta", dtype=wanted, clear_cache=False)
        if wanted is not None:
            tensor = tensor.to(wanted)
        offload_weight(tensor, name, folder, index)
        if statistics is not None:
            offload_weight(statistics, statistics_name(name), folder, index)


def statistics_name(weight_name: str) -> str:
    """The name under which the row scales of an 8-bit weight are stored: `layer.SCB` for `layer.weight`."""
    if weight_name.endswith("weight"):
        return weight_name.replace("weight", "SCB")
    return f"{weight_name}.SCB"


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load the weights of an `offload_weight` index back into `model` on the CPU; the folder can then be removed."""
    entries = index or {}

    def read(name: str) -> torch.Tensor:
        return load_offloaded_weight(path_of(offload_folder, name), entries[name]).clone()

    for name in entries:
        if name.endswith("SCB"):
            continue
        statistics = None
        if statistics_name(name) in entries:
            statistics = read(statistics_name(name))
        set_module_tensor_to_device(
            model, name, "cpu", value=read(name), fp16_statistics=statistics
        )
