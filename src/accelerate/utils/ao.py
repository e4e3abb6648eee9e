# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.ao`: fp8 through torchao. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "precision.fp8": [
        "convert_model_to_fp8_ao",
        "filter_first_and_last_linear_layers",
        "filter_linear_layers",
        "find_first_last_linear_layers",
        "has_ao_layers",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
