# SPDX-License-Identifier: Apache-2.0
"""`accelerate.export`: a model or a checkpoint of any layout as the folder that `from_pretrained`, or peft, reads."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core import messages
from ..core.constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import atomic_write, user_path
from ..core.modules import class_name, direct_tensors
from ..parallel.adapters import CONFIG_FILE, is_merged, merged_module, original_module
from ..parallel.fsdp.state import is_fsdp1
from ..parallel.pipeline.stage import StandIn
from ..parallel.prepared import PreparedModel
from ..parallel.sharded import ShardedModel, reshard
from ..parallel.unwrap import canonical_name, extract_model_from_parallel, is_peft_model
from ..placement.sizes import convert_file_size_to_int
from ..placement.subclasses import is_quantized_layer
from ..precision.base import Precision
from ..state import PartialState
from ..torch_internals.module_copies import unsharded_copy
from .adapters import AdapterModel, save_adapters
from .files import file_head, host_view, in_file_order
from .weights import file_names, plan_shards, remove_stale, write_index


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    merge_adapters: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model as `from_pretrained` reads it: a transformers model's configuration and its weights.

    For a peft model, only the adapters are written, as `PeftModel.from_pretrained` reads them. Every process
    must call it; the main process writes, and prints what it wrote and how long that took. A sharded model is gathered
    one tensor (with `merge_adapters`, one layer) at a time.

    Args:
        model: a prepared model, under DDP, FSDP2 or tensor parallelism, or any other.
        folder: the folder, which is created.
        merge_adapters: merge the active adapters of a peft model into its base, and write the result.
        max_shard_size: the largest size of a file, in bytes or as text such as "5GB".

    Raises:
        ConfigurationError: the model cannot be exported in this way.

    Example:
        accelerate.export(model, "merged", merge_adapters=True)
    """
    path = user_path(folder, "export: folder")
    if path.is_file():
        raise ConfigurationError(f"export: {path} is a file: pass a folder")
    start = time.perf_counter()
    exported = export_model(model, path, merge_adapters, max_shard_size)
    if PartialState().is_main_process:
        messages.show(f"exported {exported} to {path} in {time.perf_counter() - start:.1f} s")


