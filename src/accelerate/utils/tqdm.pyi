# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.tqdm. Change the table, then run the script.

from ..telemetry.display import tqdm as tqdm

EXPORTS: dict[str, list[str]]
