# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.offload`: weights kept on disk. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "placement.offload": [
        "OffloadedWeightsLoader",
        "PrefixedDataset",
        "extract_submodules_state_dict",
        "load_offloaded_weight",
        "offload_state_dict",
        "offload_weight",
        "save_offload_index",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
