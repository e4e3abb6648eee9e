# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.operations`: nested tensors across processes. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.trees": [
        "concatenate",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "honor_type",
        "ignorant_find_batch_size",
        "is_namedtuple",
        "is_torch_tensor",
        "listify",
        "recursively_apply",
        "send_to_device",
        "slice_tensors",
    ],
    "collectives": [
        "CannotPadNestedTensorWarning",
        "TensorInformation",
        "broadcast",
        "broadcast_object_list",
        "copy_tensor_to_devices",
        "gather",
        "gather_object",
        "get_data_structure",
        "initialize_tensors",
        "is_tensor_information",
        "pad_across_processes",
        "pad_input_tensors",
        "reduce",
    ],
    "core.errors": [
        "DistributedOperationException",
    ],
    "precision": [
        "convert_outputs_to_fp32",
    ],
    "parallel.gathered": [
        "GatheredParameters",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
