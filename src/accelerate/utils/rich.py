# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.rich`: rich output. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.availability": ["is_rich_available"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
