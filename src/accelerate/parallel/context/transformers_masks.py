# SPDX-License-Identifier: Apache-2.0
"""Masks that transformers builds (windows, chunks, packed sequences): of the rows of a rank, over all columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import ConfigurationError
from .masks import compact

if TYPE_CHECKING:
    from .region import SequenceRegion
    from .routing import Around

_MASKING = "transformers.masking_utils"
_Current = Callable[[], "SequenceRegion | None"]


def hooks(region: _Current) -> dict[tuple[str, str], Around]:
    """Functions of transformers that give way while sequences are split: (module, name) -> what takes the former."""
    return {
        (_MASKING, "find_packed_sequence_indices"): lambda former: _not_packed(former, region),
        (_MASKING, "ALL_MASK_ATTENTION_FUNCTIONS"): lambda former: _over_the_whole(former, region),
        ("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa"): lambda former: _shared_heads(former, region),
    }


def builds_masks(source: str) -> bool:
    """Whether a module of this name takes its masks from transformers' functions, all of which ask the hooks."""
    bound = vars(sys.modules[source]) if source in sys.modules else {}
    return any(name.startswith("create_") and getattr(bound[name], "__module__", "") == _MASKING for name in bound)


def _not_packed(former: Any, region: _Current) -> Any:
    """In the place of the search for sequences packed in one row: this rank's chunks jump, and are one sequence."""

    def find_packed_sequence_indices(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        current = region()
        if current is None or position_ids.shape[-1] != current.rows:
            return former(position_ids, *args, **kwargs)
        if current.packed is None:
            shift = position_ids - current.positions(position_ids.device)
            if bool((shift != shift[..., :1]).any()):
                raise ConfigurationError(
                    f"positions inside the model are not those of {current.layout.size}={current.layout.ranks}, nor "
                    "were they given to it: whether sequences are packed cannot be known. Give position_ids."
                )
        current.asks_packing = bool(current.packed)
        return None

    return find_packed_sequence_indices


def _over_the_whole(former: Any, region: _Current) -> Any:
    """In the place of the table of mask builders: sdpa's answers for the whole sequence."""
    table = type(former)()
    table.update(former)
    sdpa_mask = former["sdpa"]

    def whole_mask(**asked: Any) -> torch.Tensor | None:
        current = region()
        if current is None or not asked["q_length"] == asked["kv_length"] == current.rows:
            mask: torch.Tensor | None = sdpa_mask(**asked)
            return mask
        return _whole_mask(sdpa_mask, asked, current)

    table["sdpa"] = _untraced(whole_mask)
    return table


def _shared_heads(former: Any, region: _Current) -> Any:
    """Key heads are not repeated before they travel, with a mask neither."""

    def use_gqa_in_sdpa(*args: Any, **kwargs: Any) -> Any:
        return region() is not None or former(*args, **kwargs)

    return use_gqa_in_sdpa


def _whole_mask(sdpa_mask: Any, asked: dict[str, Any], region: SequenceRegion) -> torch.Tensor | None:
    """(batch, 1, rows, length): this rank's rows under cp_size, all under sp_size. Padding is added later."""
    layout, length, function = region.layout, region.length, asked["mask_function"]
    packed, region.asks_packing = region.asks_packing and region.packed, False
    _check_indices(function, asked.get("attention_mask"), region)
    local = asked.get("local_size")
    skips = asked.get("allow_is_causal_skip", True) or asked.get("allow_is_bidirectional_skip", False)
    if skips and not packed and (local is None or length < local):
        return None
    if packed:
        positions, documents = (whole.expand(asked["batch_size"], -1) for whole in packed)
        around = sys.modules[_MASKING].packed_sequence_compatibility_function
        function = around(function, positions.to(asked["device"]), documents.to(asked["device"]))
    size = length // layout.multiple
    parts = [(size, i * size) for i in layout.chunks(layout.rank)] if layout.balanced else [(length, 0)]
    asked = {
        **asked,
        "kv_length": length,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    found = [compact(sdpa_mask(**{**asked, "q_length": rows, "q_offset": first})) for rows, first in parts]
    return torch.cat(found, dim=2).expand(asked["batch_size"], -1, -1, -1)


def _check_indices(function: Any, padding: torch.Tensor | None, region: SequenceRegion) -> None:
    """Raises ConfigurationError for a mask that looks up something which is there for this rank's rows alone."""
    where = f"under {region.layout.size}={region.layout.ranks}"
    if padding is not None and not bool(padding.all()):
        raise ConfigurationError(
            f"a padding mask of shape {tuple(padding.shape)} is made inside the model {where}, for this rank's rows "
            "alone: give attention_mask to the model."
        )
    for tensor in _tensors(function):
        if tensor.dim() > 1 and tensor.shape[-1] == region.rows:
            raise ConfigurationError(
                f"the model builds its mask from a tensor of shape {tuple(tensor.shape)} {where}, which says nothing "
                "about the rows of other ranks (blocks of image tokens, for example): it cannot be split. Give a mask "
                "over the whole sequence as attention_mask, (batch, 1, length, length)."
            )


def _tensors(function: Any) -> Iterator[torch.Tensor]:
    """What a function made of functions holds."""
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for value in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(value, torch.Tensor):
                yield value
            elif callable(value):
                yield from _tensors(value)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
