# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.transformer_engine`: fp8 through Transformer Engine. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "precision.fp8_te": [
        "apply_fp8_autowrap",
        "contextual_fp8_autocast",
        "convert_model",
        "has_transformer_engine_layers",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
