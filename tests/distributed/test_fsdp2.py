# SPDX-License-Identifier: Apache-2.0
"""The host memory that loading a model into FSDP2 takes."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_loading_takes_one_copy_of_the_model_on_one_rank():
    # Blocks of memory that are freed go back at once, so that the peak is what is needed.
    run_ranks(WORKERS / "load_memory.py", 2, env={"MALLOC_MMAP_THRESHOLD_": "1000000"}, timeout=120)
