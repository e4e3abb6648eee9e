# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.torch_xla. Change the table, then run the script.

from ..launchers.notebook import install_xla as install_xla

EXPORTS: dict[str, list[str]]
