# SPDX-License-Identifier: Apache-2.0
"""Masks that transformers builds while a sequence is split: its own builders, and what they cannot know."""

from types import SimpleNamespace

import pytest
import torch
from packages import package

from accelerate.core.errors import ConfigurationError
from accelerate.parallel.context.shard import SequenceLayout
from accelerate.parallel.context.transformers_models import adapt_inputs, full_masks, registered

masking = package("transformers.masking_utils")
LENGTH, ROWS = 16, 8


def region(rank=0, packed=False, balanced=True):
    layout = SequenceLayout("cp_size" if balanced else "sp_size", 2, rank, balanced)
    positions = layout.rows(LENGTH)
    return SimpleNamespace(
        layout=layout,
        rows=ROWS,
        length=LENGTH,
        packed=packed,
        positions=lambda device: positions,
    )


def build(here, function=None, **asked):
    function = function or masking.causal_mask_function
    builder = full_masks(masking.sdpa_mask, SimpleNamespace(region=here))
    sizes = {"batch_size": 2, "q_length": ROWS, "kv_length": ROWS, "device": "cpu"}
    return builder(mask_function=function, **{**sizes, **asked})


def whole(function):
    return masking.sdpa_mask(2, LENGTH, LENGTH, mask_function=function, allow_is_causal_skip=False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "kind, options",
    [("sliding_window", (5,)), ("chunked", (6, torch.zeros(2).long()))],
    ids=["sliding window", "chunks"],
)
def test_rows_of_a_rank_over_all_columns(rank, kind, options):
    function = getattr(masking, f"{kind}_causal_mask_function")(*options)
    here = region(rank)
    found = build(here, function, local_size=5)
    assert torch.equal(found, here.layout.take(whole(function), 2))
    assert torch.equal(build(region(rank, balanced=False), function, local_size=5), whole(function))
    # Where the window is wider than the sequence, and without a window, it is the causal mask of no tensor.
    assert build(here, local_size=LENGTH + 1) is None and build(here) is None
    outside = masking.sdpa_mask(2, ROWS, ROWS, mask_function=function, local_size=5)
    assert torch.equal(build(None, function, local_size=5), outside)


def test_packed_sequences():
    positions = torch.tensor([[*range(7), *range(9)], list(range(LENGTH))])
    documents = masking.find_packed_sequence_indices(positions)
    here = region(1, packed=(positions, documents))

    def function(batch, head, row, column):
        same = documents[batch, row] == documents[batch, column]
        return same & (positions[batch, column] <= positions[batch, row])

    assert torch.equal(build(here), here.layout.take(whole(function), 2))
    # As in transformers, whose masks of both directions are not those of packed sequences.
    assert build(here, allow_is_bidirectional_skip=True) is None


class Model(torch.nn.Module):
    def __init__(self, uses_cache):
        super().__init__()
        self.config = SimpleNamespace(use_cache=uses_cache)


@pytest.mark.parametrize("uses_cache", [False, True])
def test_a_model_sees_no_mask_and_packing_only_without_a_cache(uses_cache):
    here = region()
    here.full_of = lambda tensor: positions
    positions = torch.tensor([[*range(7), *range(9)]] * 2)
    rows = here.layout.take(positions, 1)
    inputs = {"input_ids": rows, "position_ids": rows}
    changed = adapt_inputs(Model(uses_cache), inputs, rows, here)
    assert changed["attention_mask"].shape == (2, ROWS) and bool(changed["attention_mask"].all())
    assert bool(here.packed) is not uses_cache


def test_what_cannot_be_known_is_refused():
    here = region(packed=None)
    with pytest.raises(ConfigurationError, match="pass attention_mask to the model"):
        build(here, attention_mask=torch.eye(ROWS)[:2].bool())
    assert build(here, attention_mask=torch.ones(2, ROWS).bool()) is None


def test_registries_are_as_they_were():
    from transformers import AttentionInterface, AttentionMaskInterface

    former = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]
    with registered(SimpleNamespace(region=None)):
        assert AttentionInterface()["sdpa"] is not former[0]
        assert AttentionMaskInterface()["sdpa"] is not former[1]
    assert (AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]) == former
