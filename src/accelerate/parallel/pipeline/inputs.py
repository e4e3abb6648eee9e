# SPDX-License-Identifier: Apache-2.0
"""A batch on its way into micro-batches: which inputs are divided, and what makes two batches alike."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core import trees
from ...core.errors import PrepareError

logger = logging.getLogger(__name__)

# What asks a model of transformers for the outputs of all of its blocks.
COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")


class Inputs:
    """The inputs of one call, and their division into `parts` of `rows` samples each."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        parts: int,
        whole: set[str],
        names: Sequence[str] = (),
    ) -> None:
        self.args, self.kwargs, self.batch, self.whole = args, kwargs, batch, whole
        # Of the arguments that are given by position.
        self.names = names[: len(args)]
        quotient, rest = divmod(batch, parts)
        self.rows = [quotient + (number < rest) for number in range(parts)]
        self.starts = [sum(self.rows[:number]) for number in range(parts)]

    def digest(self) -> str:
        """What tells different inputs apart."""
        return str([_sum(tensor) for tensor in trees.leaves((self.args, self.kwargs))])

    def part(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments of one micro-batch; tensors are views."""
        start, rows = self.starts[number], self.rows[number]

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(0, start, rows) if tensor.dim() and tensor.shape[0] == self.batch else tensor

        args = tuple(trees.map_leaves(cut, value) for value in self.args)
        kwargs = {
            name: value if name in self.whole else trees.map_leaves(cut, value) for name, value in self.kwargs.items()
        }
        return args, kwargs


def _sum(tensor: torch.Tensor) -> int | float:
    """The sum of a tensor: exact of integers, which float32 does not tell apart beyond 2**24."""
    if not tensor.is_floating_point():
        return complex(tensor.sum()).real if tensor.is_complex() else int(tensor.sum(dtype=torch.int64))
    return float(tensor.sum(dtype=torch.float32 if tensor.device.type == "mps" else torch.float64))


class Divider:
    """Divides the inputs of a model's forward. `whole` names inputs that are never divided."""

    def __init__(self, forward: Callable[..., Any], whole: Sequence[str], parts: int, labels: bool = False) -> None:
        self.whole = set(whole)
        self.parts = parts
        parameters = inspect.signature(forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positions = [parameter.name for parameter in parameters if parameter.kind in named]
        free = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        known = {parameter.name for parameter in parameters}
        if labels and "labels" in known:
            raise PrepareError("loss_fn is given, and the model's forward takes labels itself: give one of both")
        if not free and (unknown := self.whole - known):
            raise PrepareError(
                f"whole_inputs names {', '.join(sorted(unknown))}, which the model's forward does not take"
            )

    def divide(self, args: tuple[Any, ...], kwargs: dict[str, Any], first: bool) -> Inputs:
        """Raises PrepareError where the inputs cannot be divided; `first`: also for a batch of too few samples."""
        # Where an input is not to be divided it must be known by its name.
        while self.whole and args and any(name in self.whole for name in self.positions[: len(args)]):
            kwargs = {self.positions[len(args) - 1]: args[-1], **kwargs}
            args = args[:-1]
        if asked := [name for name in COLLECTING if kwargs.get(name) is True]:
            raise PrepareError(
                f"the pipelined model was called with {asked[0]}=True: what blocks of other stages gave is not "
                "collected"
            )
        tensors = [
            leaf
            for value in (*args, *(value for name, value in kwargs.items() if name not in self.whole))
            for leaf in trees.leaves(value)
        ]
        if any(tensor.requires_grad for tensor in tensors):
            raise PrepareError("an input of the pipelined model requires grad: gradients of inputs are not given back")
        batch = next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), None)
        if batch is None:
            raise PrepareError("the pipelined model was called without a tensor of samples: nothing can be divided")
        if first and batch < self.parts:
            raise PrepareError(
                f"a batch of {batch} samples cannot be divided into num_microbatches={self.parts}: lower it, or give "
                "each process larger batches"
            )
        return Inputs(args, kwargs, batch, min(self.parts, max(batch, 1)), self.whole, self.positions)


def keep_to_tensors(model: nn.Module) -> None:
    """Have a model of transformers return what stages can give. Raises PrepareError for what they cannot."""
    config = getattr(model, "config", None)
    for flag in COLLECTING:
        if getattr(config, flag, False):
            raise PrepareError(
                f"the model's config has {flag}=True: what blocks of other stages gave is not collected"
            )
    # An encoder and a decoder have copies of the configuration.
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    if caching:
        logger.info("use_cache is set to False: a cache of keys and values would lie on different stages")
    for config in caching:
        config.use_cache = False


def key_of(value: Any, shapes: bool = True) -> Any:
    """Equal for inputs of equal structure, shapes (without `shapes`: dimensions) and dtypes; hashable."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) if shapes else value.dim(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(key_of(entry, shapes) for entry in value)
    if isinstance(value, Mapping):
        return tuple((name, key_of(entry, shapes)) for name, entry in value.items())
    if isinstance(value, (type(None), bool, int, str)):
        return value
    return type(value)
