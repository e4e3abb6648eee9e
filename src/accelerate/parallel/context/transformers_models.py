# SPDX-License-Identifier: Apache-2.0
"""What transformers computes from the full sequence: padding, packing, labels, masks, Trainer's batches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ...collectives import transport
from ...core.errors import ConfigurationError, PrepareError
from .attention import Wrapper
from .masks import compact

if TYPE_CHECKING:
    from .region import SequenceRegion

# Kinds of layers whose masks are functions of positions in the sequence.
_FULL = "full_attention"
_KINDS = {_FULL, "sliding_attention"}
_IGNORED = -100
# Computes positions from token ids, in RoBERTa and similar models.
_FROM_IDS = "create_position_ids_from_input_ids"
_MASKING = "transformers.masking_utils"
_Current = Callable[[], "SequenceRegion | None"]


def is_transformers_model(module: nn.Module) -> bool:
    """Whether `module` is a model of transformers. Does not import that package."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def check_supported(model: nn.Module, size: str) -> None:
    """Raises PrepareError for a model with layers that do not use torch's attention."""
    name = type(model).__name__
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in (None, "sdpa"):
        remedy = "Load the model with attn_implementation='sdpa'."
        if not getattr(model, "_supports_sdpa", True):
            remedy = "This model has no such implementation."
        raise PrepareError(
            f"{name} attends through {kind!r}: {size} needs torch's scaled_dot_product_attention. {remedy}"
        )
    for part in model.modules():
        if hasattr(type(part), _FROM_IDS) or hasattr(sys.modules[type(part).__module__], _FROM_IDS) or (
            isinstance(part, nn.Embedding) and "attention_mask" in inspect.signature(type(part).forward).parameters
        ):  # fmt: skip
            raise PrepareError(
                f"{name} counts positions from its token ids or its padding mask ({type(part).__name__}): under "
                f"{size} every rank would count from its own first row. Train it without."
            )
    layers = _layers(model)
    others = sorted(layers - _KINDS)
    if others or not getattr(model, "_supports_context_parallel", True):
        raise PrepareError(
            f"{name} has layers ({', '.join(others) or 'attention with sinks'}) that carry a state along the sequence "
            f"or do not use torch's attention: under {size} they would compute something else. Train it without."
        )
    sources = {source.__module__ for part in model.modules() for source in type(part).__mro__}
    if layers > {_FULL} and not any(builds_masks(source) for source in sources):
        raise PrepareError(
            f"{name} has layers ({', '.join(sorted(layers - {_FULL}))}) whose masks it builds by itself: under {size} "
            "they would cover a rank's rows only. Train it without them (config.sliding_window=None)."
        )


def _layers(model: nn.Module) -> set[str]:
    """The kinds of a model's layers."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return {_FULL, *layers}
    named = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return {_FULL} | {
        kind for kind, field in named.items() if getattr(config, field, None) is not None
    }


def adapt_inputs(
    model: nn.Module, inputs: dict[str, Any], region: SequenceRegion
) -> dict[str, Any]:
    """Arguments to add or replace: the padding mask is moved to the region, labels are shifted."""
    changed: dict[str, Any] = {}
    region.keep, region.packed = None, None
    mask = inputs.get("attention_mask")
    if (
        isinstance(mask, torch.Tensor)
        and mask.dim() == 2
        and mask.shape[1] in (region.rows, region.length)
    ):
        if mask.shape[1] == region.length:
            mask = region.layout.take(mask, 1)
        rows = transport.all_gather(mask.ne(0).to(torch.uint8).flatten(), region.group)
        keep = rows.view(region.layout.ranks, *mask.shape).bool()
        region.keep = None if bool(keep.all()) else keep
        changed["attention_mask"] = None
        # as in transformers, which looks for packed sequences where no mask is given
        region.packed = False
    positions = inputs.get("position_ids")
    if (
        region.packed is None
        and isinstance(positions, torch.Tensor)
        and positions.shape[1:] == (region.rows,)
    ):
        region.packed = packed_sequences(positions, region)
    labels = inputs.get("labels")
    if isinstance(labels, torch.Tensor) and inputs.get("shift_labels") is None:
        losses = sys.modules.get("transformers.loss.loss_utils")
        if losses is not None and getattr(model, "loss_function", None) is losses.ForCausalLMLoss:
            # The loss that the model computes by itself compares row i with label i + 1.
            changed["shift_labels"] = shifted(labels, region)
    return changed


def packed_sequences(
    positions: torch.Tensor, region: SequenceRegion
) -> tuple[torch.Tensor, torch.Tensor] | Literal[False]:
    """(positions, number of the sequence) of all rows, where positions restart within a row; else False.

    One message, none where the positions are one of the buffers that were split.
    """
    full = region.full_of(positions)
    if full is None:
        shards = transport.all_gather(positions.flatten(), region.group).view(
            region.layout.ranks, *positions.shape
        )
        full = region.layout.join(list(shards), 1)
    number = (full.diff(dim=1, prepend=full[:, :1] - 1) != 1).cumsum(1)
    if bool(number[:, -1].any()):
        return (full, number)
    return False


def shifted(labels: torch.Tensor, region: SequenceRegion) -> torch.Tensor:
    """This rank's shard of the labels, each moved to the row before it: the next row may be another rank's."""
    full = region.full_of(labels)
    if full is None:
        raise ConfigurationError(
            "labels are given to a model that shifts them, and are not one of the buffers that were split: the label "
            "after a rank's last row is another rank's. Add `labels` to the buffers and pass the same tensor, or "
            "shift them first and give shift_labels."
        )
    return region.layout.take(F.pad(full[..., 1:], (0, 1), value=_IGNORED), -1)


def on_the_mesh(former: Callable[..., object]) -> Callable[..., object]:
    """Have the loss over a sequence's ranks use the group of the mesh, as for backends other than DeepSpeed."""

    def compute_loss(
        accelerator: object, model: object, inputs: object, return_outputs: bool, layout: Any
    ) -> object:
        layout = SimpleNamespace(sp_backend="torch", sp_size=layout.sp_size)
        return former(accelerator, model, inputs, return_outputs, layout)

    return compute_loss


