# SPDX-License-Identifier: Apache-2.0
"""Forwards of sharded models in `torch.inference_mode()`: unsharded parameters stay tensors that can be trained.

FSDP keeps the tensors to which it gathers parameters. Tensors made in inference mode could not take part in a training
forward, nor could tensors made before be written in inference mode.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from .units import shard_groups

P = ParamSpec("P")
T = TypeVar("T")

# The methods of FSDP2's group of parameters that make or write tensors in a forward.
_METHODS = ("lazy_init", "unshard", "wait_for_unshard", "reshard")


@contextlib.contextmanager
def _normal_tensors() -> Iterator[None]:
    """A block whose tensors are no inference tensors, and which records no graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def allow_inference_mode(model: nn.Module) -> None:
    """Make the units of an FSDP2 model gather parameters to normal tensors, also in inference mode."""
    for _, group, _ in shard_groups(model):
        group.__class__ = _gathering_normally(type(group))  # type: ignore[arg-type]


@functools.cache
def _gathering_normally(kind: type[T]) -> type[T]:
    return type(kind.__name__, (kind,), {name: _outside(getattr(kind, name)) for name in _METHODS})


def _outside(method: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with _normal_tensors():
            return method(*args, **kwargs)

    return call


class NormalForward:
    """Makes the forward of an FSDP1 model, with all that it gathers, run without inference mode."""

    def __init__(self, model: nn.Module) -> None:
        self._blocks: list[contextlib.AbstractContextManager[None]] = []
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        if torch.is_inference_mode_enabled():
            self._blocks.append(_normal_tensors())
            self._blocks[-1].__enter__()

    def _end(self, *_: object) -> None:
        if self._blocks:
            self._blocks.pop().__exit__(None, None, None)
