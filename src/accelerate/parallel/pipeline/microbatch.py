# SPDX-License-Identifier: Apache-2.0
"""One call of a pipelined model: its micro-batches, what passes between stages, and the merged output."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core import trees
from ...core.errors import PrepareError
from .p2p import TensorSpec, describe, fill, is_spec, specs_in

logger: logging.Logger = logging.getLogger(__name__)

# Options of transformers models that request the outputs of all blocks.
COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")
# Relative differences that micro-batches may cause by computing in another order.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Args = tuple[object, ...]
Kwargs = dict[str, object]


class MicroBatches:
    """The inputs of one call of a model, and how they are split: micro-batch i has `sizes[i]` samples.

    `undivided` names keyword arguments that each micro-batch gets unchanged; `names` are those of the positional ones.
    """

    def __init__(
        self, args: Args, kwargs: Kwargs, batch_size: int, count: int, undivided: set[str], names: Sequence[str] = ()
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.batch_size = batch_size
        self.undivided = undivided
        self.names: Sequence[str] = names[: len(args)]
        quotient, rest = divmod(batch_size, count)
        self.sizes: list[int] = [quotient + (number < rest) for number in range(count)]
        self.offsets: list[int] = [sum(self.sizes[:number]) for number in range(count)]

    def digest(self) -> str:
        """Differs between different inputs."""
        return str([_sum(tensor) for tensor in trees.leaves((self.args, self.kwargs))])

    def microbatch(self, number: int) -> tuple[Args, Kwargs]:
        """Arguments and keyword arguments of one micro-batch; tensors are views."""
        start, size = self.offsets[number], self.sizes[number]

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(0, start, size) if tensor.dim() and tensor.shape[0] == self.batch_size else tensor

        args = tuple(trees.map_leaves(cut, value) for value in self.args)
        kwargs = {
            name: value if name in self.undivided else trees.map_leaves(cut, value)
            for name, value in self.kwargs.items()
        }
        return args, kwargs


def _sum(tensor: torch.Tensor) -> int | float:
    """The sum of a tensor; of integers exactly, since float32 does not distinguish them beyond 2**24."""
    if not tensor.is_floating_point():
        return complex(tensor.sum()).real if tensor.is_complex() else int(tensor.sum(dtype=torch.int64))
    return float(tensor.sum(dtype=torch.float32 if tensor.device.type == "mps" else torch.float64))


class BatchSplitter:
    """Splits the inputs of a model's forward into `num_microbatches`. `undivided` names inputs that stay complete."""

    def __init__(
        self, forward: Callable[..., object], undivided: Sequence[str], num_microbatches: int, labels: bool = False
    ) -> None:
        self.undivided: set[str] = set(undivided)
        self.num_microbatches = num_microbatches
        parameters = inspect.signature(forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positions: list[str] = [parameter.name for parameter in parameters if parameter.kind in positional]
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        known = {parameter.name for parameter in parameters}
        if labels and "labels" in known:
            raise PrepareError("loss_fn is given, and the model's forward takes labels itself: give one of the two")
        if not takes_any and (unknown := self.undivided - known):
            raise PrepareError(
                f"whole_inputs names {', '.join(sorted(unknown))}, which the model's forward does not take"
            )

    def split(self, args: Args, kwargs: Kwargs, first: bool) -> MicroBatches:
        """Split the inputs of a call.

        Raises:
            PrepareError: for inputs that cannot be split; with `first`, also for a batch of too few samples.
        """
        # An input that stays complete has to be known by its name.
        while self.undivided and args and any(name in self.undivided for name in self.positions[: len(args)]):
            kwargs = {self.positions[len(args) - 1]: args[-1], **kwargs}
            args = args[:-1]
        if requested := [name for name in COLLECTING if kwargs.get(name) is True]:
            raise PrepareError(
                f"the pipelined model was called with {requested[0]}=True: outputs of the blocks of other stages are "
                "not collected"
            )
        tensors = [
            leaf
            for value in (*args, *(value for name, value in kwargs.items() if name not in self.undivided))
            for leaf in trees.leaves(value)
        ]
        if any(tensor.requires_grad for tensor in tensors):
            raise PrepareError("an input of the pipelined model requires grad: a pipeline returns no input gradients")
        batch = next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), None)
        if batch is None:
            raise PrepareError("the pipelined model was called without a tensor of samples: there is nothing to split")
        if first and batch < self.num_microbatches:
            raise PrepareError(
                f"a batch of {batch} samples cannot be divided into num_microbatches={self.num_microbatches}: lower "
                "it, or give each process larger batches"
            )
        count = min(self.num_microbatches, max(batch, 1))
        return MicroBatches(args, kwargs, batch, count, self.undivided, self.positions)


