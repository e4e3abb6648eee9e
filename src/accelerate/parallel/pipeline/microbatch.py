# SPDX-License-Identifier: Apache-2.0
"""How the inputs of a pipelined model are split into micro-batches, and outputs are merged."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...core import trees
from ...core.errors import PrepareError
from .p2p import TensorSpec, is_spec
from .remote_tensor import RemoteTensor
from .requirements import COLLECTING

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)


Args = tuple[object, ...]
Kwargs = dict[str, object]


class MicroBatches:
    """The inputs of one call of a model, and how they are split: micro-batch i has `sizes[i]` samples.

    `undivided` names keyword arguments that each micro-batch gets unchanged.
    """

    def __init__(
        self, args: Args, kwargs: Kwargs, batch_size: int, count: int, undivided: set[str]
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.batch_size = batch_size
        self.undivided = undivided
        quotient, rest = divmod(batch_size, count)
        self.sizes: list[int] = [quotient + (number < rest) for number in range(count)]
        self.offsets: list[int] = [sum(self.sizes[:number]) for number in range(count)]

    def digest(self) -> str:
        """Differs between different inputs."""
        return str([_sum(tensor) for tensor in trees.leaves((self.args, self.kwargs))])

    def microbatch(self, number: int) -> tuple[Args, Kwargs]:
        """Arguments and keyword arguments of one micro-batch; tensors are views."""
        return self.part(self.offsets[number], self.sizes[number])

    def part(self, start: int, size: int) -> tuple[Args, Kwargs]:
        """Arguments and keyword arguments of `size` samples; tensors are views."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.shape[0] == self.batch_size:
                return tensor.narrow(0, start, size)
            return tensor

        args = tuple(trees.map_leaves(cut, value) for value in self.args)
        kwargs = {
            name: value if name in self.undivided else trees.map_leaves(cut, value)
            for name, value in self.kwargs.items()
        }
        return args, kwargs


def _sum(tensor: torch.Tensor) -> int | float:
    """The sum of a tensor; of integers exactly, since float32 does not distinguish them beyond 2**24."""
    if not tensor.is_floating_point():
        if tensor.is_complex():
            return complex(tensor.sum()).real
        return int(tensor.sum(dtype=torch.int64))
    return float(tensor.sum(dtype=torch.float32 if tensor.device.type == "mps" else torch.float64))


class BatchSplitter:
    """Splits the inputs of a model's forward into `num_microbatches`. `undivided` names inputs that stay complete."""

    def __init__(
        self, forward: Callable[..., object], undivided: Sequence[str], num_microbatches: int
    ) -> None:
        self.undivided: set[str] = set(undivided)
        self.num_microbatches = num_microbatches
        parameters = inspect.signature(forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positions: list[str] = [
            parameter.name for parameter in parameters if parameter.kind in positional
        ]

    def split(self, args: Args, kwargs: Kwargs, first: bool) -> MicroBatches:
        """Split the inputs of a call.

        Raises:
            PrepareError: for inputs that cannot be split; with `first`, also for a batch of too few samples.
        """
        # An input that stays complete has to be known by its name.
        while (
            self.undivided
            and args
            and any(name in self.undivided for name in self.positions[: len(args)])
        ):
            kwargs = {self.positions[len(args) - 1]: args[-1], **kwargs}
            args = args[:-1]
        packed = trees.first_leaf((args, kwargs), lambda value: isinstance(value, PackedSequence))
        if packed is not None:
            raise PrepareError(
                "an input of the pipelined model is a PackedSequence, whose rows are time steps: pass padded "
                "sequences with their lengths, and pack them in the block that uses them"
            )
        requested = [name for name in COLLECTING if kwargs.get(name) is True]
        if requested:
            raise PrepareError(
                f"the pipelined model was called with {requested[0]}=True: outputs of the blocks of other stages are "
                "not collected"
            )
        tensors = [
            leaf
            for value in (
                *args,
                *(value for name, value in kwargs.items() if name not in self.undivided),
            )
            for leaf in trees.leaves(value)
        ]
        if any(tensor.requires_grad for tensor in tensors):
            raise PrepareError(
                "an input of the pipelined model requires grad: a pipeline returns no input gradients"
            )
        batch = next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), None)
        if batch is None:
            raise PrepareError(
                "the pipelined model was called without a tensor of samples: there is nothing to split"
            )
        if first and batch < self.num_microbatches:
            raise PrepareError(
                f"a batch of {batch} samples cannot be divided into num_microbatches={self.num_microbatches}: lower "
                "it, or give each process larger batches"
            )
        count = min(self.num_microbatches, max(batch, 1))
        return MicroBatches(args, kwargs, batch, count, self.undivided)


