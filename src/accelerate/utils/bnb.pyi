# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.bnb. Change the table, then run the script.

from ..placement.quantize import get_keys_to_not_convert as get_keys_to_not_convert
from ..placement.quantize import has_4bit_bnb_layers as has_4bit_bnb_layers
from ..placement.quantize import load_and_quantize_model as load_and_quantize_model
from ..placement.quantize import replace_with_bnb_layers as replace_with_bnb_layers

EXPORTS: dict[str, list[str]]
