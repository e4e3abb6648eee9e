# SPDX-License-Identifier: Apache-2.0
"""A fresh state of one process on the CPU for each test of this room."""

import pytest

from accelerate.state import AcceleratorState, PartialState


@pytest.fixture(autouse=True)
def alone():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield PartialState(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
