# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.fsdp_utils`: fully sharded models. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "checkpointing.merging": ["merge_fsdp_weights"],
    "checkpointing.sharded_api": [
        "_get_model_state_dict",
        "_set_model_state_dict",
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ],
    "parallel.fsdp.by_hand": [
        "disable_fsdp_ram_efficient_loading",
        "enable_fsdp_ram_efficient_loading",
        "ensure_weights_retied",
        "fsdp2_apply_ac",
        "fsdp2_canonicalize_names",
        "fsdp2_load_full_state_dict",
        "fsdp2_prepare_auto_wrap_policy",
        "fsdp2_prepare_model",
        "fsdp2_switch_optimizer_parameters",
        "get_fsdp2_grad_scaler",
    ],
    "parallel.fsdp.units": ["get_parameters_from_modules"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
