# SPDX-License-Identifier: Apache-2.0
"""The base classes of trackers, of custom ones (`GeneralTracker`) and of the built-in ones, and what they log."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import logging
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..core.errors import ConfigurationError
from ..state import PartialState

logger: logging.Logger = logging.getLogger("accelerate.tracking")

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """Run a tracker's method on the main process only, where its class sets `main_process_only`.

    Args:
        function: a method of a tracker.

    Returns:
        The method. It returns None on the processes where it does not run.
    """

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return method  # type: ignore[return-value]


class GeneralTracker:
    """Base class of all trackers. A subclass overrides the methods it needs; those of this class have no effect.

    Attributes:
        name (str): the name in `log_with`, `init_kwargs`, `log_kwargs` and `get_tracker`. Required.
        requires_logging_directory (bool): whether the constructor takes `logging_dir` after the run's name. Required.
        tracker (property): the run or writer object of the client package. Required.
        main_process_only (bool): log only on the main process (the default), or on every process.
        background (bool): `init_trackers(background=True)` has `log` called in a thread (the default). False for a
        client that is bound to the thread that opened
            its run.

    Raises:
        NotImplementedError: the subclass lacks one of the required attributes.
    """

    main_process_only: bool = True
    background: bool = True
    if TYPE_CHECKING:
        name: str
        requires_logging_directory: bool
        tracker: Any

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        # not hasattr: that would run the `tracker` property before there is a run
        present = set(dir(self))
        missing = [
            name
            for name in ("name", "requires_logging_directory", "tracker")
            if name not in present
        ]
        if missing:
            raise NotImplementedError(
                f"the tracker class {type(self).__name__} lacks {', '.join(f'`{name}`' for name in missing)}: "
                "define them in the class"
            )

    @property
    def run_key(self) -> str | None:
        """The service's identifier of the open run, which checkpoints store; None where it has none."""
        return None

    @classmethod
    def resume_kwargs(cls, run_key: str) -> dict[str, Any]:
        """Return the constructor's arguments that continue a former run; empty where the service cannot do that."""
        return {}

    def start(self) -> None:
        """Open the run. `init_trackers` calls it on the processes that log."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: {name: number, text or what the client accepts}.
            step: the training step that they belong to.
            kwargs: passed to the client.
        """

    def background_options(self) -> dict[str, Any]:
        """Arguments that `log` needs where another thread than that of the run calls it."""
        return {}

    def finish(self) -> None:
        """Write what is pending and close the run."""

    def finish_at_exit(self) -> None:
        """Finish the run of a script that ends without `finish`: returned, failed, interrupted or exited."""
        self.finish()


