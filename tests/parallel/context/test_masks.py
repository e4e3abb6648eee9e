# SPDX-License-Identifier: Apache-2.0
"""What a mask of a call is for the rows of one rank."""

import pytest
import torch

from accelerate.core.errors import ConfigurationError
from accelerate.parallel.context.masks import MaskReader
from accelerate.parallel.context.shard import SequenceLayout

LENGTH = 16
I, J = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
QUERY = torch.zeros(2, 4, LENGTH // 2, 8)


def reader(rank=0):
    return MaskReader(SequenceLayout("cp_size", 2, rank, balanced=True), group=None)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_this_rank(rank):
    causal = J <= I
    own = reader(rank).layout.take(causal, 0)
    for mask in (causal, own, causal.expand(2, 1, LENGTH, LENGTH)):
        shown, is_causal = reader(rank).own_rows(mask, QUERY, False)
        assert torch.equal(shown[0, 0], own) and shown.shape[:2] == (1, 1) and not is_causal


def test_masks_with_the_columns_of_this_rank():
    rows = LENGTH // 2
    for mask in (torch.zeros(rows, rows), torch.ones(1, rows, dtype=torch.bool)):
        assert reader().own_rows(mask, QUERY, False) == (None, False)
    lower = torch.ones(rows, rows).tril().bool()
    for mask in (lower, torch.zeros(rows, rows).masked_fill(~lower, -1e9)):
        assert reader().own_rows(mask, QUERY, False) == (None, True)


def test_the_batch_of_three_dimensions():
    mask = torch.rand(2, LENGTH, LENGTH) > 0.5
    shown, _ = reader().own_rows(mask, QUERY[:, :1], True)
    assert shown.shape == (2, 1, 8, LENGTH)
    with pytest.raises(ConfigurationError, match="does not broadcast over 2 x 4"):
        reader().own_rows(mask, QUERY, False)