def export_model(
    model: nn.Module, path: Path, merge_adapters: bool, max_shard_size: int | str
) -> str:
    """Write a model as `export` does. Returns what was written, in words."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in inner.parameters())
    _check(model, inner, merge_adapters)
    reshard([inner])
    is_writer = PartialState().is_main_process
    if is_peft_model(inner) and not merge_adapters:
        prepared = (
            ShardedModel(inner, Precision(), PartialState().device)
            if is_sharded
            else PreparedModel(inner)
        )
        adapters = AdapterModel.of(prepared, None)
        if adapters is None:
            raise ConfigurationError(
                f"export: this {class_name(inner)} trains more than its adapters. Pass "
                "merge_adapters=True, or use accelerator.save_model, which then writes the "
                "entire state"
            )
        save_adapters(adapters, path)
        return f"the adapters of {class_name(inner.get_base_model())}"  # type: ignore[operator]
    base = inner.get_base_model() if is_peft_model(inner) else inner  # type: ignore[operator]
    if is_writer or is_sharded:
        limit = convert_file_size_to_int(max_shard_size)
        write_weights(list(_pieces(base)), path, limit, is_writer)
    if is_writer:
        _write_config(base, path)
    return class_name(base)


def _check(wrapped: nn.Module, model: nn.Module, merge_adapters: bool) -> None:
    """Raise ConfigurationError for a layout that has no unsharded tensors by name, and for what cannot be merged."""
    is_incomplete = any(isinstance(module, StandIn) for module in model.modules())
    for parameter in model.parameters():
        if parameter.is_meta or hasattr(parameter, "ds_shape"):
            is_incomplete = True
    if is_fsdp1(wrapped) or is_incomplete:
        raise ConfigurationError(
            "export supports models under DDP, FSDP2 and tensor parallelism. Under FSDP1, "
            "DeepSpeed and pipelines, call accelerator.save_state and then run `accelerate "
            "export CHECKPOINT FOLDER`. For offloaded models, call accelerator.save_model"
        )
    has_adapters = is_peft_model(model)
    can_merge = has_adapters and hasattr(model.base_model, "merge_and_unload")
    if merge_adapters and not can_merge:
        raise ConfigurationError(
            f"export: merge_adapters=True, but this {class_name(model)} does not have adapters "
            "that can be merged"
        )
    if has_adapters and not merge_adapters:
        return
    for name, module in model.named_modules():
        if is_quantized_layer(module):
            raise ConfigurationError(
                f"export writes unquantized weights, and {canonical_name(name)} is quantized. Use "
                "the model's own save_pretrained. For a peft model, export the adapter, load it "
                "with the unquantized base, and merge it there"
            )


@dataclass
class Piece:
    """Tensors that are gathered together: those of one module.

    Fields:
        light: {name: tensor with shape and dtype}; it may be a shard, or on the meta device.
        read: gathers their values. Every rank calls it; ranks that do not write may get None.
    """

    light: dict[str, torch.Tensor]
    read: Callable[[bool], dict[str, torch.Tensor]]


def _pieces(model: nn.Module) -> Iterator[Piece]:
    """The persistent tensors of a model under its own names, with adapters merged. Of tied ones the first is kept."""
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> Iterator[Piece]:
        prefix = canonical_name(path)
        if is_merged(module):
            yield _merged_piece(module, prefix)
            return
        persistent = module.state_dict()
        for name, tensor in direct_tensors(module).items():
            is_exported = name in persistent or isinstance(tensor, nn.Parameter)
            if is_exported and id(tensor) not in seen:
                seen.add(id(tensor))
                yield Piece(
                    {f"{prefix}{name}": tensor},
                    functools.partial(_read_one, f"{prefix}{name}", tensor),
                )
        for name, child in module.named_children():
            yield from visit(child, f"{path}{name}.")

    yield from visit(model, "")


def _merged_piece(module: nn.Module, prefix: str) -> Piece:
    """The tensors of a layer with adapters, as those of the plain layer."""

    def read(is_writer: bool) -> dict[str, torch.Tensor]:
        copied = unsharded_copy(module, torch.device("cpu"), fill=True)
        if not is_writer:
            return {}
        return _below(prefix, merged_module(copied).state_dict())

    return Piece(_below(prefix, original_module(module).state_dict()), read)


def _below(prefix: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def _read_one(name: str, tensor: torch.Tensor, is_writer: bool) -> dict[str, torch.Tensor]:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return {name: tensor.detach()}


@torch.no_grad()
def write_weights(pieces: list[Piece], folder: Path, limit: int, is_writer: bool) -> None:
    """Write `model.safetensors`, or several files and their index, one piece at a time.

    A rank that cannot write still takes part in gathering.
    """
    light: dict[str, torch.Tensor] = {}
    for piece in pieces:
        for name, tensor in piece.light.items():
            light[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    shards = plan_shards(light, limit)
    files = file_names(SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME, len(shards))
    contents = {
        file: {name: light[name] for name in names}
        for file, names in zip(files, shards, strict=True)
    }
    if not is_writer:
        for piece in pieces:
            piece.read(False)
        return
    error: Exception | None = None
    with ExitStack() as stack:
        places: dict[str, tuple[Any, int]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / CONFIG_FILE).exists():
                raise ConfigurationError(
                    f"{folder} has adapters, which from_pretrained would add: use another folder"
                )
            for file, content in contents.items():
                places.update(_open(stack.enter_context(atomic_write(folder / file)), content))
        except Exception as caught:
            error = caught
        for piece in pieces:
            values = piece.read(error is None)
            if error is not None:
                continue
            try:
                for name, value in values.items():
                    _write_value(name, value, light[name], *places[name])
            except Exception as caught:
                error = caught
        if error is not None:
            raise error
    if len(shards) > 1:
        write_index(folder / SAFE_WEIGHTS_INDEX_NAME, contents)
    remove_stale(
        folder, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME, set(files)
    )


def _write_value(
    name: str, value: torch.Tensor, light: torch.Tensor, file: Any, offset: int
) -> None:
    if value.shape != light.shape or value.dtype != light.dtype:
        raise CheckpointError(
            f"export: merging turned {name} into {value.dtype} {list(value.shape)}"
        )
    if value.numel():
        file.seek(offset)
        file.write(host_view(value.cpu().contiguous()))


def _open(file: Any, light: dict[str, torch.Tensor]) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Write the head of a file; (name, (file, offset)) of each tensor."""
    ordered = in_file_order(light)
    head = file_head(ordered)
    file.write(head)
    at = len(head)
    for name, tensor in ordered.items():
        yield name, (file, at)
        at += tensor.nbytes
    file.truncate(at)


def _write_config(model: Any, folder: Path) -> None:
    """The files beside the weights of a model of transformers."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [class_name(model)]
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    config.dtype = next(dtypes, None)
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
