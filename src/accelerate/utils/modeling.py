# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.modeling`: sizes, device maps and weights of big models. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "parallel.unwrap": ["is_peft_model"],
    "placement": ["logger"],
    "placement.align": [
        "align_module_device",
        "get_state_dict_from_offload",
        "get_state_dict_offloaded_model",
        "has_offloaded_params",
    ],
    "placement.device_map": [
        "check_device_map",
        "clean_device_map",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
    ],
    "placement.load": ["load_checkpoint_in_model", "load_offloaded_weights", "load_state_dict"],
    "placement.sizes": [
        "_get_proper_dtype",
        "calculate_maximum_sizes",
        "compute_module_sizes",
        "compute_module_total_buffer_size",
        "convert_file_size_to_int",
        "dtype_byte_size",
        "get_max_layer_size",
        "get_module_size_with_ties",
        "get_non_persistent_buffers",
        "named_module_tensors",
    ],
    "placement.tensors": ["set_module_tensor_to_device"],
    "placement.tied": [
        "check_tied_parameters_in_config",
        "check_tied_parameters_on_same_device",
        "find_tied_parameters",
        "id_tensor_storage",
        "retie_parameters",
    ],
    "precision.amp": ["get_grad_scaler", "get_mixed_precision_context_manager"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
