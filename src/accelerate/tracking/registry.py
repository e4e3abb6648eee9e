# SPDX-License-Identifier: Apache-2.0
"""Which trackers there are, which a run asks for, and how those are started."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from ..core.enums import LoggerType
from ..core.errors import ConfigurationError, nearest
from ..core.imports import is_available
from ..state import PartialState
from .aim import AimTracker
from .base import GeneralTracker, checked, logger
from .clearml import ClearMLTracker
from .comet_ml import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .swanlab import SwanLabTracker
from .tensorboard import TensorBoardTracker
from .trackio import TrackioTracker
from .wandb import WandBTracker

# name -> class; `register_tracker_class` adds to it
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        AimTracker,
        TensorBoardTracker,
        WandBTracker,
        TrackioTracker,
        CometMLTracker,
        MLflowTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
    )
}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker class of your own known by its `name`, so that `log_with` can ask for it by that name.

    A name that is taken is given to the new class, with a warning. ConfigurationError for anything that is not a
    subclass of `GeneralTracker` with a name.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(f"`tracker_class` must be a subclass of GeneralTracker, not {tracker_class!r}")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"the tracker class {tracker_class.__name__} needs a `name`: a text that is not empty"
        )
    if name == LoggerType.ALL.value:
        raise ConfigurationError("a tracker cannot be named 'all': that asks for every tracker that is installed")
    former = LOGGER_TYPE_TO_CLASS.get(name)
    if former is not None:
        warnings.warn(
            f"the tracker name {name!r} stood for {former.__name__}; it now stands for {tracker_class.__name__}"
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def is_installed(name: str) -> bool:
    """Whether the client of one of the library's own trackers is installed."""
    return is_available(name) or (name == LoggerType.TENSORBOARD.value and is_available("tensorboardX"))


def get_available_trackers() -> list[LoggerType]:
    """The library's own trackers whose client is installed."""
    return [kind for kind in LoggerType if kind is not LoggerType.ALL and is_installed(kind.value)]


def filter_trackers(
    log_with: list[str | LoggerType | GeneralTracker] | str | LoggerType | GeneralTracker | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """The trackers a run will use, from what it asked for: names, `LoggerType` members, tracker objects, or "all".

    Each is kept once, in order. One whose package is not installed is left out, and that is said. "all" stands for
    every one installed that can work without what was not given. ConfigurationError for an unknown name, and where a
    tracker that was named needs `logging_dir`.
    """
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, (list, tuple, set, frozenset)) else [log_with]
    found: list[Any] = []
    for item in asked:
        if _name(item) == LoggerType.ALL.value:
            chosen: list[Any] = [kind for kind in get_available_trackers() if _has_folder(kind.value, logging_dir)]
        else:
            chosen = _chosen(item, logging_dir)
        found += [one for one in chosen if one not in found]
    return found


def _chosen(item: Any, logging_dir: Any) -> list[Any]:
    """What one asked-for tracker comes to: itself, or nothing where its package is not installed."""
    if isinstance(item, GeneralTracker):
        return [item]
    name = _name(item)
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigurationError(_unknown(item))
    own = name in LoggerType
    if own and not is_installed(name):
        _say(f"log_with asks for {name}, which is not installed: nothing goes to it (pip install {name})")
        return []
    if not _has_folder(name, logging_dir):
        raise ConfigurationError(
            f"logging with {name} needs a folder: give the Accelerator `project_dir`, or `project_config` with a "
            "`logging_dir`"
        )
    return [LoggerType(name) if own else name]


def _name(item: Any) -> Any:
    return item.value if isinstance(item, LoggerType) else item if isinstance(item, str) else None


def _of_object(tracker: Any) -> str:
    """The name of a tracker object: its class defines one (GeneralTracker checks that when it is made)."""
    return str(tracker.name)


def _has_folder(name: str, logging_dir: Any) -> bool:
    return logging_dir is not None or not LOGGER_TYPE_TO_CLASS[name].requires_logging_directory


def _unknown(item: Any) -> str:
    choices = [LoggerType.ALL.value, *LOGGER_TYPE_TO_CLASS]
    hint = nearest(item, choices) if isinstance(item, str) else None
    told = f"log_with holds {item!r}, which is no tracker" + (f": did you mean {hint!r}?" if hint else ".")
    if isinstance(item, type) and issubclass(item, GeneralTracker):
        told = (
            f"log_with holds the class {item.__name__}: give an object of it, or register the class and give its name."
        )
    return f"{told} Choose among {', '.join(choices)}, or give an object of a GeneralTracker subclass"


def _say(message: str) -> None:
    """Warn once a machine where the processes are known, and in this process where they are not yet."""
    if not PartialState._shared_state or PartialState().is_local_main_process:
        logger.warning(message)


def start_trackers(
    log_with: list[Any],
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    config: dict[str, Any] | None = None,
    init_kwargs: dict[str, dict[str, Any]] | None = None,
    runs: Mapping[str, str] | None = None,
) -> list[GeneralTracker]:
    """Make and start each tracker that `filter_trackers` returned, and hand each the configuration.

    `init_kwargs` holds the arguments of each under its name; `runs` the runs to go on with (`run_key`), which they
    override. Call it on the processes that log.
    """
    options = dict(checked(init_kwargs or {}, "init_trackers(init_kwargs=...)"))
    known = {*LOGGER_TYPE_TO_CLASS, *(_of_object(item) for item in log_with if isinstance(item, GeneralTracker))}
    for name in options:
        if name not in known:
            hint = nearest(str(name), sorted(known))
            raise ConfigurationError(
                f"init_trackers(init_kwargs=...) names {name!r}, which is no tracker"
                + (f": did you mean {hint!r}?" if hint else f"; the trackers are {', '.join(sorted(known))}")
            )
    for name, run_id in (runs or {}).items():
        if name in LOGGER_TYPE_TO_CLASS:
            options[name] = {**LOGGER_TYPE_TO_CLASS[name].going_on(run_id), **options.get(name, {})}
    trackers = [_made(item, project_name, logging_dir, options) for item in log_with]
    for tracker in trackers:
        tracker.start()
    if config is not None:
        checked(config, "init_trackers(config=...)")
        for tracker in trackers:
            tracker.store_init_configuration(config)
    return trackers


def _made(item: Any, project_name: str, logging_dir: Any, options: Mapping[str, dict[str, Any]]) -> GeneralTracker:
    if isinstance(item, GeneralTracker):
        return item
    name = str(item)
    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    place = (logging_dir,) if tracker_class.requires_logging_directory else ()
    tracker: GeneralTracker = tracker_class(project_name, *place, **options.get(name, {}))
    return tracker
