# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward through the stages of a pipeline, behind a call of the model and a backward of its loss.

The order is GPipe's: all micro-batches forward, then all backward. The forward runs this rank's stages. The last
stage's output is broadcast to every rank, where the training loop computes its loss. One autograd function stands for
the output; its backward sends each micro-batch's gradient from the last stage to the first.

The tail is what follows the last block (final norm, head, the model's own loss). It runs once on the complete batch:
the output is the plain model's, whatever mean its loss takes.

torch's schedules compute forward and backward in one call and a loss for each micro-batch. A loop that computes its
loss itself, between the two, needs this order of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from ...gradient_state import GradientState
from ..accumulated import Gradients
from .buffers import Buffers
from .microbatch import (
    Args,
    BatchSplitter,
    Kwargs,
    MicroBatches,
    batch_dimensions,
    join,
    loss_of,
    resize,
    structure_key,
)
from .p2p import P2PChannel, PendingReceive, TensorSpec, describe, fill, is_foreign, specs_in
from .split import StageSplit
from .stage import Segment, Stage, StagedModel

# Of tensors; None for one that gets none.
OutputGradients = Sequence[torch.Tensor | None]


class BatchKey(NamedTuple):
    """Equal for batches that are computed in the same way: the structure of the inputs, and the modes.

    `scheduled`: the last stage computes the model's output for each micro-batch, not for the complete batch.
    """

    structure: Hashable
    training: bool
    grad: bool
    scheduled: bool = False


@dataclass
class BatchShapes:
    """Shapes of a kind of batches.

    Fields:
        boundaries: (stage, samples of a micro-batch) -> the described output that it sends to the next stage.
        specs: of the tensors in it.
        unit_outputs: samples -> the described outputs of all units before the tail, by unit, call by call.
        dimensions: that of the batch in each tensor that the last block returns.
        buffers: those outside of units that the tail writes.
        output: the described output of the model. loss_index: which of its tensors is the loss.
        is_complete: whether all ranks know the output.
    """

    boundaries: dict[tuple[int, int], object] = field(default_factory=dict)
    specs: dict[tuple[int, int], list[TensorSpec]] = field(default_factory=dict)
    unit_outputs: dict[int, dict[int, list[object]]] = field(default_factory=dict)
    dimensions: list[int | None] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    output: object = None
    loss_index: int | None = None
    is_complete: bool = False


@dataclass
class ShapeMessage:
    """What a stage sends to the next for a new kind of batch: shapes, a digest of the inputs, why a stage failed."""

    shapes: BatchShapes
    digest: str
    failure: str = ""


@dataclass
class SavedGraph:
    """The autograd graph of one micro-batch in one stage: its inputs and outputs."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class Batch:
    """One call of the model.

    Fields:
        key: equal for batches of equal shapes.
        graphs: by stage, one for each micro-batch.
        outputs: of the last block, one for each micro-batch; in a schedule, the tensors that the call returns of each.
        tail_inputs: by micro-batch, the inputs of the tail's graph. returned: the tensors that the call returns of the
            model's output, on the last stage.
        backward: what the loop's backward runs.
        weights: of the losses of micro-batches in a schedule. seed: what these are multiplied by, the loss scale.
        gradients: what a schedule has computed, until the loop's backward.
    """

    inputs: MicroBatches
    shapes: BatchShapes
    key: BatchKey
    graphs: dict[int, list[SavedGraph]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    tail_inputs: list[list[torch.Tensor]] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    backward: Callable[[Batch, OutputGradients], None] | None = None
    weights: list[float] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)
    seed: torch.Tensor | None = None


@dataclass(eq=False)
class Runner:
    """Runs a staged model.

    Args:
        staged: the model.
        ranks: by stage, the rank of the group that has it.
        channel: the messages between stages. splitter: makes micro-batches.
        gather: whether the complete output is returned on all ranks, or its loss alone.
    """

    staged: StagedModel
    ranks: Sequence[int]
    channel: P2PChannel
    splitter: BatchSplitter
    gather: bool

    def __post_init__(self) -> None:
        self.cut: StageSplit = self.staged.cut
        self.stages: Mapping[int, Stage] = self.staged.stages
        self.last: int = self.cut.stages - 1
        self.source: int = self.ranks[self.last]
        self.shapes: dict[BatchKey, BatchShapes] = {}
        # In training and in evaluation: the dimensions of the batch in what the last block returns.
        self.dimensions: dict[bool, list[int | None]] = {}
        # The modes of which a batch was seen.
        self.modes: set[bool] = set()
        self.anchor: torch.Tensor = torch.zeros((), device=self.channel.device, requires_grad=True)
        self.before_backward: Callable[[], None] = lambda: None

    # -- a batch

    def new_batch(self, args: Args, kwargs: Kwargs) -> Batch:
        """The batch of a call.

        Raises:
            PrepareError: the call is one of torch.func, or its inputs cannot be split.
        """
        parameters: list[torch.Tensor] = []
        for stage in self.stages.values():
            parameters += stage.parameters()
        are_leaves = all(parameter.is_leaf for parameter in parameters)
        if not are_leaves or any(map(_is_wrapped, trees.leaves((args, kwargs)))):
            raise PrepareError(
                "the pipelined model was called inside torch.func (functional_call, vmap, ...), "
                "whose tensors and parameters do not reach the stages of other ranks. Use DDP "
                "for this model"
            )
        training = self.staged.model.training
        # The last batch of an epoch may have few samples, also where a resumed run begins with it.
        first = training and training not in self.modes and not GradientState().end_of_dataloader
        inputs = self.splitter.split(args, kwargs, first)
        structure = structure_key((inputs.args, inputs.kwargs))
        key = BatchKey(structure, training, torch.is_grad_enabled())
        return Batch(inputs, BatchShapes(), key)

    def find_shapes(self, batch: Batch) -> None:
        """Give a batch its shapes. For the first one of its kind, a micro-batch of each size passes all stages.

        All ranks of the pipeline have the same inputs, so they agree on what is known.

        Raises:
            PrepareError: a stage could not compute, or has other inputs than the stage before it.
        """
        if batch.key not in self.shapes:
            try:
                self.shapes[batch.key] = self._pass_shapes(batch)
            finally:
                self.staged.show(None)
        batch.shapes = self.shapes[batch.key]

    def _pass_shapes(self, batch: Batch) -> BatchShapes:
        """Send the shapes from stage to stage, each of which adds its own."""
        digest = ""
        if self.channel.has_values:
            digest = batch.inputs.digest()
        message, error = ShapeMessage(batch.shapes, digest), None
        parts = self._examples(batch)
        sizes = [size for _, size in parts]
        for number in sorted(self.stages):
            received: list[list[torch.Tensor]] = [[] for _ in parts]
            if number:
                message = self.channel.receive_object(self.ranks[number - 1])
                batch.shapes = message.shapes
                if not message.failure:
                    pending = self._post_receives(number, batch, sizes)
                    received = [tensors.wait(batch.key.grad) for tensors in pending]
            outputs: list[list[torch.Tensor]] = []
            if not message.failure:
                try:
                    if message.digest != digest:
                        raise PrepareError(
                            "this rank got different inputs than the previous stage: all ranks "
                            "of a pipeline must read the same samples, as the loader that "
                            "prepare returns does"
                        )
                    outputs = self._add_shapes(number, batch, parts, received)
                except Exception as raised:
                    error, message.failure = raised, _failure(number, raised)
            if number != self.last:
                receiver = self.ranks[number + 1]
                self.channel.send_object(message, receiver)
                for tensors in outputs:
                    self.channel.send(tensors, receiver)
        shapes: BatchShapes = self._from_source(message.shapes, message.failure, error)
        return shapes

    def _examples(self, batch: Batch) -> list[tuple[int, int]]:
        """(start, size) of micro-batches that show the shapes: one of each size.

        In each mode, the first batch shows with others what depends on the samples and on their number.
        """
        inputs = batch.inputs
        # The larger micro-batches come first.
        parts = [(inputs.offsets[0], inputs.sizes[0])]
        if inputs.sizes[-1] != inputs.sizes[0]:
            parts.append((inputs.offsets[-1], inputs.sizes[-1]))
        is_first = batch.key.training not in self.modes
        self.modes.add(batch.key.training)
        if is_first and len(inputs.sizes) > 1:
            start, size = inputs.offsets[1], inputs.sizes[1]
            parts.append((start, max(size - 1, 1)))
        return parts

    def _add_shapes(
        self,
        number: int,
        batch: Batch,
        parts: Sequence[tuple[int, int]],
        received: list[list[torch.Tensor]],
    ) -> list[list[torch.Tensor]]:
        """Add the shapes of a stage. Returns its output tensors for each of these parts of a batch."""
        shapes, buffers = batch.shapes, self.staged.buffers
        observed: Iterable[str] = buffers.places if self.channel.has_values else ()
        outputs: list[object] = []
        written: list[Buffers] = []
        for (start, size), tensors in zip(parts, received, strict=True):
            segment = self.segment(number, size, batch)
            segment.recorded = {}
            args, kwargs = batch.inputs.part(start, size)
            with buffers.copied(observed) as results:
                output = self._run(number, segment, args, kwargs, tensors)
            written.append(results)
            outputs.append(output)
            shapes.unit_outputs.setdefault(size, {}).update(segment.recorded)
            if number != self.last:
                described = describe(output, f"the output of {self.cut.units[segment.stop - 1]}")
                shapes.boundaries[number, size] = described
                shapes.specs[number, size] = specs_in(described)
        if observed:
            buffers.add_written(number, written)
        tensors_of_parts = [list(trees.leaves(output)) for output in outputs]
        if number == self.last and batch.key.scheduled:
            returned = self.returned(outputs[0])
            loss = loss_of(returned)
            shapes.output = describe(returned, "the model's output")
            for index, tensor in enumerate(trees.leaves(returned)):
                if tensor is loss:
                    shapes.loss_index = index
        elif number == self.last:
            shapes.dimensions = self._dimensions(batch, parts, tensors_of_parts)
            size, batch_size = parts[0][1], batch.inputs.batch_size
            shapes.unit_outputs[batch_size] = resize(shapes.unit_outputs[size], size, batch_size)
        return tensors_of_parts

    def _dimensions(
        self,
        batch: Batch,
        parts: Sequence[tuple[int, int]],
        outputs: Sequence[list[torch.Tensor]],
    ) -> list[int | None]:
        """The dimension of the batch in each tensor that the last block returns, as a pair of parts shows it."""
        training, first = batch.key.training, outputs[0]
        if len(parts) > 1 or len(self.dimensions.get(training, [])) != len(first):
            _, size = parts[0]
            _, other_size = parts[-1]
            self.dimensions[training] = batch_dimensions(first, size, outputs[-1], other_size)
        return self.dimensions[training]

    def _from_source(self, value: object, failure: str, error: Exception | None) -> Any:
        """The value of the last stage, on all ranks. Where a stage failed, every rank raises."""
        value, failure = self.channel.broadcast_object((value, failure), self.source)
        self.channel.wait_for_sends()
        if error is not None:
            raise error
        if failure:
            raise PrepareError(failure)
        return value

    # -- forward

    def forward(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """All micro-batches through all stages; the model's output, on every rank or on the last stage's only."""
        try:
            for number in sorted(self.stages):
                self._stage_forward(number, batch)
            if not batch.shapes.is_complete:
                self._find_output(batch)
            elif self.last in self.stages:
                self._finish_output(batch)
        finally:
            self.staged.show(None)
        self.staged.buffers.commit()
        batch.backward = self._backward
        return self.distribute_output(batch, on_all_ranks)

    def _find_output(self, batch: Batch) -> None:
        """Compute the output of the first batch of its kind, and tell all ranks its shapes."""
        described, failure, error = None, "", None
        names: list[str] = []
        if self.last in self.stages:
            buffers = self.staged.buffers
            of_units = tuple(f"{unit}." for unit in self.cut.units)
            outside = [name for name in buffers.places if not name.startswith(of_units)]
            before = {name: buffer.clone() for name, buffer in buffers.present(outside).items()}
            try:
                described = describe(self._finish_output(batch), "the model's output")
                if self.channel.has_values:
                    names = list(buffers.changed(before, buffers.present(outside)))
            except Exception as raised:
                error, failure = raised, _failure(self.last, raised)
        batch.shapes.output, batch.shapes.buffers = self._from_source(
            (described, names), failure, error
        )
        batch.shapes.is_complete = True

    def _stage_forward(self, number: int, batch: Batch) -> None:
        """All micro-batches through one stage."""
        sizes = batch.inputs.sizes
        pending: list[PendingReceive] = []
        if number:
            pending = self._post_receives(number, batch, sizes)
        graphs = batch.graphs[number] = []
        for micro, size in enumerate(sizes):
            received: list[torch.Tensor] = []
            if number:
                received = pending[micro].wait(batch.key.grad)
            segment = self.segment(number, size, batch)
            args, kwargs = batch.inputs.microbatch(micro)
            with self.staged.buffers.micro_batch(number):
                output = self._run(number, segment, args, kwargs, received)
            tensors = list(trees.leaves(output))
            graphs.append(SavedGraph(received, tensors))
            if number == self.last:
                batch.outputs.append(output)
            else:
                expected = batch.shapes.specs[number, size]
                specs = [TensorSpec.of(tensor) for tensor in tensors]
                if specs != expected:
                    raise PrepareError(
                        f"the output of {self.cut.units[segment.stop - 1]} was {expected} for an "
                        f"earlier batch of the same inputs and is {specs} now: shapes must follow "
                        "from those of the inputs, and after freezing or unfreezing parameters "
                        "during training, call prepare again"
                    )
                self.channel.send(tensors, self.ranks[number + 1])

    def _post_receives(
        self, number: int, batch: Batch, sizes: Sequence[int]
    ) -> list[PendingReceive]:
        """Start to receive micro-batches of a stage."""
        sender, specs = self.ranks[number - 1], batch.shapes.specs
        return [self.channel.post_receive(specs[number - 1, size], sender) for size in sizes]

    def _run(
        self,
        number: int,
        segment: Segment,
        args: Args,
        kwargs: Kwargs,
        received: Sequence[torch.Tensor],
    ) -> object:
        """The output of a segment, inside of its stage's module, which FSDP2 may shard."""
        if segment.leave and segment.start == segment.stop:
            # All units of the last stage belong to the tail.
            return fill(segment.received, received)

        stage = self.stages[number]
        stage.compute = functools.partial(self.staged.run, segment, args, kwargs)
        return stage(*received)

    def segment(self, number: int, size: int, batch: Batch) -> Segment:
        """The segment of a stage for `size` samples: up to the next stage, up to the tail, or to the forward's end."""
        stop = self.cut.bounds[number + 1]
        runs_tail = number == self.last and batch.key.scheduled
        if number == self.last and not runs_tail:
            stop = self.cut.tail
        segment = Segment(
            self.cut.bounds[number],
            stop,
            unit_outputs=batch.shapes.unit_outputs.get(size, {}),
            leave=not runs_tail,
            grad=batch.key.grad,
        )
        if number:
            segment.received = batch.shapes.boundaries[number - 1, size]
        return segment

    # -- the output

    def _finish_output(self, batch: Batch) -> object:
        """What the call returns, on the last stage: the tail on what the last block returned for all micro-batches."""
        inputs, shapes = batch.inputs, batch.shapes
        received, tensors, batch.tail_inputs = join(
            batch.outputs, inputs.sizes, shapes.dimensions, self.channel.device
        )
        batch.outputs = []
        segment = Segment(
            self.cut.tail,
            len(self.cut.units),
            received,
            shapes.unit_outputs[inputs.batch_size],
            grad=batch.key.grad,
        )
        output = self.returned(self._run(self.last, segment, inputs.args, inputs.kwargs, tensors))
        batch.returned = list(trees.leaves(output))
        return output

    def distribute_output(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """The output of the last stage, with a graph behind it, on every rank; otherwise None on the others."""
        at_source = self.channel.rank == self.source
        specs = specs_in(batch.shapes.output)
        if at_source:
            tensors = [tensor.detach().contiguous() for tensor in batch.returned]
            if [tuple(tensor.shape) for tensor in tensors] != [spec.shape for spec in specs]:
                raise PrepareError(
                    "the model's output has different shapes than for an earlier batch of the "
                    "same inputs: a pipeline needs output shapes that follow from the input "
                    "shapes"
                )
        elif on_all_ranks:
            tensors = [spec.empty(self.channel.device) for spec in specs]
        if on_all_ranks:
            buffers = self.staged.buffers.present(batch.shapes.buffers)
            self.channel.broadcast([*tensors, *buffers.values()], self.source)
        self.channel.wait_for_sends()
        if not (on_all_ranks or at_source):
            return None
        if batch.key.grad and any(spec.requires_grad for spec in specs):
            tensors = list(_PipelineOutput.apply(self.anchor, self, batch, specs, tensors))
        return fill(batch.shapes.output, tensors)

    def returned(self, output: object) -> object:
        """What the call of the model returns of its output: all that can be sent, or the loss alone."""
        if self.gather:
            # None for a cache of keys and values, of which each stage has a part.
            return trees.map_leaves(lambda _: None, output, is_foreign)
        loss = loss_of(output)
        if loss is None:
            raise PrepareError(
                "gather_output=False returns only the loss, but the model does not return one: "
                "pass labels"
            )
        return trees.map_leaves(lambda tensor: tensor if tensor is loss else None, output)

    # -- backward

    def start_backward(self, batch: Batch, grads: OutputGradients) -> None:
        """The backward of a batch, called by autograd on every rank with the gradients of the output."""
        if batch.backward is None:
            raise AccelerateError(
                "backward was called a second time through the same output of a pipelined model: add the losses and "
                "call backward once, or call the model again"
            )
        self.before_backward()
        run, batch.backward = batch.backward, None
        run(batch, grads)

    def _backward(self, batch: Batch, grads: OutputGradients) -> None:
        for number in sorted(self.stages, reverse=True):
            pending: list[PendingReceive] = []
            if number == self.last:
                _backward_through(batch.returned, grads)
            else:
                pending = self._post_gradients(number, batch)
            for micro, graph in enumerate(batch.graphs[number]):
                outputs = graph.outputs
                gradients: OutputGradients
                if number == self.last:
                    gradients = [tensor.grad for tensor in batch.tail_inputs[micro]]
                else:
                    outputs = [tensor for tensor in outputs if tensor.requires_grad]
                    gradients = pending[micro].wait()
                # Units that are computed again write their buffers again.
                with self.staged.buffers.micro_batch(number):
                    _backward_through(outputs, gradients)
                if number:
                    self.channel.send(_input_gradients(graph), self.ranks[number - 1])
            batch.graphs[number] = []
        batch.tail_inputs, batch.returned = [], []
        self.staged.buffers.commit()
        self.channel.wait_for_sends()

    def _post_gradients(self, number: int, batch: Batch) -> list[PendingReceive]:
        """Start to receive the gradients of what a stage sent."""
        pending = []
        for size in batch.inputs.sizes:
            trained = [spec for spec in batch.shapes.specs[number, size] if spec.requires_grad]
            pending.append(self.channel.post_receive(trained, self.ranks[number + 1]))
        return pending


def _failure(number: int, error: Exception) -> str:
    return f"stage {number} of the pipeline could not compute: {type(error).__name__}: {error}"


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.func's transforms, which have no storage."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return tensor.layout is torch.strided
    return False


def _backward_through(outputs: Sequence[torch.Tensor], grads: OutputGradients) -> None:
    """Backward from those outputs that have a gradient."""
    tensors, gradients = [], []
    for tensor, gradient in zip(outputs, grads, strict=True):
        if gradient is not None and tensor.requires_grad:
            tensors.append(tensor)
            gradients.append(gradient)
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _input_gradients(graph: SavedGraph) -> list[torch.Tensor]:
    """The gradients that the stage before receives."""
    gradients = []
    for tensor in graph.inputs:
        if tensor.requires_grad and tensor.grad is None:
            gradients.append(torch.zeros_like(tensor))
        elif tensor.grad is not None:
            gradients.append(tensor.grad)
    return gradients


class _OfBatch(FunctionCtx):
    runner: Runner
    batch: Batch


class _PipelineOutput(torch.autograd.Function):
    """The output on every rank. It depends on a leaf that requires grad, so that its backward reaches every stage."""

    @staticmethod
    def forward(
        ctx: _OfBatch,
        anchor: torch.Tensor,
        runner: Runner,
        batch: Batch,
        specs: list[TensorSpec],
        tensors: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        ctx.runner, ctx.batch = runner, batch
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(tensor for tensor, spec in zip(tensors, specs, strict=True) if not spec.requires_grad)
        )
        return tuple(tensors)

    @staticmethod
    def backward(ctx: _OfBatch, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.runner.start_backward(ctx.batch, list(grads))
        return None, None, None, None, None
