# SPDX-License-Identifier: Apache-2.0
"""Client libraries run on this package, not on another distribution of the same name."""

from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src" / "accelerate"


@pytest.fixture(scope="session", autouse=True)
def own_package():
    import accelerate

    assert Path(accelerate.__file__).resolve().parent == SOURCES
