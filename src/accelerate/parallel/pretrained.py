# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` of a model whose parameters no process has completely: it never writes an incomplete file."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator

import torch

from ..core.errors import PrepareError
from .materialize import canonical_name
from .unwrap import extract_model_from_parallel


def require_state_dict(model: torch.nn.Module) -> None:
    """Make a prepared model's `save_pretrained` (transformers, peft) refuse to run without `state_dict`, and use it.

    Its default is the module's own state: one pipeline stage, which looks like a complete file, or shards of tensors.
    A model that transformers has sharded itself, over its own mesh, is saved by transformers.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if callable(getattr(type(inner), "save_pretrained", None)) and getattr(inner, "_device_mesh", None) is None:
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
    self: torch.nn.Module, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The class's own method, with the names of the plain model, as `accelerator.get_state_dict` has them.

    peft 0.21 finds an adapter's tensors by these names, also outside of `save_pretrained`. The wrappers of FSDP1 and
    of activation checkpointing add to them: the adapter would have no tensors.
    """
    for name, module in type(self).named_modules(self, memo, prefix, remove_duplicate):
        # Torch enters the model from its wrapper with a prefix, and needs the names as they are.
        yield name if prefix else canonical_name(name), module
