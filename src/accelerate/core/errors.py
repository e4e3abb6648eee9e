# SPDX-License-Identifier: Apache-2.0
"""Our exceptions: what happened, where (rank, argument, file), and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType


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
    """An operation was called with different operands on different ranks, or at the same time as another operation."""


class CommunicationError(AccelerateError, RuntimeError):
    """Another rank is gone, or did not reach a collective in time. The message contains what is known about it."""


class LaunchError(AccelerateError, RuntimeError):
    """The requested processes could not be started or joined."""


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint could not be written, found, verified or loaded."""


class WeightFileError(CheckpointError, ValueError):
    """A file of weights, or its folder, is not what can be loaded. The API raises ValueError for it."""


class MissingCheckpointError(CheckpointError, ValueError):
    """There is no checkpoint where one is to be loaded. Scripts that may resume catch the API's ValueError."""


class BucketAccessError(CheckpointError, PermissionError):
    """A store refuses a request: no such bucket, no rights, wrong credentials, a clock that is off."""


class BucketUnreachableError(CheckpointError, ConnectionError):
    """A store cannot be reached, or fails, in spite of retries."""


class _ShortTraceback:
    """A block of a public method from which errors of a wrong argument leave as if that method had raised them."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the frames of the user and of the method. The message names the argument."""
        if error is None or trace is None:
            return
        wrong_argument = (ConfigurationError, PrepareError)
        if isinstance(error.__cause__, wrong_argument):
            error.__cause__.__traceback__ = None
            trace.tb_next = None
        elif isinstance(error, wrong_argument):
            trace.tb_next = None


short_traceback: _ShortTraceback = _ShortTraceback()


def suggestion(word: object, choices: Iterable[object], form: str = " (did you mean {}?)") -> str:
    """The end of a message about a mistyped `word`: the nearest choice in `form`, or nothing where none is near."""
    import difflib

    found = difflib.get_close_matches(
        str(word), [str(choice) for choice in choices], n=1, cutoff=0.6
    )
    if found:
        return form.format(found[0])
    return ""


# What torch says about frequent mistakes, and what to do about them here: first those of a loss.
_LOSS_REMEDIES = {
    "grad can be implicitly created only for scalar outputs": "`accelerator.backward(loss)` needs a loss of one "
    "element: call `loss.mean()`, or use a loss function with a `reduction`",
    "does not require grad and does not have a grad_fn": "the loss is not connected to a parameter that trains: look "
    "for `torch.no_grad()`, `.detach()` or `.item()` between the model and `accelerator.backward(loss)`, and for a "
    "model whose parameters are all frozen",
    "object has no attribute 'backward'": "`accelerator.backward(loss)` needs the tensor that "
    "the model or the loss function returned, not a "
    "number: call `loss.item()` only after the backward "
    "pass",
}
_REMEDIES = {
    **_LOSS_REMEDIES,
    "Expected to have finished reduction in the prior iteration": "a step did not use all parameters of a "
    "model under DDP. Use "
    "`Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])`, "
    "or freeze these parameters "
    "(`requires_grad_(False)`) before "
    "`prepare`",
    "but _scale is None": "fp16 mixed precision scales the loss: call "
    "`accelerator.backward(loss)` instead of `loss.backward()`",
    "Expected all tensors to be on the same device": "`prepare` moves the model and the batches "
    "of a prepared loader. Create all other "
    "tensors on `accelerator.device`, or move "
    "them with `.to(accelerator.device)`",
}


def add_remedy(error: BaseException) -> bool:
    """Add a line to the traceback of a torch error that says what to do about a frequent mistake, if it is one.

    Returns:
        Whether it is an error that a wrong loss causes.
    """
    text = str(error)
    for message, remedy in _REMEDIES.items():
        if message in text:
            note = f"accelerate: {remedy}"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            return message in _LOSS_REMEDIES
    return False


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
    r"wait for another rank timed out",
    r"other ranks cannot be reached",
    r"the store of the run is gone",
)


def is_lost_connection(text: str) -> bool:
    """Whether the text of an error between ranks means that another rank is gone or has not come."""
    import re

    return re.search("|".join(LOST_CONNECTION), text, re.IGNORECASE) is not None
