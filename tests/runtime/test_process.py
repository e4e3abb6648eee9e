# SPDX-License-Identifier: Apache-2.0
"""Parts of inputs between processes."""

import pytest
import torch

from accelerate.runtime.process import bounds_of, split


def parts(inputs, count, pad=False):
    found = []
    for index in range(count):
        with split(inputs, index, count, pad, torch.device("cpu")) as part:
            found.append(part)
    return found


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_are_consecutive_and_cover_everything(length, count):
    spans = [bounds_of(length, index, count) for index in range(count)]
    assert [i for begin, end in spans for i in range(begin, end)] == list(range(length))
    sizes = [end - begin for begin, end in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_kinds():
    assert parts([1, 2, 3], 2) == [[1, 2], [3]]
    assert parts((1, 2, 3), 2, pad=True) == [(1, 2), (3, 3)]
    assert [p.tolist() for p in parts(torch.arange(5), 2, pad=True)] == [[0, 1, 2], [3, 4, 4]]
    assert parts({"a": [1, 2, 3], "b": "xyz"}, 2) == [
        {"a": [1, 2], "b": "xy"},
        {"a": [3], "b": "z"},
    ]
    assert parts([], 2, pad=True) == [[], []]
    assert parts([1], 3, pad=True) == [[1], [1], [1]]


def test_bad_input():
    with pytest.raises(ValueError, match=r"same length, but got \{'a': 1, 'b': 2\}"):
        parts({"a": [1], "b": [1, 2]}, 2)
    with pytest.raises(TypeError, match="not int"):
        parts(3, 2)
