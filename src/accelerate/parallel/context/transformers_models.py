# SPDX-License-Identifier: Apache-2.0
"""What a transformers model computes from the whole sequence by itself: positions, padding, shifted labels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ...collectives import transport
from ...core.errors import ConfigurationError, PrepareError

if TYPE_CHECKING:
    from .region import Region

# How transformers finds sequences that are packed in one row: by positions that jump, as a rank's two chunks do.
PACKING = ("transformers.masking_utils", "find_packed_sequence_indices")
_IGNORED = -100


def is_transformers_model(module: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def check_supported(model: nn.Module, size: str) -> None:
    """Raises PrepareError for a model with layers that do not attend to everything through torch's attention."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)
    if kind not in (None, "sdpa"):
        raise PrepareError(
            f"{name} attends through {kind!r}: {size} takes torch's scaled_dot_product_attention. Load the model with "
            "attn_implementation='sdpa'."
        )
    if not getattr(model, "supports_context_parallel", True):
        raise PrepareError(
            f"{name} has layers that see a window or chunks of the sequence, or carry a state along it: under {size} "
            "they would see something else. Use a model with full attention (config.sliding_window=None), or train "
            "it without."
        )


def not_packed(region: Callable[[], Region | None]) -> Callable[[Any], Any]:
    """Around transformers' search for packed sequences: the positions of this rank's rows are one sequence."""

    def around(former: Any) -> Any:
        def find_packed_sequence_indices(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            current = region()
            if current is not None and position_ids.shape[-1] == current.rows:
                own = current.positions(position_ids.device)
                if bool((position_ids == own).all()):
                    return None
            return former(position_ids, *args, **kwargs)

        return find_packed_sequence_indices

    return around


def adapt_inputs(model: nn.Module, given: dict[str, Any], region: Region) -> dict[str, Any]:
    """Arguments to add or replace, from those that are given: the padding mask is taken over, labels are shifted."""
    changed: dict[str, Any] = {}
    region.keep, region.padded_behind = None, False
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] in (region.rows, region.length):
        if mask.shape[1] == region.length:
            mask = region.layout.take(mask, 1)
        region.keep, region.padded_behind = share_padding(mask, region)
        changed["attention_mask"] = None
    labels = given.get("labels")
    if isinstance(labels, torch.Tensor) and given.get("shift_labels") is None and _shifts_labels(model):
        changed["shift_labels"] = shifted(labels, region)
    return changed


def share_padding(mask: torch.Tensor, region: Region) -> tuple[torch.Tensor | None, bool]:
    """(ranks, batch, rows) of all ranks' masks, None where nothing is padding; and whether all padding comes behind.

    One message. Every rank comes to the same answer.
    """
    layout = region.layout
    own = mask.ne(0).to(torch.uint8)
    keep = transport.all_gather(own.flatten(), region.group).view(layout.ranks, *own.shape).bool()
    if bool(keep.all()):
        return None, False
    whole = layout.join(list(keep), 1).to(torch.int8)
    return keep, not bool((whole.diff(dim=1) > 0).any())


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the loss that the model computes by itself compares row i with label i + 1."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    loss = getattr(model, "loss_function", None)
    return losses is not None and loss is losses.ForCausalLMLoss


def shifted(labels: torch.Tensor, region: Region) -> torch.Tensor:
    """This rank's part of the labels, each moved to the row before it: the next row may be another rank's."""
    whole = region.whole_of(labels)
    if whole is None:
        raise ConfigurationError(
            "labels are given to a model that shifts them, and are none of the buffers that were split: the label "
            "after a rank's last row is another rank's. Put `labels` in the buffers and hand in the same tensor, or "
            "shift them first and give shift_labels."
        )
    return region.layout.take(F.pad(whole[..., 1:], (0, 1), value=_IGNORED), -1)
