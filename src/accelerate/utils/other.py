# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.other`: models, files and small things. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "checkpointing.weights": ["load", "save"],
    "core.modules": [
        "get_model_tp_size",
        "get_module_children_bottom_up",
        "model_has_dtensor",
    ],
    "core.objects": ["convert_bytes", "get_pretty_name", "merge_dicts", "recursive_getattr"],
    "data_loader.packing": ["pack"],
    "data_loader.token_batches": ["TokenBatchSampler"],
    "launchers.ports": ["get_free_port", "is_port_in_use"],
    "parallel.compile": ["compile_regions", "compile_regions_deepspeed", "compile_regions_fsdp2"],
    "parallel.matrices": ["register_matrix_optimizer"],
    "parallel.unwrap": ["extract_model_from_parallel"],
    "placement.tied": ["clean_state_dict_for_safetensors"],
    "runtime.hardware": ["check_os_kernel"],
    "state": ["wait_for_everyone"],
    "torch_internals.compiled": ["has_compiled_regions", "is_compiled_module"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
