# SPDX-License-Identifier: Apache-2.0
"""A fresh state of one process on the CPU for each test of this room."""

import pytest

from accelerate.state import PartialState


@pytest.fixture(autouse=True)
def alone():
    return PartialState(cpu=True)
