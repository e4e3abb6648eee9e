# SPDX-License-Identifier: Apache-2.0
"""Gather, broadcast, reduce, pad and objects on nested tensors: one message each."""

from .objects import broadcast_object_list, gather_object
from .padding import CannotPadNestedTensorWarning, pad_across_processes, pad_input_tensors
from .tensors import broadcast, copy_tensor_to_devices, gather, reduce

__all__ = [
    "CannotPadNestedTensorWarning",
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "pad_across_processes",
    "pad_input_tensors",
    "reduce",
]
