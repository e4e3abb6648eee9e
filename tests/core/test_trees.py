# SPDX-License-Identifier: Apache-2.0
"""What is found in nested data."""

import pytest
import torch

from accelerate.core.trees import find_batch_size


@pytest.mark.parametrize("data", [[], {}, [[]], {"a": []}, ({},)])
def test_no_batch_size_in_empty_containers(data):
    with pytest.raises(ValueError, match="from empty"):
        find_batch_size(data)


def test_the_batch_size_is_that_of_the_first_tensor():
    assert find_batch_size([[], {"name": "a", "rows": torch.ones(3, 2)}]) == 3
    for data in ("a", [1], {"a": None}):
        with pytest.raises(TypeError, match="of tensors"):
            find_batch_size(data)
