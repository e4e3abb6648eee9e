# SPDX-License-Identifier: Apache-2.0
"""`accelerate.memory_utils`, an old name of `accelerate.utils.memory`."""

from typing import TYPE_CHECKING

from .core.lazy import public_names
from .core.messages import warn

warn("accelerate.memory_utils is deprecated: import from accelerate.utils.memory", FutureWarning)

if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)
