# SPDX-License-Identifier: Apache-2.0
"""What transformers computes from the full sequence: padding, packing, labels, masks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ...core.documents import IGNORED
from ...core.errors import ConfigurationError
from ...core.modules import untraced
from ..transformers_inputs import shifts_labels
from .exchange import gather_rows
from .masks import compact

if TYPE_CHECKING:
    from .region import ContextParallel, SequenceRegion

# The implementation of attention that models have whose sequences are split.
_IMPLEMENTATION = "sdpa"


def adapt_inputs(
    model: nn.Module, inputs: Mapping[str, Any], rows: torch.Tensor | None, region: SequenceRegion
) -> dict[str, Any]:
    """Arguments to add or replace: the padding mask and packed sequences move to the region, labels are shifted.

    Args:
        model: a model of transformers.
        inputs: its arguments by name.
        rows: the argument that is (batch, rows of this rank, ...).
        region: the batch that is split.
    """
    changed: dict[str, Any] = {}
    region.keep, region.packed = None, False
    mask = inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if isinstance(mask, torch.Tensor):
        if mask.dim() == 2 and mask.shape[1] in (region.rows, region.length):
            region.keep = _kept_rows(mask, region)
            changed["attention_mask"] = _no_padding(mask[:, : region.rows])
    elif mask is None and rows is not None:
        # Without a mask transformers would take this rank's two chunks for two sequences.
        changed["attention_mask"] = _no_padding(rows)
        if (
            isinstance(positions, torch.Tensor)
            and positions.shape[1:] == (region.rows,)
            and not _fills_cache(model, inputs)
        ):
            region.packed = packed_sequences(positions, region)
    labels = inputs.get("labels")
    has_shifted = inputs.get("shift_labels") is not None
    if isinstance(labels, torch.Tensor) and not has_shifted and shifts_labels(model):
        changed["shift_labels"] = shifted(labels, region)
    return changed


def _kept_rows(mask: torch.Tensor, region: SequenceRegion) -> torch.Tensor | None:
    """(batch, length): which rows of the sequence are not padding; None for all."""
    keep = mask.ne(0)
    if mask.shape[1] != region.length:
        keep = gather_rows(keep, 1, region.group, region.layout)
    if bool(keep.all()):
        return None
    return keep


def _no_padding(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(rows.shape[:2], dtype=torch.long, device=rows.device)


def _fills_cache(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a forward keeps keys: transformers then takes no sequences for packed."""
    if inputs.get("past_key_values") is not None:
        return True
    uses_cache = inputs.get("use_cache")
    if uses_cache is None:
        uses_cache = getattr(getattr(model, "config", None), "use_cache", False)
    if model.training and torch.is_grad_enabled():
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                return False
    return bool(uses_cache)


def packed_sequences(
    positions: torch.Tensor, region: SequenceRegion
) -> tuple[torch.Tensor, torch.Tensor] | Literal[False]:
    """(positions, number of the sequence) of all rows, where positions restart within a row; else False.

    One message, none where the positions are one of the buffers that were split.
    """
    full = region.full_of(positions)
    if full is None:
        full = gather_rows(positions, 1, region.group, region.layout)
    number = (full.diff(dim=1, prepend=full[:, :1] - 1) != 1).cumsum(1)
    if bool(number[:, -1].any()):
        return (full, number)
    return False


def shifted(labels: torch.Tensor, region: SequenceRegion) -> torch.Tensor:
    """This rank's shard of the labels, each moved to the row before it: the next row may be another rank's."""
    full = region.full_of(labels)
    if full is None:
        raise ConfigurationError(
            "labels were passed to a model that shifts them, but are not one of the split "
            "buffers: the label after a rank's last row is on another rank. Add `labels` to the "
            "buffers and pass the same tensor, or shift them first and pass shift_labels."
        )
    if region.documents is not None:
        full = region.documents.trained_labels(full)
    return region.layout.take(F.pad(full[..., 1:], (0, 1), value=IGNORED), -1)


# -- functions of transformers while sequences are split


