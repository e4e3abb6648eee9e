# SPDX-License-Identifier: Apache-2.0
"""The progress bar: one process shows it, all iterate."""

from __future__ import annotations

import pytest

from accelerate.state import PartialState
from accelerate.telemetry.display import tqdm


def test_only_the_local_main_process_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    state = PartialState(cpu=True)
    assert list(tqdm(range(3))) == [0, 1, 2] and not tqdm([1]).disable
    assert tqdm([1], disable=True).disable
    state.local_process_index = 1
    assert list(tqdm(range(3))) == [0, 1, 2] and tqdm([1]).disable
    assert not tqdm([1], main_process_only=False).disable


def test_the_flag_is_named() -> None:
    with pytest.raises(ValueError, match="main_process_only"):
        tqdm(True, [1])
