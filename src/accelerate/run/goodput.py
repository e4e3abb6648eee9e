# SPDX-License-Identifier: Apache-2.0
"""`GoodputMessage` shows the goodput of a recorded run when it ends."""

from __future__ import annotations

from pathlib import Path

from ..core.observers import RunObserver
from ..logging import MultiProcessAdapter, get_logger, print_or_log
from ..monitor.goodput import goodput
from ..monitor.run import Run
from ..monitor.sentences import goodput_sentence
from ..state import PartialState

logger: MultiProcessAdapter = get_logger(__name__)


class GoodputMessage(RunObserver):
    """Shows one line on rank 0. It is added before the recorder, which is then closed first.

    Args:
        folder: of the run; None where it is not recorded.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def close(self) -> None:
        """The run has ended."""
        if self._folder is None or not PartialState().is_main_process:
            return
        run = Run(self._folder, self._folder.name, is_partial=True)
        run.read_all()
        self._folder = None
        shares = goodput(run)
        if shares is not None:
            print_or_log(logger, goodput_sentence(shares))
