# SPDX-License-Identifier: Apache-2.0
"""A process of its own for each test: the shared state is forgotten before and after."""

import pytest

from accelerate.state import PartialState


@pytest.fixture(autouse=True)
def one_process():
    PartialState(cpu=True)


@pytest.fixture
def second_process(monkeypatch):
    """This process says that it is not the main one."""
    monkeypatch.setattr(PartialState, "is_main_process", property(lambda self: False))
    monkeypatch.setattr(PartialState, "is_local_main_process", property(lambda self: False))
