# SPDX-License-Identifier: Apache-2.0
"""What is found in nested data."""

from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType

import pytest
import torch

from accelerate.core.trees import find_batch_size, map_leaves


@pytest.mark.parametrize("data", [[], {}, [[]], {"a": []}, ({},)])
def test_no_batch_size_in_empty_containers(data):
    with pytest.raises(ValueError, match="from empty"):
        find_batch_size(data)


def test_the_batch_size_is_that_of_the_first_tensor():
    assert find_batch_size([[], {"name": "a", "rows": torch.ones(3, 2)}]) == 3
    for data in ("a", [1], {"a": None}):
        with pytest.raises(TypeError, match="of tensors"):
            find_batch_size(data)


class Encoding(UserDict):
    """Like transformers' BatchEncoding: what its constructor takes besides the items is not among them."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


def test_mappings_keep_what_is_not_an_item():
    found = map_leaves(torch.Tensor.sum, Encoding({"x": torch.ones(2)}, "encodings"))
    assert (type(found), found.encodings, found["x"]) == (Encoding, "encodings", 2)
    found = map_leaves(torch.Tensor.sum, defaultdict(list, x=torch.ones(2)))
    assert found["x"] == 2 and found["y"] == []
    for kind in (OrderedDict, MappingProxyType):
        given = kind({"x": torch.ones(2)})
        found = map_leaves(torch.Tensor.sum, given)
        assert (type(found), found["x"], len(given["x"])) == (kind, 2, 2)
