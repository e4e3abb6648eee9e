# SPDX-License-Identifier: Apache-2.0
"""The structure of a nested value: shapes and dtypes without the content, as data that can be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core import trees


@dataclass
class TensorInformation:
    """A tensor's shape and dtype, standing for it in a nested value."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Whether `tensor_info` stands for a tensor."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: object) -> Any:
    """Nested `data` with a `TensorInformation` in place of every tensor."""
    return trees.map_leaves(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: object) -> Any:
    """The inverse of `get_data_structure`: uninitialised tensors in place of every `TensorInformation`."""
    return trees.map_leaves(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, is_tensor_information
    )
