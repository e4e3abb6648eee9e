# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.constants`: fixed names. Re-exports only, by home."""

from ..core import constants
from ..core.lazy import attach

EXPORTS = {
    "core.constants": [name for name in vars(constants) if name.isupper()],
    "big_modeling": ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
