# SPDX-License-Identifier: Apache-2.0
"""`accelerate.test_utils.testing`: the same names as `accelerate.test_utils`, where tests are used to find them."""

from ..core.lazy import attach
from . import EXPORTS

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