def restrict_outputs(model: nn.Module) -> None:
    """Turn off the caches of a transformers model.

    Raises:
        PrepareError: where its configuration requests outputs of all blocks.
    """
    config = getattr(model, "config", None)
    for flag in COLLECTING:
        if getattr(config, flag, False):
            raise PrepareError(
                f"the model's config has {flag}=True: outputs of the blocks of other stages are not collected"
            )
    # An encoder and a decoder have copies of the configuration.
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    if caching:
        logger.info("use_cache is set to False: a cache of keys and values would be spread over the stages")
    for config in caching:
        config.use_cache = False


def structure_key(value: object, shapes: bool = True) -> Hashable:
    """Equal for inputs of equal structure, shapes (without `shapes`: numbers of dimensions) and dtypes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) if shapes else value.dim(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(structure_key(entry, shapes) for entry in value)
    if isinstance(value, Mapping):
        return tuple((name, structure_key(entry, shapes)) for name, entry in value.items())
    if isinstance(value, (type(None), bool, int, str)):
        return value
    return type(value).__qualname__


# -- outputs


def is_batched(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether the first dimension of each tensor is that of its micro-batch."""
    return all(tensor.dim() and tensor.shape[0] == size for tensor, size in zip(tensors, sizes, strict=True))


def join(
    outputs: Sequence[object], sizes: Sequence[int]
) -> tuple[Boundary, list[torch.Tensor], list[bool], list[bool]]:
    """A block's outputs for all micro-batches as one output for the batch.

    Returns:
        The described output; its tensors, detached; whether each has a batch dimension (others are those of the first
        micro-batch); whether each has none, and other shapes in other micro-batches.
    """
    columns = list(zip(*(list(trees.leaves(output)) for output in outputs), strict=True))
    batched = [is_batched(column, sizes) for column in columns]
    unequal = [
        not is_one and len({tensor.shape for tensor in column}) > 1
        for column, is_one in zip(columns, batched, strict=True)
    ]
    for column, differs in zip(columns, unequal, strict=True):
        if differs and not column[0].is_floating_point():
            # Whether the tail uses it cannot be seen by NaN instead of it.
            raise not_batched(column[0], sizes)
    tensors = [
        torch.cat([tensor.detach() for tensor in column]) if is_one else column[0].detach()
        for column, is_one in zip(columns, batched, strict=True)
    ]
    specs = [
        TensorSpec(tuple(tensor.shape), tensor.dtype, column[0].requires_grad)
        for tensor, column in zip(tensors, columns, strict=True)
    ]
    described = trees.replace_leaves(describe(outputs[0], "the output of a block"), specs, is_spec)
    return Boundary(described, {}), tensors, batched, unequal


def not_batched(tensor: torch.Tensor, sizes: Sequence[int]) -> PrepareError:
    """Return the error for a block whose output does not have the batch as its first dimension."""
    return PrepareError(
        f"a block returned a tensor of shape {tuple(tensor.shape)} for a micro-batch of {sizes[0]} samples: what the "
        "blocks pass to the end of the model must have the batch as its first dimension"
    )


def merge(outputs: Sequence[object], sizes: Sequence[int]) -> Any | None:
    """Outputs of micro-batches as one output of the batch, detached; None where a tensor is not batched."""
    columns = list(zip(*(list(trees.leaves(output)) for output in outputs), strict=True))
    if not all(is_batched(column, sizes) for column in columns):
        return None
    described = describe(outputs[0], "the model's output")
    return fill(described, [torch.cat([tensor.detach() for tensor in column]) for column in columns])


