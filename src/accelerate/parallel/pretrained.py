# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` of a model of which each process holds a part: never a file with less than the model."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from ..core.errors import PrepareError
from .unwrap import extract_model_from_parallel


def ask_for_state(model: torch.nn.Module) -> None:
    """Have a prepared model's `save_pretrained` (transformers, peft) refuse to run without `state_dict`.

    Its default is the module's own state: a stage of a pipeline, which looks like a whole file, or parts of tensors.
    A model that transformers has split itself, over a mesh of its own, it also puts together again.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if callable(getattr(type(inner), "save_pretrained", None)) and getattr(inner, "_device_mesh", None) is None:
        # A method and not a closure: a copied model gets its own.
        inner.save_pretrained = types.MethodType(save_pretrained, inner)  # type: ignore[assignment]


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own, where `state_dict` is given. Raises PrepareError where it is not."""
    former = type(self).save_pretrained
    given = inspect.signature(former).bind_partial(self, *args, **kwargs).arguments
    if given.get("state_dict", kwargs.get("state_dict")) is None:
        raise PrepareError(
            f"save_pretrained would write this process's part of {type(self).__name__}: give it "
            "state_dict=accelerator.get_state_dict(model), which every process has to call. transformers.Trainer does "
            "so under FSDP with FULL_STATE_DICT; elsewhere set save_strategy='no' and call accelerator.save_model"
        )
    return former(self, *args, **kwargs)
