# SPDX-License-Identifier: Apache-2.0
"""The known trackers, the choice of a run, and their start."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from ..core.enums import LoggerType
from ..core.errors import ConfigurationError, suggestion
from ..core.imports import is_available
from ..core.messages import warn
from ..state import PartialState
from .base import GeneralTracker, checked, logger
from .local import LocalTracker

# name -> class; `register_tracker_class` adds to it
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    kind.value: getattr(importlib.import_module(f"{__package__}.{kind.module}"), kind.class_name)
    for kind in LoggerType
    if kind is not LoggerType.ALL
}
# Not among the API's members: "all" stands for the services.
LOGGER_TYPE_TO_CLASS[LocalTracker.name] = LocalTracker


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a custom tracker class under its `name`, so that `log_with` accepts that name.

    A class registered under an existing name replaces the previous one, with a warning.

    Args:
        tracker_class: a subclass of `GeneralTracker` with a `name`.

    Raises:
        ConfigurationError: it is not such a class.
        AttributeError: it has no `name`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(
            f"`tracker_class` must be a subclass of GeneralTracker, not {tracker_class!r}"
        )
    name = tracker_class.name
    former = LOGGER_TYPE_TO_CLASS.get(name)
    if former is not None:
        warn(
            f"the tracker name {name!r} referred to {former.__name__}; it now refers to "
            f"{tracker_class.__name__}"
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose package is installed."""
    return [kind for kind in LoggerType if kind is not LoggerType.ALL and _is_installed(kind)]


def _is_installed(kind: LoggerType) -> bool:
    return any(is_available(package) for package in kind.packages)


def filter_trackers(
    log_with: list[str | LoggerType | GeneralTracker] | str | LoggerType | GeneralTracker | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Return the trackers that a run uses, each once, in the order requested.

    A tracker whose package is not installed is skipped with a warning.

    Args:
        log_with: names, `LoggerType` members or tracker objects. "all" stands for every installed tracker that needs
            no argument beyond those given.
        logging_dir: the folder of trackers that write files.

    Returns:
        A `LoggerType` member for each built-in tracker, the name of each registered class, and the objects unchanged.

    Raises:
        ConfigurationError: a name is unknown, or a tracker that was named needs `logging_dir`.
    """
    if log_with is None:
        return []
    if isinstance(log_with, (list, tuple, set, frozenset)):
        requested = list(log_with)
    else:
        requested = [log_with]
    trackers: list[Any] = []
    for item in requested:
        if _name(item) == LoggerType.ALL.value:
            chosen: list[Any] = [
                kind for kind in get_available_trackers() if _has_folder(kind.value, logging_dir)
            ]
        else:
            chosen = _chosen(item, logging_dir)
        trackers += [tracker for tracker in chosen if tracker not in trackers]
    return trackers


def _chosen(item: Any, logging_dir: Any) -> list[Any]:
    """The tracker for one item of `log_with`; an empty list where its package is not installed."""
    if isinstance(item, GeneralTracker):
        return [item]
    name = _name(item)
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigurationError(_unknown(item))
    kind = LoggerType(name) if name in LoggerType else None
    if kind is not None and not _is_installed(kind):
        # Once on each machine where the processes are known, else in each process.
        if not PartialState._shared_state or PartialState().is_local_main_process:
            logger.warning(
                f"log_with requests {name}, which is not installed, so nothing is logged to it "
                f"(pip install {name})"
            )
        return []
    if not _has_folder(name, logging_dir):
        raise ConfigurationError(
            f"logging with {name} needs a folder: pass `project_dir` to Accelerator, or "
            "`project_config` with a `logging_dir`"
        )
    return [kind or name]


def _name(item: Any) -> Any:
    if isinstance(item, LoggerType):
        return item.value
    if isinstance(item, str):
        return item
    return None


def _has_folder(name: str, logging_dir: Any) -> bool:
    return logging_dir is not None or not LOGGER_TYPE_TO_CLASS[name].requires_logging_directory


def _unknown(item: Any) -> str:
    choices = [LoggerType.ALL.value, *LOGGER_TYPE_TO_CLASS]
    if isinstance(item, type) and issubclass(item, GeneralTracker):
        problem = (
            f"log_with contains the class {item.__name__}: pass an instance, or register the "
            "class and pass its name."
        )
    else:
        problem = f"log_with contains {item!r}, which is not a tracker{suggestion(item, choices)}."
    return (
        f"{problem} Choose from {', '.join(choices)}, or pass an instance of a GeneralTracker "
        "subclass"
    )


def start_trackers(
    log_with: list[Any],
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    config: dict[str, Any] | None = None,
    init_kwargs: dict[str, dict[str, Any]] | None = None,
    run_keys: Mapping[str, str] | None = None,
) -> list[GeneralTracker]:
    """Create and start the trackers of a run. Call it on the processes that log.

    Args:
        log_with: the result of `filter_trackers`.
        project_name: the first argument of each tracker class.
        logging_dir: the second argument of those with `requires_logging_directory`.
        config: hyperparameters, which each tracker stores.
        init_kwargs: {tracker name: further arguments of its class}.
        run_keys: {tracker name: `run_key` of the run to continue}; `init_kwargs` override what follows from it.

    Returns:
        The started trackers, in the order of `log_with`.

    Raises:
        ConfigurationError: `init_kwargs` or `config` is not a dict, or `init_kwargs` names an unknown tracker.
    """
    options = dict(checked(init_kwargs or {}, "init_trackers(init_kwargs=...)"))
    accepted = {
        *LOGGER_TYPE_TO_CLASS,
        *(item.name for item in log_with if isinstance(item, GeneralTracker)),
    }
    for name in options:
        if name not in accepted:
            raise ConfigurationError(
                f"init_trackers(init_kwargs=...) names {name!r}, which is not a tracker"
                + (
                    suggestion(name, accepted)
                    or f"; the trackers are {', '.join(sorted(accepted))}"
                )
            )
    for name, run_key in (run_keys or {}).items():
        if name in LOGGER_TYPE_TO_CLASS:
            options[name] = {
                **LOGGER_TYPE_TO_CLASS[name].resume_kwargs(run_key),
                **options.get(name, {}),
            }
    trackers: list[GeneralTracker] = []
    for item in log_with:
        tracker = item
        if not isinstance(item, GeneralTracker):
            name = str(item)
            tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
            arguments: list[Any] = [project_name]
            if tracker_class.requires_logging_directory:
                arguments.append(logging_dir)
            tracker = tracker_class(*arguments, **options.get(name, {}))
        trackers.append(tracker)
    for tracker in trackers:
        tracker.start()
    if config is not None:
        checked(config, "init_trackers(config=...)")
        for tracker in trackers:
            tracker.store_init_configuration(config)
    return trackers