def outputs_match(one: object, other: object) -> bool:
    """Whether two outputs agree in structure, and in values up to rounding."""
    mine, theirs = list(trees.leaves(one)), list(trees.leaves(other))
    if [(t.shape, t.dtype) for t in mine] != [(t.shape, t.dtype) for t in theirs]:
        return False
    return all(_is_close(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=True))


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(one.dtype)
    if tolerance is None:
        return torch.equal(one, other)
    scale = float(other.abs().nan_to_num(0.0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale)


def resize(unit_outputs: Mapping[int, list[object]], size: int, batch_size: int) -> dict[int, list[object]]:
    """The described outputs of units for a micro-batch of `size` samples, as for `batch_size` samples."""
    return {unit: [resized(call, size, batch_size) for call in calls] for unit, calls in unit_outputs.items()}


def resized(description: object, size: int, batch_size: int) -> object:
    """Described data for `batch_size` samples, from those for `size` samples."""

    def change(spec: TensorSpec) -> TensorSpec:
        if spec.shape and spec.shape[0] == size:
            return replace(spec, shape=(batch_size, *spec.shape[1:]))
        return spec

    return trees.map_leaves(change, description, is_spec)


def loss_of(output: object) -> torch.Tensor | None:
    """The loss in a model's output: `output.loss`, else the first floating point scalar; None without one."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    return next((tensor for tensor in trees.leaves(output) if tensor.dim() == 0 and tensor.is_floating_point()), None)


def holds_nan(output: object) -> bool:
    """Whether a tensor of `output` contains NaN."""
    return any(bool(torch.isnan(tensor).any()) for tensor in trees.leaves(output) if tensor.dtype.is_floating_point)


# Of tensors; None for one that gets none.
OutputGradients = Sequence[torch.Tensor | None]


class Stage(nn.Module):
    """The units of one stage as one module, which FSDP2 can shard."""

    def __init__(self, number: int, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.number = number
        self.units: nn.ModuleList = nn.ModuleList(units)

    def forward(self, *received: torch.Tensor, job: Callable[[int, Sequence[torch.Tensor]], object]) -> object:
        """Call `job` with the number of this stage and the received tensors."""
        return job(self.number, received)


@dataclass
class Boundary:
    """What passes from one stage to the next.

    Fields:
        output: the described output. unit_outputs: those of all units before, by unit, call by call.
        digest: of the inputs, so that the next stage can compare its own.
    """

    output: object
    unit_outputs: dict[int, list[object]]
    digest: str = ""

    def __post_init__(self) -> None:
        self.specs: list[TensorSpec] = specs_in(self.output)


class BatchKey(NamedTuple):
    """Equal for batches that are computed in the same way: the structure of the inputs, and the modes."""

    structure: Hashable
    training: bool
    grad: bool


@dataclass(frozen=True)
class StageFailure:
    """The error of a stage, sent to the others."""

    stage: int
    text: str


@dataclass
class BatchShapes:
    """What the first batch of its shapes has shown.

    Fields:
        stage_inputs, stage_outputs: boundaries by (stage, samples of a micro-batch).
        tail: (samples, described outputs of all units before the tail) of a micro-batch.
        output: the described output of the model. loss_index: which of its tensors is the loss.
        loss_rules: names of the rules by which losses of micro-batches make that of the batch (`losses`).
    """

    stage_inputs: dict[tuple[int, int], Boundary] = field(default_factory=dict)
    stage_outputs: dict[tuple[int, int], Boundary] = field(default_factory=dict)
    tail: tuple[int, dict[int, list[object]]] | None = None
    output: object = None
    loss_rules: list[str] | None = None
    loss_index: int | None = None


@dataclass
class SavedGraph:
    """The autograd graph of one micro-batch in one stage: its inputs and outputs."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class Batch:
    """One call of the model.

    Fields:
        key: equal for batches of equal shapes. is_new: the first of its shapes, whose boundaries are sent along.
        splits_tail: whether the tail runs on each micro-batch; None where that is not known yet.
        graphs: by stage, one for each micro-batch.
        local, local_gradients: what stages of one rank pass to each other, by (receiving stage, micro-batch).
        last_outputs: of the last stage, one for each micro-batch. tail: its graph over the complete batch;
            batched: which of the tail's inputs have a batch dimension.
        failure, error: of a stage that failed, and the exception where it was this one.
        loss_weights: of the micro-batches, where a schedule runs the batch.
        loss_rules, tail_matches: what the last stage learned from a new batch, sent with the output.
    """

    inputs: MicroBatches
    shapes: BatchShapes
    key: BatchKey
    grad: bool
    is_new: bool
    splits_tail: bool | None
    graphs: dict[int, list[SavedGraph]] = field(default_factory=dict)
    local: dict[tuple[int, int], tuple[Boundary | StageFailure | None, list[torch.Tensor]]] = field(
        default_factory=dict
    )
    local_gradients: dict[tuple[int, int], OutputGradients] = field(default_factory=dict)
    last_outputs: list[object] = field(default_factory=list)
    tail: SavedGraph | None = None
    batched: list[bool] = field(default_factory=list)
    output: object = None
    failure: StageFailure | None = None
    error: Exception | None = None
    loss_weights: list[float] = field(default_factory=list)
    loss_rules: list[str] | None = None
    tail_matches: bool = False
    backward: Callable[[Batch, OutputGradients], None] | None = None
