# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.memory. Change the table, then run the script.

from ..collectives.batch_size import find_executable_batch_size as find_executable_batch_size
from ..core.devices import clear_device_cache as clear_device_cache
from ..core.devices import release_memory as release_memory
from ..core.devices import should_reduce_batch_size as should_reduce_batch_size

EXPORTS: dict[str, list[str]]
