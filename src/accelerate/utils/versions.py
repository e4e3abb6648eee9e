# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.versions`: versions of packages. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.imports": ["compare_versions", "is_torch_version"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
