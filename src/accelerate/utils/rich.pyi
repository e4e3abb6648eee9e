# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.rich. Change the table, then run the script.

from ..core.availability import is_rich_available as is_rich_available

EXPORTS: dict[str, list[str]]
