# SPDX-License-Identifier: Apache-2.0
"""A logger that knows the ranks: on the main process only, on all, or on all one after the other."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .core import env
from .state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter):
    """Adapter whose calls take `main_process_only` (default True) and `in_order` (default False).

    With `in_order` every process logs, one after the other: all of them must make the call.
    """

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the main process only; on all with `main_process_only=False`; on all in turn with `in_order=True`.

        Raises RuntimeError where no `PartialState` or `Accelerator` has been made yet.
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
                self._hand_on(level, msg, args, kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index and self.isEnabledFor(level):
                self._hand_on(level, msg, args, kwargs)
            # Also where this rank's level is too high: the others wait here.
            state.wait_for_everyone()

    def _hand_on(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text, options = self.process(msg, kwargs)
        options["stacklevel"] += 1
        self.logger.log(level, text, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message after the rank that says it."""
        return f"[RANK {PartialState().process_index}] {msg}", dict(kwargs)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """`warning`, once for the same arguments."""
        said = self.__dict__.setdefault("_said", set())
        key = repr((args, sorted(kwargs.items())))
        if key not in said:
            said.add(key)
            self.warning(*args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger that knows the ranks.

    Args:
        name: usually `__name__`.
        log_level: a level's name; None takes ACCELERATE_LOG_LEVEL, and leaves logging's own where that is not set.
    """
    log_level = log_level or env.get("log_level")
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