class ClientTracker(GeneralTracker):
    """Base class of the trackers of client packages: `start` opens a run once, `finish` closes it once.

    A subclass defines `_open`, which returns the client's run, `_close`, `log` and `_store`, which records the
    hyperparameters. No client package is imported before `start`.
    """

    name: str
    requires_logging_directory: bool = False
    # The attribute of the client's run that identifies it, as a dotted path.
    _run_key_attribute: ClassVar[str | None] = None
    # The argument of the constructor that takes the key of a former run and continues it.
    _resume_argument: ClassVar[str | None] = None

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._client: Any = None
        self._is_open = False
        self._warned_keys: set[str] = set()
        # Waits for the calls of `log` that a thread has not made yet.
        self._drain: Callable[[], object] | None = None

    @property
    def _package(self) -> Any:
        """The client package."""
        return importlib.import_module(self.name)

    @property
    def tracker(self) -> Any:
        """The run or writer object of the client package; None on a process that does not log.

        It has all values that were logged before.
        """
        if self._drain is not None:
            self._drain()
        if self._client is None and self.main_process_only and not PartialState().is_main_process:
            return None
        if self._client is None:
            raise AttributeError(
                f"the {self.name} tracker has not been started: call "
                "`accelerator.init_trackers(...)` or its `start()` first"
            )
        return self._client

    @on_main_process
    def start(self) -> None:
        """Open the run, unless it is open."""
        if self._is_open:
            return
        self._client = self._open()
        self._is_open = True
        logger.debug("%s: run %s is open", self.name, self.run_name)

    @on_main_process
    def finish(self) -> None:
        """Close the run, if it is open."""
        if self._is_open:
            self._is_open = False
            self._close(self._client)

    def finish_at_exit(self) -> None:
        """Finish the run of a script that ends without `finish`.

        Here this does nothing: most client packages close their runs themselves at exit, and record whether the script
        failed.
        """

    @property
    def run_key(self) -> str | None:
        """The service's identifier of the open run; None where it has none (offline, disabled)."""
        if not self._is_open or self._run_key_attribute is None:
            return None
        client = self._client
        for attribute in self._run_key_attribute.split("."):
            client = getattr(client, attribute, None)
        if client is None:
            return None
        return str(client)

    @classmethod
    def resume_kwargs(cls, run_key: str) -> dict[str, Any]:
        """Return the constructor's arguments that continue a former run; empty where the service cannot do that."""
        if cls._resume_argument is None:
            return {}
        return {cls._resume_argument: run_key}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyperparameters of the run."""
        self._store(configuration(checked(values, "store_init_configuration")))

    def _store(self, values: dict[str, Any]) -> None:
        """Record hyperparameters."""

    def _open(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot open its run: define `_open`")

    def _close(self, client: Any) -> None:
        client.finish()

    def _numbers(self, values: Any, accepted: str) -> Iterator[tuple[str, int | float]]:
        """The numbers among values that may be nested, by name; others are warned of."""
        for key, value in flat(checked(values, "log")):
            scalar = number(value)
            if scalar is None:
                self._warn_unsupported(key, value, accepted)
            else:
                yield key, scalar

    def _warn_unsupported(self, key: str, value: Any, accepted: str) -> None:
        """Warn once for a key whose value the client cannot take; the other values of the call are recorded."""
        if key not in self._warned_keys:
            self._warned_keys.add(key)
            text = str(value)
            shown = text if len(text) <= 80 else text[:77] + "..."
            logger.warning(
                "%s accepts %s: %r contains %s of type %s and is not logged",
                self.name,
                accepted,
                key,
                shown,
                type(value),
            )


def checked(values: Any, method: str) -> Mapping[str, Any]:
    """`values` if it is a mapping, else a ConfigurationError that names `method`."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"{method} needs a dict of names and values, not {type(values).__name__} "
            "(for the Namespace of argparse: vars(args))"
        )
    return values


# --- logged values: one-element tensors and arrays as numbers, nested mappings as flat ones -------------------------

_TOO_LARGE = 2**1023


def number(value: Any) -> int | float | None:
    """Convert a number, a NumPy scalar, or a tensor or array of one element to a Python number; None for others.

    An integer that no float can hold is infinite: the clients store floats.
    """
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, numbers.Integral):
        integer = int(value)
        if abs(integer) < _TOO_LARGE:
            return integer
        return math.copysign(math.inf, integer > 0 or -1)
    if isinstance(value, numbers.Real):
        return float(value)
    # torch has numel(), numpy an int
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    count = size() if callable(size) else size
    if count != 1 or not hasattr(value, "item") or getattr(value, "is_meta", False):
        return None
    item = value.item()
    if isinstance(item, (bool, int, float)):
        return item
    return None


def text(value: Any) -> str:
    """Any value as text that UTF-8 can encode: bytes of file names that are not text are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the numbers of possibly nested mappings to Python numbers; other values are returned unchanged."""
    converted = {}
    for key, value in values.items():
        scalar = plain(value) if isinstance(value, Mapping) else number(value)
        converted[key] = value if scalar is None else scalar
    return converted


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and dataclasses, with names joined by `/`, in order."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = _fields(value)
        if isinstance(value, Mapping):
            yield from flat(value, prefix=f"{name}/")
        else:
            yield name, value


def configuration(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert a configuration to nested dicts and lists of numbers, booleans, text and None.

    Other values are converted to text: the clients refuse them, or store only that an object was there.
    """
    return {str(key): _stored(value) for key, value in values.items()}


def _stored(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _fields(value)
    if isinstance(value, Mapping):
        return configuration(value)
    if isinstance(value, (list, tuple)):
        return [_stored(item) for item in value]
    if value is None or isinstance(value, str):
        return value
    scalar = number(value)
    if scalar is None:
        return str(value)
    return scalar


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def hyperparameters(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten a configuration to numbers, booleans and text; other values are converted to text."""
    flattened: dict[str, bool | int | float | str] = {}
    for name, value in flat(values):
        if isinstance(value, enum.Enum):
            value = value.value
        as_number = None if isinstance(value, str) else number(value)
        if as_number is None:
            flattened[text(name)] = text(value)
        else:
            flattened[text(name)] = as_number
    return flattened
