# SPDX-License-Identifier: Apache-2.0
"""Masks that transformers builds while a sequence is split: its own builders, and what they cannot know."""

from types import SimpleNamespace

import pytest
import torch

from accelerate.core.errors import ConfigurationError
from accelerate.parallel.context.shard import SequenceLayout
from accelerate.parallel.context.transformers_models import builds_masks, mask_hooks

masking = pytest.importorskip("transformers.masking_utils")
LENGTH, ROWS = 16, 8
TABLE = (masking.__name__, "ALL_MASK_ATTENTION_FUNCTIONS")
SEARCH = (masking.__name__, "find_packed_sequence_indices")


def region(rank=0, packed=None, balanced=True):
    layout = SequenceLayout("cp_size" if balanced else "sp_size", 2, rank, balanced)
    positions = layout.rows(LENGTH)
    return SimpleNamespace(
        layout=layout,
        rows=ROWS,
        length=LENGTH,
        packed=packed,
        next_is_packed=False,
        positions=lambda device: positions,
    )


def build(here, function=masking.causal_mask_function, **asked):
    table = mask_hooks(lambda: here)[TABLE](masking.ALL_MASK_ATTENTION_FUNCTIONS)
    sizes = {"batch_size": 2, "q_length": ROWS, "kv_length": ROWS, "device": "cpu"}
    return table["sdpa"](mask_function=function, **{**sizes, **asked})


def whole(function):
    return masking.sdpa_mask(2, LENGTH, LENGTH, mask_function=function, allow_is_causal_skip=False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "function",
    [
        masking.sliding_window_causal_mask_function(5),
        masking.chunked_causal_mask_function(6, torch.zeros(2).long()),
    ],
)
def test_rows_of_a_rank_over_all_columns(rank, function):
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
    assert (
        mask_hooks(lambda: here)[SEARCH](None)(positions[:, :ROWS]) is None and here.next_is_packed
    )

    def function(batch, head, row, column):
        same = documents[batch, row] == documents[batch, column]
        return same & (positions[batch, column] <= positions[batch, row])

    assert torch.equal(build(here), here.layout.take(whole(function), 2))
    assert not here.next_is_packed and build(here) is None


def test_what_cannot_be_known_is_refused():
    search = mask_hooks(lambda: region())[SEARCH](masking.find_packed_sequence_indices)
    own = region().positions("cpu")
    assert search((own + 2)[None]) is None  # some models count from another number
    with pytest.raises(ConfigurationError, match="Give position_ids"):
        search(torch.arange(ROWS)[None])
    assert search(torch.arange(LENGTH)[None]) is None  # not of this rank's rows
    with pytest.raises(ConfigurationError, match="give attention_mask to the model"):
        build(region(), attention_mask=torch.eye(ROWS)[:2].bool())
    assert build(region(), attention_mask=torch.ones(2, ROWS).bool()) is None


def test_models_that_take_their_masks_from_transformers():
    from transformers.models.gemma3 import modeling_gemma3

    assert builds_masks(modeling_gemma3.__name__)
    assert not builds_masks("transformers.models.t5.no_such_module") and not builds_masks("json")
