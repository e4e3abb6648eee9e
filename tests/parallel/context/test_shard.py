# SPDX-License-Identifier: Apache-2.0
"""Which rows a rank holds, and buffers that hold them for a while."""

import pytest
import torch

from accelerate.core.errors import ConfigurationError
from accelerate.parallel.context.shard import SequenceLayout, split_in_place


def layouts(ranks, balanced):
    return [SequenceLayout("cp_size", ranks, rank, balanced) for rank in range(ranks)]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_make_up_the_whole(ranks, balanced):
    whole = torch.arange(3 * 16 * 2).view(3, 16, 2)
    parts = [layout.take(whole, 1) for layout in layouts(ranks, balanced)]
    for layout, part in zip(layouts(ranks, balanced), parts, strict=True):
        assert torch.equal(part, whole[:, layout.rows(16)])
        assert torch.equal(layout.join(parts, 1), whole)
        assert layout.rows(16).diff().gt(0).all()


def test_balanced_ranks_see_the_same_number_of_keys():
    seen = [int((layout.rows(32) + 1).sum()) for layout in layouts(4, balanced=True)]
    assert seen == [32 * 33 // 2 // 4] * 4
    assert layouts(4, balanced=True)[1].rows(16).tolist() == [2, 3, 12, 13]


def test_a_length_that_cannot_be_shared_is_named():
    layout = layouts(4, balanced=True)[0]
    layout.check(24, "ids")
    with pytest.raises(ConfigurationError, match=r"ids has 20 .*2 x cp_size = 8.* 24"):
        layout.check(20, "ids")
    with pytest.raises(ConfigurationError, match="0 rows"):
        layout.check(0, "ids")


def test_buffers_are_split_and_whole_again():
    layout = layouts(2, balanced=True)[1]
    ids = torch.arange(16).view(2, 8)
    labels, kept = ids.clone(), ids.expand(2, 8)
    view = labels[:, 2:]  # the memory of a buffer is nobody else's business
    before = ids.data_ptr()
    with split_in_place(layout, [ids, ids, labels, kept], [1, 1, -1, 1], {kept}) as whole:
        assert ids.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]] == labels.tolist() == kept.tolist()
        assert torch.equal(whole[0], torch.arange(16).view(2, 8))
        assert view.shape == (2, 6)
    assert ids.data_ptr() == before and torch.equal(labels, torch.arange(16).view(2, 8))
    assert kept.shape == (2, 4)
    with pytest.raises(KeyError), split_in_place(layout, [ids], [1], set()):
        raise KeyError
    assert ids.shape == (2, 8)
