# SPDX-License-Identifier: Apache-2.0
"""What one process does and the others do not: decorators, order, and each one's part of the inputs. Written once."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def only_if(condition: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on the processes where `condition()` holds at the call; the others do nothing and get None."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Any:
        if condition():
            return function(*args, **kwargs)
        return None

    return wrapper


@contextlib.contextmanager
def goes_first(is_first: bool, wait: Callable[[str], None]) -> Iterator[None]:
    """The block runs on the first process, then on the others.

    `wait` is a barrier that takes an error message: where the block fails on the first process, the others raise it
    instead of running theirs. Blocks can be nested, as long as they use the same barrier.
    """
    if not is_first:
        wait("")
    try:
        yield
    except BaseException as error:
        # Processes that wait for an outer block have this error from an inner one, and do not wait again.
        if is_first and not getattr(error, "is_raised_on_all", False):
            error.is_raised_on_all = True  # type: ignore[attr-defined]
            wait(f"{type(error).__name__}: {error}")
        raise
    if is_first:
        wait("")


def bounds_of(length: int, index: int, count: int) -> tuple[int, int]:
    """Begin and end of part `index` of `count`: consecutive, sizes differing by at most one, the larger ones first."""
    size, extra = divmod(length, count)
    begin = index * size + min(index, extra)
    return begin, begin + size + (index < extra)


@contextlib.contextmanager
def split(inputs: object, index: int, count: int, pad: bool, device: torch.device) -> Iterator[Any]:
    """This process's consecutive part of a list, tuple, tensor, dataset or dict of equally long such.

    With `pad` each part is as long as the longest, filled with the last element of the inputs. A string is one value,
    which every process gets.
    """
    if count == 1 or isinstance(inputs, str):
        yield inputs
        return
    length = _length(inputs)
    begin, end = bounds_of(length, index, count)
    missing = 0
    if pad:
        missing = math.ceil(length / count) - (end - begin)
    yield _cut(inputs, begin, end, missing, device)


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "split_between_processes: all values of a dict must have the same length, but "
                f"got {lengths}"
            )
        return next(iter(lengths.values()), 0)
    try:
        if not hasattr(inputs, "__getitem__"):
            raise TypeError
        return len(inputs)
    except TypeError:
        raise TypeError(
            "split_between_processes takes a list, tuple, tensor, dataset or a dict of them, "
            f"not {type(inputs).__name__}"
        ) from None


def _cut(inputs: Any, begin: int, end: int, missing: int, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _cut(value, begin, end, missing, device) for key, value in inputs.items()}
    if isinstance(inputs, torch.Tensor):
        part = inputs[begin:end].to(device)
        if missing:
            last = inputs[-1:].to(device)
            part = torch.cat([part, last.expand(missing, *last.shape[1:])])
        return part
    indices = list(range(begin, end))
    indices += [len(inputs) - 1] * missing
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        # A `datasets.Dataset`: a selection of rows stays a dataset.
        return inputs.select(indices)
    if not missing:
        return inputs[begin:end]
    if hasattr(inputs, "__array__"):
        return inputs[indices]
    filled = [inputs[index] for index in indices]
    if isinstance(inputs, tuple):
        return tuple(filled)
    return filled
