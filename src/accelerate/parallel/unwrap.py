# SPDX-License-Identifier: Apache-2.0
"""From a prepared model back to the user's own."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..core.imports import is_available
from ..core.modules import is_compiled_module
from ..precision.amp import restore_forward


def _wrapper_types() -> tuple[type[torch.nn.Module], ...]:
    """Every wrapper class with the wrapped module as `.module`; those of optional packages if they are loaded."""
    found: list[type[torch.nn.Module]] = [DistributedDataParallel, DataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None:
        found.append(fsdp.FullyShardedDataParallel)
    deepspeed = sys.modules.get("deepspeed") if is_available("deepspeed") else None
    if deepspeed is not None:
        found.append(deepspeed.DeepSpeedEngine)
    return tuple(found)


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """The model inside its parallel wrapper.

    Args:
        model: a prepared model, or any other.
        keep_fp32_wrapper: leave autocast and the fp32 conversion of the outputs on the forward.
        keep_torch_compile: return the compiled model if it, or its regions, are compiled.
        recursive: unwrap submodules too.
    """
    compiled = model if is_compiled_module(model) else None
    inner: Any = model._orig_mod if compiled is not None else model
    wrappers = _wrapper_types()
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        _unwrap_children(inner, wrappers)
    if not keep_torch_compile:
        # `compile_regions` leaves the original model there too.
        original = getattr(inner, "_orig_mod", None)
        inner = original if isinstance(original, torch.nn.Module) else inner
    if not keep_fp32_wrapper:
        restore_forward(inner._orig_mod if is_compiled_module(inner) else inner)
    if compiled is None or not keep_torch_compile:
        plain: torch.nn.Module = inner
        return plain
    if compiled._orig_mod is not inner:
        compiled._orig_mod = inner
    return compiled


def is_peft_model(model: torch.nn.Module) -> bool:
    """Whether the model inside its wrappers is one of peft's, with adapters."""
    # A package that is not loaded has no objects.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


def _unwrap_children(model: torch.nn.Module, wrappers: tuple[type[torch.nn.Module], ...]) -> None:
    for name, child in model.named_children():
        plain: Any = child
        while isinstance(plain, wrappers):
            plain = plain.module
        if plain is not child:
            setattr(model, name, plain)
        _unwrap_children(plain, wrappers)