@contextlib.contextmanager
def registered(parallel: ContextParallel) -> Iterator[None]:
    """A block in which transformers' registries have functions for split sequences as `sdpa`.

    Other names would not do: Trainer refuses context parallelism for them, and some models compare the name.
    """
    models: Any = sys.modules.get("transformers.modeling_utils")
    masking: Any = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        if models is not None:
            attention = models.AttentionInterface
            former = attention()[_IMPLEMENTATION]
            stack.callback(attention.register, _IMPLEMENTATION, former)
            attention.register(_IMPLEMENTATION, untraced(split_attention(former, parallel)))
        if masking is not None:
            masks = masking.AttentionMaskInterface
            former = masks()[_IMPLEMENTATION]
            stack.callback(masks.register, _IMPLEMENTATION, former)
            masks.register(_IMPLEMENTATION, untraced(full_masks(former, parallel)))
        yield


def split_attention(
    former: Callable[..., Any], parallel: ContextParallel
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention of a transformers layer to the full sequence. Key heads are not repeated before they are sent."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        changes_scores = (
            options.get("position_bias") is not None or options.get("softcap") is not None
        )
        if not parallel.splits(query) or changes_scores:
            output: tuple[torch.Tensor, None] = former(
                module, query, key, value, attention_mask,
                dropout=dropout, scaling=scaling, is_causal=is_causal, **options,
            )  # fmt: skip
            return output
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        if attention_mask is not None:
            is_causal = False
        heads = parallel.attend(
            query, key, value, attention_mask, dropout, is_causal, scaling, enable_gqa=True
        )
        return heads.transpose(1, 2).contiguous(), None

    return attend


def full_masks(
    former: Callable[..., torch.Tensor | None], parallel: ContextParallel
) -> Callable[..., torch.Tensor | None]:
    """The builder of masks (windows, chunks, packed sequences) for a rank's rows over all columns."""

    def full_mask(**arguments: Any) -> torch.Tensor | None:
        region = parallel.region
        if region is None or not arguments["q_length"] == arguments["kv_length"] == region.rows:
            return former(**arguments)
        return _full_mask(former, arguments, region)

    return full_mask


def _full_mask(
    build: Callable[..., torch.Tensor | None], arguments: dict[str, Any], region: SequenceRegion
) -> torch.Tensor | None:
    """(batch, 1, rows, length): this rank's rows under cp_size, all rows under sp_size. Padding is added later."""
    layout, length, function = region.layout, region.length, arguments["mask_function"]
    padding = arguments.get("attention_mask")
    if region.packed is None and padding is not None and not bool(padding.all()):
        raise ConfigurationError(
            f"a padding mask of shape {tuple(padding.shape)} is created inside the model under "
            f"{layout}, only for this rank's rows: pass attention_mask to the model."
        )
    # Builders of masks that are not causal do not look for packed sequences.
    is_bidirectional = "allow_is_bidirectional_skip" in arguments
    packed = None
    if region.packed and not is_bidirectional:
        packed = region.packed
    if is_bidirectional:
        may_skip = arguments["allow_is_bidirectional_skip"]
    else:
        may_skip = arguments.get("allow_is_causal_skip", True)
    local = arguments.get("local_size")
    if may_skip and packed is None and (local is None or length < local):
        return None
    if packed is not None:
        positions, documents = (full.expand(arguments["batch_size"], -1) for full in packed)
        masking: Any = sys.modules["transformers.masking_utils"]
        within = masking.packed_sequence_mask_function(documents.to(arguments["device"]))
        moved = masking.remap_positions_for_packed_sequence(
            function, positions.to(arguments["device"])
        )
        function = masking.and_masks(within, moved)
    size = length // layout.multiple
    chunks = [(length, 0)]
    if layout.balanced:
        chunks = [(size, chunk * size) for chunk in layout.chunks(layout.rank)]
    masks = []
    for rows, first in chunks:
        mask = build(
            **{
                **arguments,
                "q_length": rows,
                "q_offset": first,
                "kv_length": length,
                "kv_offset": 0,
                "mask_function": function,
                "attention_mask": None,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )
        assert mask is not None
        masks.append(compact(mask))
    return torch.cat(masks, dim=2).expand(arguments["batch_size"], -1, -1, -1)
