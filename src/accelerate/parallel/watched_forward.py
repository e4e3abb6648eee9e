# SPDX-License-Identifier: Apache-2.0
"""Short forwards that are compared with each other, and leave a model as it was."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ..collectives.objects import gather_each
from ..core import devices, trees
from ..core.modules import class_name
from ..logging import MultiProcessAdapter, get_logger
from .gradients import local
from .unwrap import canonical_name

logger: MultiProcessAdapter = get_logger(__name__)

# Models compute norms and rotations in float32, whatever their dtype.
_FLOAT32 = torch.finfo(torch.float32).eps
# Accelerators may multiply float32 in TF32.
_TF32 = 2.0**-10


class WatchedForward:
    """What went into modules and came out of them, in order."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[torch.Tensor]] = {}
        # Of the coarsest dtype.
        self.epsilon: float = _FLOAT32
        self.running: list[str] = ["the loop"]

    def add(self, what: str, data: object) -> None:
        """Keep the floating-point tensors of nested data; a later operation may write to the originals."""
        tensors = self.tensors.setdefault(what, [])
        for tensor in trees.leaves(data):
            if not tensor.is_floating_point():
                continue
            self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
            if tensor.device.type != "cpu":
                self.epsilon = max(self.epsilon, _TF32)
            tensors.append(local(tensor).detach().clone())

    def watch(self, model: nn.Module, handles: contextlib.ExitStack) -> None:
        """Keep what goes into each module of a model and what comes out, until `handles` are closed."""
        for path, module in model.named_modules():
            name = class_name(module)
            if path:
                name = f"{canonical_name(path)} ({name})"
            enter = functools.partial(self._enter, name)
            leave = functools.partial(self._leave, name)
            handles.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            handles.callback(module.register_forward_hook(leave).remove)

    def _enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        self.add(f"what {self.running[-1]} passes to {name}", (args, kwargs))
        self.running.append(name)

    def _leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        self.running.pop()
        self.add(f"the output of {name}", output)


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest difference of a row to the size of rows; NaN if all are 0."""
    is_finite = expected.isfinite()
    rows = torch.where(is_finite, expected, 0).double()
    differences = torch.where(is_finite, actual.double() - expected, 0)
    if expected.dim() > 1:
        rows = rows.norm(dim=-1)
        differences = differences.norm(dim=-1)
    largest = differences.nan_to_num(nan=math.inf).abs().max()
    return float(largest / rows.square().mean().sqrt())


def difference_on_ranks(compare: Callable[[], str], what: str, is_alone: bool = False) -> str:
    """The first difference that `compare` returns on a rank; empty if there is none, or if it fails on a rank.

    `is_alone`: this rank asks no other.
    """
    is_failed, difference = False, ""
    try:
        difference = compare()
    except Exception as error:
        is_failed = True
        logger.debug(f"{what} was not compared: {error!r}")
    everywhere = [(is_failed, difference)]
    if not is_alone and dist.is_available() and dist.is_initialized():
        everywhere = gather_each(everywhere[0], operation="the first forward")
    if any(failed for failed, _ in everywhere):
        return ""
    return next((text for _, text in everywhere if text), "")


@contextlib.contextmanager
def unchanged(model: nn.Module, kinds: Iterable[str]) -> Iterator[None]:
    """A block without gradients and compilation, after which a model and random generators are as before.

    Raises RuntimeError for a block that draws random numbers.
    """
    sources = [devices.generator_module(kind) for kind in kinds]
    states = [source.get_rng_state() for source in sources]
    attributes, lists, buffers = [], [], []
    for module in model.modules():
        values = dict(vars(module))
        attributes.append((module, values))
        for name, value in values.items():
            if isinstance(value, list) and not name.startswith("_"):
                lists.append((value, value.copy()))
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.clone()))
        module.training = False
    try:
        # A forward without gradients may warn of just that; what else it warns of, the loop's own forward does too.
        with warnings.catch_warnings(), torch.no_grad(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
        for source, state in zip(sources, states, strict=True):
            if not torch.equal(source.get_rng_state(), state):
                raise RuntimeError("it draws random numbers")
    finally:
        for source, state in zip(sources, states, strict=True):
            source.set_rng_state(state)
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)
        for content, entries in lists:
            content[:] = entries
        for module, name, buffer, before in buffers:
            setattr(module, name, buffer)
            if not torch.equal(buffer, before):
                buffer.copy_(before)
