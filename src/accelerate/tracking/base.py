# SPDX-License-Identifier: Apache-2.0
"""What every tracker is: the base class users derive from, and the base of the trackers of client packages."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import ConfigurationError
from ..state import PartialState

logger = logging.getLogger("accelerate.tracking")

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """A tracker's method on the main process alone where its class says `main_process_only`; on each process else.

    The processes left out get None.
    """

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return method  # type: ignore[return-value]


class GeneralTracker:
    """Base of all trackers. A tracker of your own defines `name`, `requires_logging_directory` and `tracker`.

    Attributes of the class:
        name (str): what `log_with`, `init_kwargs`, `log_kwargs` and `get_tracker` call it.
        requires_logging_directory (bool): whether its constructor takes `logging_dir` after the run's name.
        tracker (property): the client's own run or writer.
        main_process_only (bool): log on the main process alone (the default) or on every process.

    Raises NotImplementedError where one of them is missing. The methods here do nothing: override what you need.
    """

    main_process_only: bool = True
    if TYPE_CHECKING:
        name: str
        requires_logging_directory: bool
        tracker: Any

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        present = set(dir(self))  # not hasattr: that would run the `tracker` property before there is a run
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in present]
        if missing:
            raise NotImplementedError(
                f"the tracker class {type(self).__name__} lacks {', '.join(f'`{name}`' for name in missing)}: "
                "define them in the class"
            )

    @property
    def run_key(self) -> str | None:
        """By what the service knows this run, for a checkpoint; None where it has no such name, or is not open."""
        return None

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        """The constructor's arguments that log to the run `run_id` again; none where the service offers that not."""
        return {}

    def start(self) -> None:
        """Open the run. Called by `init_trackers` on the processes that log, once the run is known to begin."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyperparameters `values` of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record `values` (name to number, text or what the client takes) at `step`."""

    def finish(self) -> None:
        """Write what is pending and close the run."""


class ClientTracker(GeneralTracker):
    """A tracker of a client package: `start` opens its run once, `finish` closes it once.

    A subclass says how: `_open` returns the client's run, `_close` ends it, `log` and `store_init_configuration`
    hand it values. No client is imported before `start`.
    """

    name: str
    requires_logging_directory: bool = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._client: Any = None
        self._is_open = False
        self._refused: set[str] = set()

    @property
    def tracker(self) -> Any:
        """The client's own run or writer; None on a process that does not log."""
        if self._client is None and self.main_process_only and not PartialState().is_main_process:
            return None
        if self._client is None:
            raise AttributeError(
                f"the {self.name} tracker is not started: call `accelerator.init_trackers(...)` or its `start()` first"
            )
        return self._client

    @on_main_process
    def start(self) -> None:
        if self._is_open:
            return
        self._client = self._open()
        self._is_open = True
        logger.debug("%s: run %s is open", self.name, self.run_name)

    @on_main_process
    def finish(self) -> None:
        if self._is_open:
            self._is_open = False
            self._close(self._client)

    @property
    def run_key(self) -> str | None:
        return self._id_of(self._client) if self._is_open else None

    def _id_of(self, client: Any) -> str | None:
        return None

    def _open(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how to open its run: define `_open`")

    def _close(self, client: Any) -> None:
        client.finish()

    def _refuse(self, key: str, value: Any, takes: str) -> None:
        """Say once a key that the client cannot take a value; the other values of the call are recorded."""
        if key not in self._refused:
            self._refused.add(key)
            text = str(value)
            shown = text if len(text) <= 80 else text[:77] + "..."
            logger.warning(
                "%s takes %s: %r holds %s of type %s and is not logged", self.name, takes, key, shown, type(value)
            )


def named(client: Any, attribute: str) -> str | None:
    """A client's name for its run; None where it has none (offline, disabled)."""
    found = getattr(client, attribute, None)
    return None if found is None else str(found)


def checked(values: Any, method: str) -> Mapping[str, Any]:
    """`values`, or a ConfigurationError that says what `method` needs."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"{method} needs a dict of names and values, not {type(values).__name__} "
            "(for the Namespace of argparse: vars(args))"
        )
    return values
