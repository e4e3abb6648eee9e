# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.random. Change the table, then run the script.

from ..collectives.rng import set_seed as set_seed
from ..collectives.rng import synchronize_rng_state as synchronize_rng_state
from ..collectives.rng import synchronize_rng_states as synchronize_rng_states

EXPORTS: dict[str, list[str]]
