# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.torch_xla`: torch_xla. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "launchers.notebook": ["install_xla"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
