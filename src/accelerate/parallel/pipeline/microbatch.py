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
        quotient, remainder = divmod(batch_size, count)
        self.sizes: list[int] = [quotient + (number < remainder) for number in range(count)]
        self.offsets: list[int] = [sum(self.sizes[:number]) for number in range(count)]

    def digest(self) -> str:
        """Differs between different inputs."""
        # In the widest dtype, in which large integers are not rounded.
        tensors = trees.leaves((self.args, self.kwargs))
        return str([tensor.cpu().to(torch.complex128).sum().item() for tensor in tensors])

    def microbatch(self, number: int) -> tuple[Args, Kwargs]:
        """Arguments and keyword arguments of one micro-batch; tensors are views."""
        return self.part(self.offsets[number], self.sizes[number])

    def part(self, start: int, size: int) -> tuple[Args, Kwargs]:
        """Arguments and keyword arguments of `size` samples; tensors are views."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.shape[0] == self.batch_size:
                return tensor.narrow(0, start, size)
            return tensor

        args: Args = trees.map_leaves(cut, tuple(self.args))
        kwargs: Kwargs = trees.map_leaves(cut, dict(self.kwargs))
        kwargs.update((name, self.kwargs[name]) for name in self.undivided & kwargs.keys())
        return args, kwargs


class BatchSplitter:
    """Splits the inputs of a model's forward into `num_microbatches`. `undivided` names inputs that stay complete."""

    def __init__(
        self, forward: Callable[..., object], undivided: Sequence[str], num_microbatches: int
    ) -> None:
        self.undivided: set[str] = set(undivided)
        self.num_microbatches = num_microbatches
        self.positions: list[str] = [
            name
            for name, parameter in inspect.signature(forward).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]

    def split(self, args: Args, kwargs: Kwargs, first: bool) -> MicroBatches:
        """Split the inputs of a call.

        Raises:
            PrepareError: for inputs that cannot be split; with `first`, also for a batch of too few samples.
        """
        if self.undivided:
            # An input that stays complete has to be known by its name.
            kwargs = {**dict(zip(self.positions, args, strict=False)), **kwargs}
            args = args[len(self.positions) :]
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
        divided = [value for name, value in kwargs.items() if name not in self.undivided]
        tensors = list(trees.leaves([*args, *divided]))
        if any(tensor.requires_grad for tensor in tensors):
            raise PrepareError(
                "an input of the pipelined model requires grad, but a pipeline does not return "
                "input gradients"
            )
        batch = next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), None)
        if batch is None:
            raise PrepareError(
                "the pipelined model was called without a tensor of samples: there is nothing to split"
            )
        if first and batch < self.num_microbatches:
            raise PrepareError(
                f"a batch of {batch} samples cannot be divided into "
                f"num_microbatches={self.num_microbatches}: lower it, or use larger batches on "
                "each process"
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
        return TensorSpec.of(value)
    inner = trees.children(value)
    if inner is not None:
        return tuple((name, structure_key(entry)) for name, entry in inner.items())
    if isinstance(value, (type(None), bool, int, str)):
        return value
    return type(value).__qualname__


# -- outputs


def join(
    outputs: Sequence[object],
    sizes: Sequence[int],
    dimensions: Sequence[int | None],
    device: torch.device,
) -> tuple[object, list[torch.Tensor], list[list[torch.Tensor]]]:
    """A block's outputs for all micro-batches as one output for the batch.

    `dimensions` has that of the batch for each tensor; None where no dimension has the size of a micro-batch.

    A tensor without a batch dimension must be the same in all micro-batches. Any other one has no values in the
    result, so that its use is an error.

    Returns:
        The output, with specs of its tensors that have a batch dimension; these tensors; and, by micro-batch, the
        leaves that they are joined from, which get gradients.
    """
    joined: list[object] = []
    tensors: list[torch.Tensor] = []
    leaves: list[list[torch.Tensor]] = []
    for output in outputs:
        parts = trees.leaves(output)
        leaves.append([part.detach().requires_grad_(part.requires_grad) for part in parts])
    for dimension, *column in zip(dimensions, *leaves, strict=True):
        first = column[0]
        if dimension is not None:
            tensor = torch.cat(column, dimension)
            tensors.append(tensor)
            joined.append(TensorSpec.of(tensor))
        elif not first.requires_grad and all(torch.equal(first, other) for other in column[1:]):
            joined.append(first)
        else:
            origin = (
                f"a block returned a tensor of shape {tuple(first.shape)} for a micro-batch of "
                f"{sizes[0]} samples: tensors that blocks pass to the end of the model must have "
                "a sample dimension"
            )
            joined.append(RemoteTensor.of(first.shape, first.dtype, device, origin))
    return trees.replace_leaves(outputs[0], joined), tensors, leaves


def batch_dimensions(
    tensors: Sequence[torch.Tensor], size: int, others: Sequence[torch.Tensor], other_size: int
) -> list[int | None]:
    """The dimension of the batch in each of a block's output tensors, by those for another number of samples.

    With the same number of samples it is the first one, where that has their number.
    """
    dimensions: list[int | None] = []
    for tensor, other in zip(tensors, others, strict=True):
        dimension = None
        for number, pair in enumerate(zip(tensor.shape, other.shape, strict=False)):
            tells = size != other_size or number == 0
            if dimension is None and tells and pair == (size, other_size):
                dimension = number
        dimensions.append(dimension)
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
    for tensor in trees.leaves(output):
        if tensor.dim() == 0 and tensor.is_floating_point():
            scalar: torch.Tensor = tensor
            return scalar
    return None
