# SPDX-License-Identifier: Apache-2.0
"""The names of `accelerate.test_utils` under the module path of the API."""

from ..core.lazy import attach
from . import EXPORTS

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, all_public=True)
