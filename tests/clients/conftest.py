# SPDX-License-Identifier: Apache-2.0
"""Client libraries run on this package, not on another distribution of the same name."""

import os
from pathlib import Path

import pytest

# pyarrow's allocator would start a thread in the process that the ranks are forked from.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

SOURCES = Path(__file__).resolve().parents[2] / "src" / "accelerate"


@pytest.fixture(scope="session", autouse=True)
def own_package():
    import accelerate

    assert Path(accelerate.__file__).resolve().parent == SOURCES
