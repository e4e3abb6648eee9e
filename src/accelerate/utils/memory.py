# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.memory`: device memory, and batch sizes that fit. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "collectives.batch_size": ["find_executable_batch_size"],
    "core.devices": ["clear_device_cache", "release_memory", "should_reduce_batch_size"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
