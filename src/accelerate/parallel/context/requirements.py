# SPDX-License-Identifier: Apache-2.0
"""What split sequences refuse of a model of transformers, before it is laid out."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from ...core.errors import PrepareError

# Kinds of layers whose masks are functions of positions in the sequence.
_FULL = "full_attention"
_KINDS = {_FULL, "sliding_attention"}
# Computes positions from token ids, in RoBERTa and similar models.
_FROM_IDS = "create_position_ids_from_input_ids"


def check_attention(model: nn.Module, size: str) -> None:
    """Raise PrepareError for a model that does not attend through torch's function."""
    name = type(model).__name__
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation in (None, "sdpa"):
        return
    remedy = "Load the model with attn_implementation='sdpa'."
    if not getattr(model, "_supports_sdpa", True):
        remedy = "This model has no such implementation."
    raise PrepareError(
        f"{name} attends through {implementation!r}: {size} needs torch's scaled_dot_product_attention. {remedy}"
    )


def check_positions(model: nn.Module, size: str) -> None:
    """Raise PrepareError for a model that counts positions by itself."""
    for module in model.modules():
        kind = type(module)
        from_ids = hasattr(kind, _FROM_IDS) or hasattr(sys.modules[kind.__module__], _FROM_IDS)
        from_mask = False
        if isinstance(module, nn.Embedding):
            from_mask = "attention_mask" in inspect.signature(kind.forward).parameters
        if from_ids or from_mask:
            raise PrepareError(
                f"{type(model).__name__} counts positions from its token ids or its padding mask ({kind.__name__}): "
                f"under {size} every rank would count from its own first row. Train it without."
            )


def check_layers(model: nn.Module, size: str) -> None:
    """Raise PrepareError for layers that carry a state along the sequence, or whose masks cover a rank's rows only."""
    name = type(model).__name__
    kinds = _kinds_of_layers(model)
    others = sorted(kinds - _KINDS)
    if others or not getattr(model, "_supports_context_parallel", True):
        raise PrepareError(
            f"{name} has layers ({', '.join(others) or 'attention with sinks'}) that carry a state along the sequence "
            f"or do not use torch's attention: under {size} they would compute something else. Train it without."
        )
    sources = set[str]()
    for module in model.modules():
        sources.update(base.__module__ for base in type(module).__mro__)
    if kinds > {_FULL} and not any(builds_masks(source) for source in sources):
        raise PrepareError(
            f"{name} has layers ({', '.join(sorted(kinds - {_FULL}))}) whose masks it builds by itself: under {size} "
            "they would cover a rank's rows only. Train it without them (config.sliding_window=None)."
        )


def builds_masks(source: str) -> bool:
    """Whether a module of this name builds its masks by the functions of transformers."""
    for name, value in vars(sys.modules.get(source, object)).items():
        function = getattr(value, "__module__", "")
        if name.startswith("create_") and function == "transformers.masking_utils":
            return True
    return False


def _kinds_of_layers(model: nn.Module) -> set[str]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = {_FULL, *(getattr(config, "layer_types", None) or ())}
    if getattr(config, "layer_types", None) is None:
        if getattr(config, "sliding_window", None) is not None:
            kinds.add("sliding_attention")
        if getattr(config, "attention_chunk_size", None) is not None:
            kinds.add("chunked_attention")
    return kinds


# In this order: the first one that a model does not meet is the error.
REQUIREMENTS = (check_attention, check_positions, check_layers)
