# SPDX-License-Identifier: Apache-2.0
"""What a mask over a whole sequence shows of it to the rows of one rank."""

import pytest
import torch

from accelerate.core.errors import ConfigurationError
from accelerate.parallel.context.masks import SEES_ALL, MaskReader, Visibility
from accelerate.parallel.context.shard import SequenceLayout

LENGTH = 16
I, J = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
QUERY = torch.zeros(2, 4, LENGTH // 2, 8)


def reader(rank=0):
    return MaskReader(SequenceLayout("cp_size", 2, rank, balanced=True), group=None)


def test_chunks_are_seen_whole_in_part_or_not_at_all():
    # Rows 0 to 3 and 12 to 15, columns in chunks of four.
    found = reader().visibility((J <= I) & (J > I - 6), QUERY, False)
    assert found.chunks == ((False, None, None, None), (None, False, False, False))
    assert torch.equal(found.part(slice(4, 8), [2], 4)[0, 0], J[8:12] > I[12:] - 6)
    # Rows 4 to 11: of the chunk before theirs they see all.
    found = reader(1).visibility((J <= I) & (J >= 4), QUERY, False)
    assert found.chunks == ((None, False, None, None), (None, True, False, None))


@pytest.mark.parametrize("rank", [0, 1])
def test_masks_that_are_none(rank):
    causal = J <= I
    own = reader(rank).layout.take(causal, 0)
    for mask in (
        causal,
        own,
        causal.expand(2, 1, LENGTH, LENGTH),
        torch.zeros(LENGTH, LENGTH).masked_fill(~causal, -1e9),
    ):
        assert reader(rank).visibility(mask, QUERY, False) == Visibility(causal=True)
    for mask in (torch.zeros(2, 4, LENGTH, LENGTH), torch.ones(1, LENGTH, dtype=torch.bool), torch.zeros(8, 8)):
        assert reader(rank).visibility(mask, QUERY, False) is SEES_ALL
    assert reader(rank).visibility(torch.ones(8, 8).tril().bool(), QUERY, False) == Visibility(causal=True)


def test_the_batch_of_three_dimensions():
    mask = torch.rand(2, LENGTH, LENGTH) > 0.5
    assert reader().visibility(mask, QUERY[:, :1], True).mask.shape == (2, 1, 8, LENGTH)
    with pytest.raises(ConfigurationError, match="does not broadcast over 2 x 4"):
        reader().visibility(mask, QUERY, False)


def test_layers_share_what_was_read_until_the_mask_changes():
    masks, mask = reader(), torch.rand(LENGTH, LENGTH) > 0.5
    first = masks.visibility(mask, QUERY, False)
    assert masks.visibility(mask, QUERY, False) is first
    mask.fill_(True)
    assert masks.visibility(mask, QUERY, False) is SEES_ALL
    for _ in range(8):
        masks.visibility(torch.rand(LENGTH, LENGTH) > 0.5, QUERY, False)
    assert len(masks._cache) == 4
    masks.forget()
    assert not masks._cache


def test_large_numbers_hide_but_for_rows_that_have_no_others():
    mask = torch.where(J <= I, 0.0, -1e9)
    mask[1:, 3] += 1.0
    mask[2] = -1e9
    found = reader().visibility(mask, QUERY, False).mask
    assert found[0, 0, 2].eq(0).sum() == LENGTH and found[0, 0, 1, 2] == float("-inf")
