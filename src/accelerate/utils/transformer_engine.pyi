# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.transformer_engine. Change the table, then run the script.

from ..precision.fp8_te import apply_fp8_autowrap as apply_fp8_autowrap
from ..precision.fp8_te import contextual_fp8_autocast as contextual_fp8_autocast
from ..precision.fp8_te import convert_model as convert_model
from ..precision.fp8_te import has_transformer_engine_layers as has_transformer_engine_layers

EXPORTS: dict[str, list[str]]
