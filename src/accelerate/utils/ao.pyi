# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.ao. Change the table, then run the script.

from ..precision.fp8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from ..precision.fp8 import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from ..precision.fp8 import filter_linear_layers as filter_linear_layers
from ..precision.fp8 import find_first_last_linear_layers as find_first_last_linear_layers
from ..precision.fp8 import has_ao_layers as has_ao_layers

EXPORTS: dict[str, list[str]]