def count_full_batches() -> None:
    """Have Trainer count the batches of a split loader once. It is patched once in a process.

    It assumes that a split loader has sp_size times as many batches as the prepared one: with DeepSpeed the ranks of a
    sequence read different batches and compute on each in turn. Here they read the same ones, as under cp_size.
    Trainers of other layouts behave as before.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    former = getattr(trainer, "get_sp_size", None), getattr(trainer, "get_cp_size", None)
    if None in former or getattr(former[0], "__module__", "") == __name__:
        return

    def get_sp_size(self: object) -> Any:
        if _splits_heads(self):
            return 1
        return former[0](self)  # type: ignore[misc]

    def get_cp_size(self: Any) -> Any:
        if _splits_heads(self):
            return self.accelerator.parallelism_config.sp_size
        return former[1](self)  # type: ignore[misc]

    trainer.get_sp_size, trainer.get_cp_size = get_sp_size, get_cp_size  # type: ignore[union-attr]


def _splits_heads(trainer: object) -> bool:
    strategy = getattr(getattr(trainer, "accelerator", None), "strategy", None)
    sequence = getattr(strategy, "sequence", None)
    return sequence is not None and sequence.layout.size == "sp_size"


# -- masks (windows, chunks, packed sequences), for a rank's rows over all columns


def mask_hooks(region: _Current) -> dict[tuple[str, str], Wrapper]:
    """Functions of transformers that are replaced while sequences are split: (module, name) -> wrapper."""
    return {
        (_MASKING, "find_packed_sequence_indices"): lambda former: _ignore_packing(former, region),
        (_MASKING, "ALL_MASK_ATTENTION_FUNCTIONS"): lambda former: _full_sequence_masks(
            former, region
        ),
        # Key heads are sent without repeating them, also with a mask.
        ("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa"): lambda former: (
            lambda *args, **kwargs: region() is not None or former(*args, **kwargs)
        ),
    }


def builds_masks(source: str) -> bool:
    """Whether a module of this name builds its masks by transformers' functions, which use the replaced ones."""
    if source in sys.modules:
        bound = vars(sys.modules[source])
    else:
        bound = {}
    return any(
        name.startswith("create_") and getattr(bound[name], "__module__", "") == _MASKING
        for name in bound
    )


def _ignore_packing(former: Callable[..., object], region: _Current) -> Callable[..., object]:
    """Replaces the search for packed sequences, which would take this rank's two chunks for two sequences."""

    def find_packed_sequence_indices(
        position_ids: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        current = region()
        if current is None or position_ids.shape[-1] != current.rows:
            return former(position_ids, *args, **kwargs)
        if current.packed is None:
            shift = position_ids - current.positions(position_ids.device)
            if bool((shift != shift[..., :1]).any()):
                raise ConfigurationError(
                    f"positions inside the model are not those of {current.layout}, and "
                    "were not given to it: whether sequences are packed is unknown. Give position_ids."
                )
        current.next_is_packed = bool(current.packed)
        return None

    return find_packed_sequence_indices


def _full_sequence_masks(former: Any, region: _Current) -> object:
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

    if "torch._dynamo" in sys.modules:
        table["sdpa"] = torch.compiler.disable(full_mask)
    else:
        table["sdpa"] = full_mask
    return table


def _full_mask(
    sdpa_mask: Callable[..., torch.Tensor], arguments: dict[str, Any], region: SequenceRegion
) -> torch.Tensor | None:
    """(batch, 1, rows, length): this rank's rows under cp_size, all rows under sp_size. Padding is added later."""
    layout, length, function = region.layout, region.length, arguments["mask_function"]
    packed, region.next_is_packed = region.next_is_packed and region.packed, False
    padding = arguments.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        raise ConfigurationError(
            f"a padding mask of shape {tuple(padding.shape)} is made inside the model under "
            f"{layout}, for this rank's rows only: give attention_mask to the model."
        )
    local = arguments.get("local_size")
    skips = arguments.get("allow_is_causal_skip", True) or arguments.get(
        "allow_is_bidirectional_skip", False
    )
    if skips and not packed and (local is None or length < local):
        return None
    if packed:
        positions, documents = (full.expand(arguments["batch_size"], -1) for full in packed)
        masking: Any = sys.modules[_MASKING]
        within = masking.packed_sequence_mask_function(documents.to(arguments["device"]))
        moved = masking.remap_positions_for_packed_sequence(
            function, positions.to(arguments["device"])
        )
        function = masking.and_masks(within, moved)
    size = length // layout.multiple
    if layout.balanced:
        chunks = [(size, i * size) for i in layout.chunks(layout.rank)]
    else:
        chunks = [(length, 0)]
    arguments = {
        **arguments,
        "kv_length": length,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    masks = [
        compact(sdpa_mask(**{**arguments, "q_length": rows, "q_offset": first}))
        for rows, first in chunks
    ]
    return torch.cat(masks, dim=2).expand(arguments["batch_size"], -1, -1, -1)
