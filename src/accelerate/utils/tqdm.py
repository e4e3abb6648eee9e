# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.tqdm`: the progress bar. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "telemetry.display": ["tqdm"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