def disable_caches(model: nn.Module) -> None:
    """Turn off the caches of keys and values of a transformers model, which would be spread over the stages."""
    # An encoder and a decoder have copies of the configuration.
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    if caching:
        logger.info(
            "use_cache is set to False: a cache of keys and values would be spread over the stages"
        )
    for config in caching:
        config.use_cache = False


def structure_key(value: object) -> Hashable:
    """Equal for inputs of equal structure, shapes and dtypes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(structure_key(entry) for entry in value)
    if isinstance(value, Mapping):
        return tuple((name, structure_key(entry)) for name, entry in value.items())
    if isinstance(value, (type(None), bool, int, str)):
        return value
    return type(value).__qualname__


# -- outputs


def join(
    outputs: Sequence[object],
    sizes: Sequence[int],
    dimensions: Sequence[int | None],
    device: torch.device,
) -> tuple[object, list[torch.Tensor | None]]:
    """A block's outputs for all micro-batches as one output for the batch.

    `dimensions` has that of the batch for each tensor; None where no dimension has the size of a micro-batch.

    A tensor without a batch dimension must be the same in all micro-batches. Any other one has no values in the
    result, so that its use is an error.

    Returns:
        The output, with specs of its tensors that have a batch dimension, and these tensors, which are detached; None
        for the others.
    """
    joined: list[object] = []
    batched: list[torch.Tensor | None] = []
    for dimension, *column in zip(dimensions, *map(trees.leaves, outputs), strict=True):
        first = column[0]
        if dimension is not None:
            tensor = torch.cat([part.detach() for part in column], dimension)
            batched.append(tensor.requires_grad_(first.requires_grad))
            joined.append(TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
            continue
        batched.append(None)
        if not first.requires_grad and all(torch.equal(first, other) for other in column[1:]):
            joined.append(first)
            continue
        origin = (
            f"a tensor of shape {tuple(first.shape)} that a block returned for a micro-batch of {sizes[0]} samples: "
            "what the blocks pass to the end of the model must have a dimension of samples"
        )
        joined.append(RemoteTensor.of(first.shape, first.dtype, device, origin))
    return trees.replace_leaves(outputs[0], joined), batched


def batch_dimensions(
    tensors: Sequence[torch.Tensor], size: int, others: Sequence[torch.Tensor], other_size: int
) -> list[int | None]:
    """The dimension of the batch in each of a block's output tensors, by those for another number of samples.

    With the same number of samples it is the first one, where that has their number.
    """
    dimensions: list[int | None] = []
    for tensor, other in zip(tensors, others, strict=True):
        sizes = list(zip(tensor.shape, other.shape, strict=False))
        candidates = [number for number, pair in enumerate(sizes) if pair == (size, other_size)]
        if size == other_size:
            candidates = [number for number in candidates if number == 0]
        dimensions.append(candidates[0] if candidates else None)
    return dimensions


def resize(described: T, size: int, batch_size: int) -> T:
    """What was described for a micro-batch of `size` samples, as for `batch_size` samples."""

    def change(spec: TensorSpec) -> TensorSpec:
        if spec.shape and spec.shape[0] == size:
            return replace(spec, shape=(batch_size, *spec.shape[1:]))
        return spec

    resized: T = trees.map_leaves(change, described, is_spec)
    return resized


def loss_of(output: object) -> torch.Tensor | None:
    """The loss in a model's output: `output.loss`, else the first floating point scalar; None without one."""
    if isinstance(output, Mapping):
        named = output.get("loss")
    else:
        named = getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    return next(
        (
            tensor
            for tensor in trees.leaves(output)
            if tensor.dim() == 0 and tensor.is_floating_point()
        ),
        None,
    )
