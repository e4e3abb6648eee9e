# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a save exchange: a value of each, or the errors of some, which every rank raises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, CommunicationError, ConfigurationError
from ..runtime.agreement import Agreement, Process
from ..runtime.communication import is_lost


class ReportedError(Exception):
    """An error of this rank while others may wait for it in a collective. They read it at the next exchange."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class SaveRanks:
    """The ranks that save into one folder. Every rank has the same exchanges in the same order.

    Args:
        process: this rank.
        folder: the checkpoint, for messages.
        timeout: seconds within which every rank must come to an exchange.
        name: of the sequence of exchanges. Another thread needs another name.
    """

    def __init__(self, process: Process, folder: Path, timeout: float, name: str = "checkpoint") -> None:
        self.process = process
        self.folder = folder
        self.timeout = timeout
        self._agreement = Agreement(process, name)

    def exchange(
        self,
        step: str,
        error: BaseException | None,
        value: object = None,
        timeout: float | None = None,
        absent: str = "",
    ) -> list[Any]:
        """The values of all ranks. Raises the errors of all ranks, if any; the cause is this rank's own error."""
        row = {"error": None if error is None else error_text(error), "value": value}
        rows = self._agreement.exchange(step, row, timeout or self.timeout, absent)
        errors = [(rank, row["error"]) for rank, row in enumerate(rows) if row["error"]]
        if errors:
            if error is not None and not isinstance(error, Exception):
                raise error
            raise self._error(errors) from error
        return [row["value"] for row in rows]

    @contextlib.contextmanager
    def reported_at_once(self) -> Iterator[None]:
        """A block that may use collectives: an error of this rank is published for the others and raised at once.

        Comparing errors first could deadlock, because other ranks may wait in a collective until this process ends.
        An exchange of the calling thread must follow the block.
        """
        try:
            yield
        except (ReportedError, CommunicationError):
            # Published already; or a failure of another rank has broken the collective, and the next exchange
            # reports it.
            raise
        except Exception as error:
            if is_lost(error) or self.process.num_processes == 1:
                raise
            self._agreement.refuse(str(self.raised_here(error)))
            raise ReportedError(error) from error

    def raised_here(self, error: BaseException) -> BaseException:
        """The error to raise on the rank where it happened: an interrupt itself, any other as on the other ranks."""
        if not isinstance(error, Exception):
            return error
        return self._error([(self.process.process_index, error_text(error))])

    def _error(self, errors: list[tuple[int, str]]) -> CheckpointError:
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in errors)
        exists = False
        with contextlib.suppress(OSError):
            exists = self.folder.exists()
        kept = "Its earlier content is unchanged." if exists else "Earlier checkpoints are unchanged."
        return CheckpointError(f"{self.folder} was not saved: {lines.rstrip('.')}. {kept}")


@contextlib.contextmanager
def raised_on_all(process: Process, operation: str, timeout: float) -> Iterator[None]:
    """A block without collectives in which some ranks write. Every rank leaves it once all have come to its end.

    The error of one is raised on all: itself on the rank where it happened, a CheckpointError on the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        found = Agreement(process).exchange(operation, error and error_text(error), timeout)
    finally:
        if error is not None:
            raise error
    failed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
    if failed:
        raise CheckpointError(f"{operation} failed: {failed}")


def error_text(error: BaseException) -> str:
    """An error for a message of several ranks: without its class where it is one of this package's own."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, (CheckpointError, ConfigurationError)) else f"{type(error).__name__}: {text}"
