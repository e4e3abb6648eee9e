# SPDX-License-Identifier: Apache-2.0
"""From a prepared model back to the user's own, and its `save_pretrained`, which never writes an incomplete file."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..core.errors import PrepareError
from ..precision.amp import restore_forward
from ..torch_internals.compiled import is_compiled_module, replace_uncompiled, uncompiled

# What wrappers around a module (activation checkpointing, compilation, replication) add to the names below it.
_WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@functools.lru_cache(maxsize=1 << 16)
def canonical_name(name: str) -> str:
    """A parameter's name in the plain model."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPER_NAMES)


def _wrapper_types() -> tuple[type[torch.nn.Module], ...]:
    """Every wrapper class with the wrapped module as `.module`; those of optional packages if they are loaded."""
    found: list[type[torch.nn.Module]] = [DistributedDataParallel, DataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None:
        found.append(fsdp.FullyShardedDataParallel)
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    if engine is not None:
        found.append(engine)
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
    inner: Any = model if compiled is None else uncompiled(model)
    wrappers = _wrapper_types()
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        _unwrap_children(inner, wrappers)
    if not keep_torch_compile:
        # `compile_regions` leaves the original model there too.
        inner = uncompiled(inner)
    if not keep_fp32_wrapper:
        restore_forward(uncompiled(inner) if is_compiled_module(inner) else inner)
    if compiled is None or not keep_torch_compile:
        plain: torch.nn.Module = inner
        return plain
    if uncompiled(compiled) is not inner:
        replace_uncompiled(compiled, inner)
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


def require_state_dict(model: torch.nn.Module) -> None:
    """Make a prepared model's `save_pretrained` (transformers, peft) refuse to run without `state_dict`, and use it.

    Its default is the module's own state: one pipeline stage, which looks like a complete file, or shards of tensors.
    A model that transformers has sharded itself, over its own mesh, is saved by transformers.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if (
        callable(getattr(type(inner), "save_pretrained", None))
        and getattr(inner, "_device_mesh", None) is None
    ):
        # A method and not a closure: a copied model gets its own.
        inner.save_pretrained = types.MethodType(save_pretrained, inner)  # type: ignore[assignment]
        inner.named_modules = types.MethodType(named_modules, inner)  # type: ignore[method-assign]


def save_pretrained(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
    """The class's own method, with `state_dict` required.

    Raises:
        PrepareError: no `state_dict` is given.
    """
    original: Callable[..., object] = type(self).save_pretrained  # type: ignore[attr-defined]
    given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    if given.get("state_dict", kwargs.get("state_dict")) is None:
        raise PrepareError(
            f"save_pretrained would write only this process's shard of {type(self).__name__}. Pass "
            "state_dict=accelerator.get_state_dict(model), which every process has to call. transformers.Trainer does "
            "so under FSDP with FULL_STATE_DICT; elsewhere set save_strategy='no' and call accelerator.save_model"
        )
    return original(self, *args, **kwargs)


def named_modules(
    self: torch.nn.Module,
    memo: set[torch.nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The class's own method, with the names of the plain model, as `accelerator.get_state_dict` has them.

    peft 0.21 finds an adapter's tensors by these names, also outside of `save_pretrained`. The wrappers of FSDP1 and
    of activation checkpointing add to them: the adapter would have no tensors.
    """
    for name, module in type(self).named_modules(self, memo, prefix, remove_duplicate):
        # Torch enters the model from its wrapper with a prefix, and needs the names as they are.
        yield name if prefix else canonical_name(name), module
