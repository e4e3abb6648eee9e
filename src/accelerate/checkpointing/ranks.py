# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a save exchange: a value of each, or the errors of some, which every rank raises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, CommunicationError, ConfigurationError
from ..core.objects import values_in_words
from ..runtime.agreement import Agreement, OneProcess, Process, Reduce, default_connection
from ..runtime.communication import is_lost
from ..runtime.passing import goes_alone


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

    def __init__(
        self, process: Process, folder: Path, timeout: float, name: str = "checkpoint"
    ) -> None:
        self.process: Process = process
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
        reduce: Reduce | None = None,
    ) -> Any:
        """What `reduce` makes of the values of all ranks, as in `Agreement.exchange`.

        Raises the errors of all ranks, if any, else that of `reduce`; the cause is this rank's own error.
        """
        cause = error

        def reduced(rows: dict[int, Any]) -> dict[str, Any]:
            nonlocal cause
            errors = {rank: row["error"] for rank, row in rows.items() if row["error"]}
            if errors:
                return {"errors": values_in_words(errors)}
            try:
                return {
                    "result": reduce({rank: row["value"] for rank, row in rows.items()})
                    if reduce
                    else None
                }
            except Exception as caught:
                cause = caught
                return {"errors": values_in_words({self.process.process_index: error_text(caught)})}

        row = {"error": None if error is None else error_text(error), "value": value}
        outcome = self._agreement.exchange(step, row, timeout or self.timeout, absent, reduced)
        if "errors" in outcome:
            if error is not None and not isinstance(error, Exception):
                raise error
            raise self._error(outcome["errors"]) from cause
        return outcome["result"]

    def go_alone(self, step: str, timeout: float) -> bool:
        """Whether no other rank comes to the next exchange. If so, this rank, 0, goes on without them.

        It is for a save of what every rank holds. Others come within `timeout` seconds, or not at all.
        """
        process, name = self.process, self._agreement.name
        if process.process_index or process.num_processes == 1:
            return False
        # The exchange reports a store that is gone.
        with contextlib.suppress(RuntimeError, ConnectionError):
            if goes_alone(step, name, default_connection(), process.num_processes, timeout):
                self.process = OneProcess()
                self._agreement = Agreement(self.process, name)
                return True
        return False

    def values(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The values that `ranks` have given in the last exchange, to be read before the next one."""
        return {rank: row["value"] for rank, row in self._agreement.values(ranks).items()}

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
        return self._error(f"rank {self.process.process_index}: {error_text(error)}")

    def _error(self, text: str) -> CheckpointError:
        exists = False
        with contextlib.suppress(OSError):
            exists = self.folder.exists()
        if exists:
            kept = "Its earlier content is unchanged."
        else:
            kept = "Earlier checkpoints are unchanged."
        return CheckpointError(f"{self.folder} was not saved: {text.rstrip('.')}. {kept}")


def error_text(error: BaseException) -> str:
    """An error for a message of several ranks: without its class where it is one of this package's own."""
    text = str(error) or type(error).__name__
    if isinstance(error, (CheckpointError, ConfigurationError)):
        return text
    return f"{type(error).__name__}: {text}"
