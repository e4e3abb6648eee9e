# SPDX-License-Identifier: Apache-2.0
"""A logger for several processes: it logs on the main process only, on all, or on all one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any

from .core import env, messages
from .state import PartialState

_PACKAGE = f"{__package__}."


class _DefaultHandler(logging.Handler):
    """Prints the records of this package where the script has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_configured(logging.getLogger(record.name)):
            messages.show(self.format(record))


_HANDLER = _DefaultHandler()
logging.getLogger(__package__).addHandler(_HANDLER)


def _is_configured(logger: logging.Logger | None) -> bool:
    """Whether a handler of the script gets the records of a logger."""
    return any(handler is not _HANDLER for handler in _handlers(logger))


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """The handlers that get the records of a logger."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger adapter whose calls take `main_process_only` (default True) and `in_order` (default False).

    With `in_order`, the processes log one after the other, so all of them must make the call.

    Attributes:
        has_level (bool): the level was requested, so records of that level are shown also where no handler accepts
            them.

    Example:
        logger = get_logger(__name__)
        logger.info("loss %.3f", loss, main_process_only=False)
    """

    has_level = False

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message on the main process.

        Args:
            level: the level, as a number of `logging`.
            msg: the message.
            *args: what is formatted into the message.
            **kwargs: `main_process_only=False` logs on all processes, `in_order=True` on one after the other. The
                rest is passed to `logging.Logger.log`.

        Raises:
            RuntimeError: no `PartialState` or `Accelerator` has been made yet.
        """
        if not PartialState._shared_state:
            raise RuntimeError(
                "You must initialize the accelerate state by calling either `PartialState()` or `Accelerator()` "
                "before using the logging utility."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not in_order:
            if self.isEnabledFor(level) and self._should_log(main_process_only):
                self._emit(level, msg, args, kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index and self.isEnabledFor(level):
                self._emit(level, msg, args, kwargs)
            # Also where this rank's level is too high: the others wait here.
            state.wait_for_everyone()

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text, options = self.process(msg, kwargs)
        options["stacklevel"] += 1
        last_resort = logging.lastResort
        if not self.has_level or last_resort is None or self._is_shown(level):
            self.logger.log(level, text, *args, **options)
            return
        # No handler shows it. `logging`'s handler of last resort writes to stderr, by default warnings where there is
        # no handler at all. It is borrowed for this call: with a handler of ours, a later `logging.basicConfig` of the
        # script would do nothing.
        accepted = last_resort.level
        last_resort.setLevel(min(level, accepted))
        self.logger.addHandler(last_resort)
        try:
            self.logger.log(level, text, *args, **options)
        finally:
            self.logger.removeHandler(last_resort)
            last_resort.setLevel(accepted)

    def _is_shown(self, level: int) -> bool:
        """Whether a handler of this logger, or of one to which it passes its records, accepts the level."""
        logger = self.logger
        ignored: tuple[type[logging.Handler], ...] = (logging.NullHandler,)
        if _is_configured(logger):
            ignored = (logging.NullHandler, _DefaultHandler)
        return any(
            level >= handler.level and not isinstance(handler, ignored)
            for handler in _handlers(logger)
        )

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the message of a script."""
        if not self.logger.name.startswith(_PACKAGE):
            msg = f"[RANK {PartialState().process_index}] {msg}"
        return msg, dict(kwargs)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning, once for the same arguments."""
        logged = self.__dict__.setdefault("_logged", set())
        key = repr((args, sorted(kwargs.items())))
        if key not in logged:
            logged.add(key)
            self.warning(*args, **{"stacklevel": 3, **kwargs})


def rank_0_logger(name: str) -> logging.Logger:
    """A logger of this package for messages that are the same on all ranks.

    Unlike `get_logger`'s loggers, it does not need a state.
    """
    logger = logging.getLogger(name)
    logger.addFilter(lambda record: messages.is_rank_0())
    return logger


def print_or_log(logger: MultiProcessAdapter, text: str) -> None:
    """Show the user a message on the main process, unless the launch is quiet.

    It is a record of level INFO if the script has configured logging, and otherwise a line on stderr.
    """
    if logger.has_level or _is_configured(logger.logger):
        logger.info(text, stacklevel=3)
    elif PartialState().is_main_process and not env.get_flag("ACCELERATE_QUIET"):
        messages.show(text)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for several processes.

    Args:
        name: usually `__name__`.
        log_level: the name of a level. Defaults to the variable ACCELERATE_LOG_LEVEL; otherwise the level is
            unchanged. With a level, records are shown on stderr if no handler of the script accepts that level.

    Returns:
        An adapter whose calls take `main_process_only` and `in_order`.

    Example:
        logger = get_logger(__name__)
        logger.info("on every process", main_process_only=False)
    """
    log_level = log_level or env.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    adapter = MultiProcessAdapter(logger, {})
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
        adapter.has_level = True
    return adapter
