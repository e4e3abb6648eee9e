# SPDX-License-Identifier: Apache-2.0
"""Our exceptions: what happened, where (rank, argument, file), and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class AccelerateError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigurationError(AccelerateError, ValueError):
    """A requested value (argument, variable or file) cannot be used. The message names it and its origin."""


class MissingConfigurationError(ConfigurationError, FileNotFoundError):
    """A configuration file does not exist."""


class PrepareError(AccelerateError, ValueError):
    """An object given to `prepare` cannot be prepared as requested."""


class NonFiniteError(AccelerateError, ArithmeticError):
    """A loss or a gradient is not finite, and `Accelerator(non_finite=...)` ends the run at it."""


class DistributedOperationException(AccelerateError):
    """An operation was called with different operands on different ranks, or together with another operation."""


class CommunicationError(AccelerateError, RuntimeError):
    """Another rank is gone, or did not come to a collective in time. The message contains what is known about it."""


class LaunchError(AccelerateError, RuntimeError):
    """The requested processes could not be started or joined."""


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint could not be written, found, verified or loaded."""


class WeightFileError(CheckpointError, ValueError):
    """A file of weights, or its folder, is not what can be loaded. The API raises ValueError for it."""


class MissingCheckpointError(CheckpointError, ValueError):
    """There is no checkpoint where one is to be loaded. Scripts that may resume catch the API's ValueError."""


def suggestion(word: object, choices: Iterable[object], form: str = " (did you mean {}?)") -> str:
    """The end of a message about a mistyped `word`: the nearest choice in `form`, or nothing where none is near."""
    import difflib

    found = difflib.get_close_matches(
        str(word), [str(choice) for choice in choices], n=1, cutoff=0.6
    )
    if found:
        return form.format(found[0])
    return ""


# Messages of gloo, NCCL, torch's store and this package for a rank that is gone or has not come: patterns, compiled at
# the first use, because most processes never need them.
LOST_CONNECTION = (
    r"connection (closed|reset) by peer",
    r"connection refused",
    r"connection.*closed",
    r"broken pipe",
    r"remote process exited",
    r"socket (closed|timeout)",
    r"not connected",
    r"operation timed out",
    r"timed out waiting \d+ms",
    r"application timeout caused pair closure",
    r"writing to a pair",
    r"gloo/transport",
    r"gloo::",
    r"NCCL (communicator|error|watchdog)",
    r"collective operation timeout",
    r"monitoredBarrier",
    r"has been aborted",
    r"recvValue",
    r"DistBackendError",
    r"DistNetworkError",
    r"DistStoreError",
    r"CommunicationError:",
    r"connection to another rank failed",
    r"other ranks cannot be reached",
    r"the store of the run is gone",
)


def is_lost_connection(text: str) -> bool:
    """Whether the text of an error between ranks means that another rank is gone or has not come."""
    import re

    return re.search("|".join(LOST_CONNECTION), text, re.IGNORECASE) is not None
