# SPDX-License-Identifier: Apache-2.0
"""What all tests share: those that start processes of their own run one after another, beside the others."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Folders of tests that start several ranks, or whole training runs.
CROWDED = {TESTS / "distributed", TESTS / "engines", TESTS / "examples", TESTS / "faults"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Several ranks fill a small machine. Two such tests side by side would slow each other to their limits.
    for item in items:
        if CROWDED & set(item.path.parents):
            item.add_marker(pytest.mark.xdist_group("processes"))
        if TESTS / "engines" in item.path.parents:
            item.add_marker(pytest.mark.engines)
