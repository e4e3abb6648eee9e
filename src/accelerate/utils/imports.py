# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.imports`: which packages and devices are here. Re-exports only: all questions of their home."""

from ..core import availability
from ..core.lazy import attach

EXPORTS = {
    "core.availability": [
        name
        for name, value in vars(availability).items()
        if name.startswith("is_") and getattr(value, "__module__", None) == availability.__name__
    ]
    + ["deepspeed_required", "torchao_required"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
