# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.versions. Change the table, then run the script.

from ..core.imports import compare_versions as compare_versions
from ..core.imports import is_torch_version as is_torch_version

EXPORTS: dict[str, list[str]]
