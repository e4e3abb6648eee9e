# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.bnb`: quantised weights through bitsandbytes. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "placement.quantize": [
        "get_keys_to_not_convert",
        "has_4bit_bnb_layers",
        "load_and_quantize_model",
        "replace_with_bnb_layers",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
