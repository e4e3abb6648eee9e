# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.random`: seeds and the state of generators. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "collectives.rng": ["set_seed", "synchronize_rng_state", "synchronize_rng_states"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
