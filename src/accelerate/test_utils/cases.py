# SPDX-License-Identifier: Apache-2.0
"""Base classes of test cases: fresh shared state, a temporary folder, patches that end with the test."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

from ..state import AcceleratorState, GradientState


class AccelerateTestCase(unittest.TestCase):
    """Resets the shared state before and after each test."""

    def setUp(self) -> None:
        """Prepare a test."""
        super().setUp()
        _reset_state()

    def tearDown(self) -> None:
        """Clean up after a test."""
        super().tearDown()
        _reset_state()


def _reset_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class TempDirTestCase(AccelerateTestCase):
    """Gives the class a temporary folder.

    Attributes:
        tmpdir: the folder, which all tests of the class share.
        clear_on_setup: whether the folder is emptied before each test.
    """

    clear_on_setup: ClassVar[bool] = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Create the folder."""
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)
        super().tearDownClass()

    def setUp(self) -> None:
        """Prepare a test."""
        super().setUp()
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


class MockingTestCase(unittest.TestCase):
    """Starts patches of `unittest.mock` that end with the test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start patches.

        Args:
            mocks: one patch of `unittest.mock`, or a list of them.
        """
        self.mocks: list[Any] = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)
