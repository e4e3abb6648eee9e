# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.operations`: nested tensors across processes. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "collectives.objects": ["broadcast_object_list", "gather_object"],
    "collectives.padding": [
        "CannotPadNestedTensorWarning",
        "pad_across_processes",
        "pad_input_tensors",
    ],
    "collectives.tensors": [
        "TENSOR_INT_TO_DTYPE",
        "TENSOR_TYPE_TO_INT",
        "TensorInformation",
        "broadcast",
        "copy_tensor_to_devices",
        "gather",
        "gather_tensor_shape",
        "get_data_structure",
        "initialize_tensors",
        "is_tensor_information",
        "reduce",
    ],
    "collectives.verify": ["chained_operation", "verify_operation"],
    "core.errors": ["DistributedOperationException"],
    "core.trees": [
        "concatenate",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "get_shape",
        "honor_type",
        "ignorant_find_batch_size",
        "is_namedtuple",
        "is_torch_tensor",
        "listify",
        "recursively_apply",
        "send_to_device",
        "slice_tensors",
    ],
    "parallel.deepspeed.state": ["GatheredParameters"],
    "precision.amp": ["ConvertOutputsToFp32", "convert_outputs_to_fp32"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
