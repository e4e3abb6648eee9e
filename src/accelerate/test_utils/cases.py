# SPDX-License-Identifier: Apache-2.0
"""Bases of test cases: a folder of their own, fresh states, patches that end with the test."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

from ..state import AcceleratorState, GradientState


class AccelerateTestCase(unittest.TestCase):
    """Each test starts and ends without shared state."""

    def setUp(self) -> None:
        super().setUp()
        _forget()

    def tearDown(self) -> None:
        super().tearDown()
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class TempDirTestCase(AccelerateTestCase):
    """`self.tmpdir` is a folder of the class's own, emptied before each test while `clear_on_setup` is true."""

    clear_on_setup: ClassVar[bool] = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.tmpdir, ignore_errors=True)
        super().tearDownClass()

    def setUp(self) -> None:
        super().setUp()
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


class MockingTestCase(unittest.TestCase):
    """`self.add_mocks(patch, ...)` starts patches of `unittest.mock` that end with the test."""

    def add_mocks(self, mocks: Any) -> None:
        self.mocks = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)
