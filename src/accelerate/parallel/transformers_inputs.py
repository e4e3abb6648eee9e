# SPDX-License-Identifier: Apache-2.0
"""Models of transformers inside of a prepared model, and the arguments that they get for packed rows."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn

from ..core.documents import Documents


def outermost(model: nn.Module) -> list[nn.Module]:
    """The transformers models in a model that are not inside another."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None and isinstance(model, library.PreTrainedModel):
        return [model]
    parts = []
    for child in model.children():
        parts += outermost(child)
    return parts


def replace_arguments(
    bound: inspect.BoundArguments,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    changed: dict[str, Any],
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """The arguments of a call with other values for those in `changed`, each passed by position or name as before."""
    for name in bound.arguments.keys() & changed.keys() - kwargs.keys():
        bound.arguments[name] = changed.pop(name)
    return bound.args[: len(args)], {**kwargs, **changed}


def adapt_packed(
    model: nn.Module, bound: inspect.BoundArguments, documents: Documents
) -> tuple[dict[str, Any], Documents]:
    """(arguments to add or replace, the documents without padding), for a transformers model on packed rows.

    With positions that restart, and neither mask nor cache, it builds its own masks of documents, for every
    implementation of attention.
    """
    inputs = bound.arguments
    changed: dict[str, Any] = {}
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        documents = documents.without_padding(mask)
        changed["attention_mask"] = None
    defaults = {"position_ids": documents.positions, "use_cache": False}
    for name in bound.signature.parameters.keys() & defaults.keys():
        if inputs.get(name) is None:
            changed[name] = defaults[name]
    labels = inputs.get("labels")
    if labels is not None and shifts_labels(model):
        changed["labels"] = documents.trained_labels(labels)
    config = getattr(model, "config", None)
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        bounds, longest = documents.cu_seqlens, documents.longest
        changed.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
        changed.update(max_length_q=longest, max_length_k=longest)
    return changed, documents


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model computes the loss that compares row i with label i + 1."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    return losses is not None and getattr(model, "loss_function", None) is losses.ForCausalLMLoss
