# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.offload. Change the table, then run the script.

from ..placement.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
from ..placement.offload import PrefixedDataset as PrefixedDataset
from ..placement.offload import extract_submodules_state_dict as extract_submodules_state_dict
from ..placement.offload import load_offloaded_weight as load_offloaded_weight
from ..placement.offload import offload_state_dict as offload_state_dict
from ..placement.offload import offload_weight as offload_weight
from ..placement.offload import save_offload_index as save_offload_index

EXPORTS: dict[str, list[str]]
