# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.modeling`: sizes, device maps and weights of big models. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "placement": [
        "align_module_device",
        "calculate_maximum_sizes",
        "check_device_map",
        "check_tied_parameters_in_config",
        "check_tied_parameters_on_same_device",
        "clean_device_map",
        "compute_module_sizes",
        "convert_file_size_to_int",
        "dtype_byte_size",
        "find_tied_parameters",
        "get_balanced_memory",
        "get_max_layer_size",
        "get_max_memory",
        "has_offloaded_params",
        "id_tensor_storage",
        "infer_auto_device_map",
        "is_peft_model",
        "load_checkpoint_in_model",
        "load_offloaded_weights",
        "load_state_dict",
        "named_module_tensors",
        "retie_parameters",
        "set_module_tensor_to_device",
    ],
    "precision": [
        "get_grad_scaler",
        "get_mixed_precision_context_manager",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
