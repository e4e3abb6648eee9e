# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` of a model whose parameters no process has completely: it never writes an incomplete file."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from ..core.errors import PrepareError
from .materialize import canonical_name
from .unwrap import extract_model_from_parallel


def require_state_dict(model: torch.nn.Module) -> None:
    """Make a prepared model's `save_pretrained` (transformers, peft) refuse to run without `state_dict`.

    Its default is the module's own state: one pipeline stage, which looks like a complete file, or shards of tensors.
    A model that transformers has sharded itself, over a mesh of its own, is saved by transformers.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if callable(getattr(type(inner), "save_pretrained", None)) and getattr(inner, "_device_mesh", None) is None:
        # A method and not a closure: a copied model gets its own.
        inner.save_pretrained = types.MethodType(save_pretrained, inner)  # type: ignore[assignment]


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own method, with `state_dict` required.

    Raises:
        PrepareError: no `state_dict` is given.
    """
    original = type(self).save_pretrained
    given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    if given.get("state_dict", kwargs.get("state_dict")) is None:
        raise PrepareError(
            f"save_pretrained would write only this process's shard of {type(self).__name__}. Pass "
            "state_dict=accelerator.get_state_dict(model), which every process has to call. transformers.Trainer does "
            "so under FSDP with FULL_STATE_DICT; elsewhere set save_strategy='no' and call accelerator.save_model"
        )
    with _plain_module_names(self):
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _plain_module_names(model: Any) -> Iterator[None]:
    """A block in which `model.named_modules()` has the names of the plain model, as `accelerator.get_state_dict` does.

    peft 0.21 finds an adapter's tensors by these names, and the wrappers of FSDP1 and of activation checkpointing add
    to them: it would save an adapter without tensors.
    """

    def named_modules(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in type(model).named_modules(model, *args, **kwargs):
            yield canonical_name(name), module

    model.named_modules = named_modules
    try:
        yield
    finally:
        del model.named_modules
