# SPDX-License-Identifier: Apache-2.0
"""Masks that transformers builds (windows, chunks, packed sequences), for a rank's rows over all columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import ConfigurationError
from .masks import compact

if TYPE_CHECKING:
    from .attention import Wrapper
    from .region import SequenceRegion

_MASKING = "transformers.masking_utils"
_Current = Callable[[], "SequenceRegion | None"]


def hooks(region: _Current) -> dict[tuple[str, str], Wrapper]:
    """Functions of transformers that are replaced while sequences are split: (module, name) -> wrapper."""
    return {
        (_MASKING, "find_packed_sequence_indices"): lambda former: _ignore_packing(former, region),
        (_MASKING, "ALL_MASK_ATTENTION_FUNCTIONS"): lambda former: _full_sequence_masks(former, region),
        ("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa"): lambda former: _shared_heads(former, region),
    }


def builds_masks(source: str) -> bool:
    """Whether a module of this name builds its masks by transformers' functions, which use the replaced ones."""
    bound = vars(sys.modules[source]) if source in sys.modules else {}
    return any(name.startswith("create_") and getattr(bound[name], "__module__", "") == _MASKING for name in bound)


def _ignore_packing(former: Any, region: _Current) -> Any:
    """Replaces the search for packed sequences, which would take this rank's two chunks for two sequences."""

    def find_packed_sequence_indices(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        current = region()
        if current is None or position_ids.shape[-1] != current.rows:
            return former(position_ids, *args, **kwargs)
        if current.packed is None:
            shift = position_ids - current.positions(position_ids.device)
            if bool((shift != shift[..., :1]).any()):
                raise ConfigurationError(
                    f"positions inside the model are not those of {current.layout.size}={current.layout.ranks}, and "
                    "were not given to it: whether sequences are packed is unknown. Give position_ids."
                )
        current.next_is_packed = bool(current.packed)
        return None

    return find_packed_sequence_indices


def _full_sequence_masks(former: Any, region: _Current) -> Any:
    """Replaces the table of mask builders: sdpa's builds masks over the full sequence."""
    table = type(former)()
    table.update(former)
    sdpa_mask = former["sdpa"]

    def full_mask(**arguments: object) -> torch.Tensor | None:
        current = region()
        if current is None or not arguments["q_length"] == arguments["kv_length"] == current.rows:
            mask: torch.Tensor | None = sdpa_mask(**arguments)
            return mask
        return _full_mask(sdpa_mask, arguments, current)

    table["sdpa"] = _untraced(full_mask)
    return table


def _shared_heads(former: Any, region: _Current) -> Any:
    """Has key heads sent without repeating them, also with a mask."""

    def use_gqa_in_sdpa(*args: Any, **kwargs: Any) -> Any:
        return region() is not None or former(*args, **kwargs)

    return use_gqa_in_sdpa


def _full_mask(sdpa_mask: Any, arguments: dict[str, Any], region: SequenceRegion) -> torch.Tensor | None:
    """(batch, 1, rows, length): this rank's rows under cp_size, all rows under sp_size. Padding is added later."""
    layout, length, function = region.layout, region.length, arguments["mask_function"]
    packed, region.next_is_packed = region.next_is_packed and region.packed, False
    _check_indices(function, arguments.get("attention_mask"), region)
    local = arguments.get("local_size")
    skips = arguments.get("allow_is_causal_skip", True) or arguments.get("allow_is_bidirectional_skip", False)
    if skips and not packed and (local is None or length < local):
        return None
    if packed:
        positions, documents = (whole.expand(arguments["batch_size"], -1) for whole in packed)
        wrapper = sys.modules[_MASKING].packed_sequence_compatibility_function
        function = wrapper(function, positions.to(arguments["device"]), documents.to(arguments["device"]))
    size = length // layout.multiple
    chunks = [(size, i * size) for i in layout.chunks(layout.rank)] if layout.balanced else [(length, 0)]
    arguments = {
        **arguments,
        "kv_length": length,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    found = [compact(sdpa_mask(**{**arguments, "q_length": rows, "q_offset": first})) for rows, first in chunks]
    return torch.cat(found, dim=2).expand(arguments["batch_size"], -1, -1, -1)


def _check_indices(function: object, padding: torch.Tensor | None, region: SequenceRegion) -> None:
    """Raises ConfigurationError for a mask that looks up a tensor which has this rank's rows only."""
    where = f"under {region.layout.size}={region.layout.ranks}"
    if padding is not None and not bool(padding.all()):
        raise ConfigurationError(
            f"a padding mask of shape {tuple(padding.shape)} is made inside the model {where}, for this rank's rows "
            "only: give attention_mask to the model."
        )
    for tensor in _tensors(function):
        if tensor.dim() > 1 and tensor.shape[-1] == region.rows:
            raise ConfigurationError(
                f"the model builds its mask from a tensor of shape {tuple(tensor.shape)} {where}, without the "
                "rows of other ranks (blocks of image tokens, for example): it cannot be split. Give a mask over the "
                "full sequence as attention_mask, (batch, 1, length, length)."
            )


def _tensors(function: object) -> Iterator[torch.Tensor]:
    """The tensors in the closures of a function."""
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for value in content if isinstance(content, (tuple, list)) else (content,):
            if isinstance(value, torch.Tensor):
                yield value
            elif callable(value):
                yield from _tensors(value)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
