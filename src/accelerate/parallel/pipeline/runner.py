# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward through the stages of a pipeline, behind a call of the model and a backward of its loss.

The order is GPipe's: all micro-batches forward, then all backward. The forward runs this rank's stages. The last
stage's output is broadcast to every rank, where the training loop computes its loss. One autograd function stands for
the output; its backward sends each micro-batch's gradient from the last stage to the first.

The tail is what follows the last block (final norm, head, the model's own loss). It runs once on the complete batch:
the output is the plain model's, whatever mean its loss takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from ...gradient_state import GradientState
from .microbatch import (
    Batch,
    BatchKey,
    BatchShapes,
    BatchSplitter,
    Boundary,
    OutputGradients,
    SavedGraph,
    Stage,
    StageFailure,
    StageMessage,
    join,
    loss_of,
    resize,
    structure_key,
)
from .p2p import P2PChannel, PendingReceive, TensorSpec, describe, fill, specs_in
from .split import StageSplit
from .stage import Args, Kwargs, Segment, StagedModel


@dataclass(eq=False)
class Runner:
    """Runs a staged model.

    Args:
        staged: the model. cut: its stages.
        stages: this rank's stages by number. ranks: by stage, the rank of the group that has it.
        channel: the messages between stages. splitter: makes micro-batches.
        gather: whether the complete output is returned on all ranks, or its loss alone.
    """

    staged: StagedModel
    cut: StageSplit
    stages: Mapping[int, Stage]
    ranks: Sequence[int]
    channel: P2PChannel
    splitter: BatchSplitter
    gather: bool = True

    def __post_init__(self) -> None:
        self.last: int = self.cut.stages - 1
        self.source: int = self.ranks[self.last]
        self.shapes: dict[BatchKey, BatchShapes] = {}
        self.trained: bool = False
        self.anchor: torch.Tensor = torch.zeros((), device=self.channel.device, requires_grad=True)
        self.before_backward: Callable[[], None] = lambda: None

    # -- forward

    def new_batch(self, args: Args, kwargs: Kwargs) -> Batch:
        """The batch of a call. All ranks of the pipeline have the same inputs, so they agree on what is known.

        Raises:
            PrepareError: the call is one of torch.func, or its inputs cannot be split.
        """
        parameters: list[torch.Tensor] = []
        for stage in self.stages.values():
            parameters += stage.parameters()
        are_leaves = all(parameter.is_leaf for parameter in parameters)
        if not are_leaves or any(map(_is_wrapped, trees.leaves((args, kwargs)))):
            raise PrepareError(
                "the pipelined model was called inside of torch.func (functional_call, vmap, ...), whose tensors and "
                "parameters do not reach the stages of other ranks. Use DDP for such a model"
            )
        training, grad = self.staged.model.training, torch.is_grad_enabled()
        # The last batch of an epoch may have few samples, also where a resumed run begins with it.
        first = training and not self.trained and not GradientState().end_of_dataloader
        inputs = self.splitter.split(args, kwargs, first)
        self.trained = self.trained or training
        key = BatchKey(structure_key((inputs.args, inputs.kwargs)), training, grad)
        shapes = self.shapes.get(key)
        return Batch(inputs, shapes or BatchShapes(), key, grad, is_new=shapes is None)

    def forward(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """All micro-batches through all stages; the model's output, on every rank or on the last stage's only."""
        try:
            for number in sorted(self.stages):
                self._stage_forward(number, batch)
            if self.last in self.stages and batch.failure is None:
                try:
                    self._finish_output(batch)
                except Exception as error:
                    self._keep_failure(self.last, batch, error)
        finally:
            self.staged.show(None)
        batch.backward = self._backward
        return self.distribute_output(batch, on_all_ranks)

    def _keep_failure(self, number: int, batch: Batch, error: Exception) -> None:
        """With a new batch, keep a stage's error: the others wait for a message, which then reports the error."""
        if not batch.is_new:
            raise error
        batch.failure, batch.error = StageFailure(number, f"{type(error).__name__}: {error}"), error

    def _stage_forward(self, number: int, batch: Batch) -> None:
        """All micro-batches through one stage; of a new batch the stage's message comes before the tensors."""
        self._receive_message(number, batch)
        if batch.failure is None:
            pending = self._post_receives(number, batch)
        else:
            pending = []
        message = StageMessage({}, self._digest(batch))
        # Two stages of a rank may send to one peer: then all is received before anything is sent.
        sends_at_once = not batch.is_new and len(self.stages) == 1 and number != self.last
        graphs = batch.graphs[number] = []
        for micro, size in enumerate(batch.inputs.sizes):
            if number and pending:
                received = self._received(number, micro, batch, pending)
            else:
                received = []
            if batch.failure is not None:
                continue
            try:
                outputs, boundary = self._compute(number, micro, batch, received)
            except Exception as error:
                self._keep_failure(number, batch, error)
                continue
            if boundary is not None:
                message.boundaries.setdefault(size, boundary)
            graphs.append(SavedGraph(received, outputs))
            if sends_at_once:
                self.channel.send(outputs, self.ranks[number + 1])
        if number == self.last:
            return
        peer = self.ranks[number + 1]
        if batch.is_new and batch.failure is None:
            batch.shapes.boundaries[number] = message.boundaries
        if peer == self.channel.rank:
            batch.local[number] = [graph.outputs for graph in graphs]
            return
        if batch.is_new:
            self.channel.send_object(batch.failure or message, peer)
        if not sends_at_once and batch.failure is None:
            for graph in graphs:
                self.channel.send(graph.outputs, peer)

    def _digest(self, batch: Batch) -> str:
        """What shows that stages were given other inputs, of a new batch that has values."""
        if batch.is_new and self.channel.has_values:
            return batch.inputs.digest()
        return ""

    def _receive_message(self, number: int, batch: Batch) -> None:
        """Of a new batch, what the stage before sends."""
        if not batch.is_new or number == 0 or self.ranks[number - 1] == self.channel.rank:
            return
        message: StageMessage | StageFailure = self.channel.receive_object(self.ranks[number - 1])
        if isinstance(message, StageFailure):
            batch.failure = batch.failure or message
            return
        batch.shapes.boundaries[number - 1] = message.boundaries
        if message.digest != self._digest(batch) and batch.failure is None:
            # The tensors that follow are received all the same.
            self._keep_failure(
                number,
                batch,
                PrepareError(
                    "this rank was given other inputs than the stage before it: all ranks of a pipeline read the same "
                    "samples, as the loader that prepare returns gives them"
                ),
            )
            for pending in self._post_receives(number, batch):
                pending.wait()

    def _post_receives(self, number: int, batch: Batch) -> list[PendingReceive]:
        """Start to receive all micro-batches of a stage."""
        if number == 0:
            return []
        sender, boundaries = self.ranks[number - 1], batch.shapes.boundaries[number - 1]
        if sender == self.channel.rank:
            return [
                PendingReceive([t.detach() for t in tensors], [])
                for tensors in batch.local.pop(number - 1)
            ]
        return [
            self.channel.post_receive(boundaries[size].specs, sender) for size in batch.inputs.sizes
        ]

    def _received(
        self, number: int, micro: int, batch: Batch, pending: list[PendingReceive]
    ) -> list[torch.Tensor]:
        tensors = pending[micro].wait()
        specs = batch.shapes.boundaries[number - 1][batch.inputs.sizes[micro]].specs
        for tensor, spec in zip(tensors, specs, strict=True):
            if batch.grad:
                tensor.requires_grad_(spec.requires_grad)
        return tensors

    def _compute(
        self, number: int, micro: int, batch: Batch, received: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Boundary | None]:
        """One micro-batch through one stage: its output tensors, and for a new batch their boundary."""
        size = batch.inputs.sizes[micro]
        if number == self.last:
            stop = self.cut.tail
        else:
            stop = self.cut.bounds[number + 1]
        segment = self.segment(number, stop, size, batch)
        segment.leave, segment.record = True, batch.is_new
        if segment.start == stop:
            # All units of the last stage belong to the tail.
            output: object = fill(batch.shapes.boundaries[number - 1][size].output, received)
        else:
            output = self.run(number, segment, received, *batch.inputs.microbatch(micro))
        tensors = list(trees.leaves(output))
        if number == self.last:
            batch.outputs.append(output)
            if batch.shapes.tail is None:
                batch.shapes.tail = (size, segment.unit_outputs)
            return tensors, None
        where = f"the output of {self.cut.units[stop - 1]}"
        if batch.is_new:
            return tensors, Boundary(describe(output, where), segment.unit_outputs)
        for spec, tensor in zip(batch.shapes.boundaries[number][size].specs, tensors, strict=True):
            if (tensor.shape, tensor.dtype, tensor.requires_grad) != (
                spec.shape,
                spec.dtype,
                spec.requires_grad,
            ):
                raise PrepareError(
                    f"{where} was {spec} for an earlier batch of the same inputs and is {describe(tensor, '')} now: "
                    "shapes must follow from those of the inputs, and parameters that are frozen or unfrozen during "
                    "training need a new prepare"
                )
        return tensors, None

    def segment(self, number: int, stop: int, size: int, batch: Batch) -> Segment:
        """The segment of a stage up to a unit, for a micro-batch of `size` samples."""
        if number:
            before = batch.shapes.boundaries[number - 1][size]
        else:
            before = None
        if before is None:
            unit_outputs = {}
        else:
            unit_outputs = copy.copy(before.unit_outputs)
        segment = Segment(self.cut.bounds[number], stop, unit_outputs=unit_outputs, grad=batch.grad)
        # What `run` fills with the received tensors.
        segment.received = None if before is None else before.output  # type: ignore[assignment]
        return segment

    def run(
        self,
        number: int,
        segment: Segment,
        received: Sequence[torch.Tensor],
        args: Args,
        kwargs: Kwargs,
    ) -> object:
        """Run a segment inside of its stage's module, which FSDP2 may shard."""

        def compute(_: int, received: Sequence[torch.Tensor]) -> object:
            if segment.received is not None:
                segment.received = fill(segment.received, received)
            return self.staged.run(segment, args, kwargs)

        self.stages[number].compute = compute
        return self.stages[number](*received)

    # -- the output

    def _finish_output(self, batch: Batch) -> None:
        """The model's output on the last stage: the tail on what the last block returned for all micro-batches."""
        joined, inputs = join(batch.outputs, batch.inputs.sizes, self.channel.device)
        batch.outputs = []
        assert batch.shapes.tail is not None
        size, unit_outputs = batch.shapes.tail
        unit_outputs = resize(unit_outputs, size, batch.inputs.batch_size)
        segment = Segment(
            self.cut.tail, len(self.cut.units), unit_outputs=unit_outputs, grad=batch.grad
        )
        stage = self.stages[self.last]

        def compute(_: int, received: Sequence[torch.Tensor]) -> object:
            # FSDP2 may have replaced what requires grad, to see its backward.
            batched = iter(received)
            pairs = zip(trees.leaves(joined), inputs, strict=True)
            segment.received = trees.replace_leaves(
                joined, [x if y is None else next(batched) for x, y in pairs]
            )
            return self.staged.run(segment, batch.inputs.args, batch.inputs.kwargs)

        stage.compute = compute
        batch.output = stage(*(tensor for tensor in inputs if tensor is not None))
        batch.tail = SavedGraph(inputs, list(trees.leaves(self.returned(batch.output))))

    def distribute_output(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """The output of the last stage, with a graph behind it, on every rank; otherwise None on the others."""
        at_source = self.channel.rank == self.source
        if batch.is_new:
            described: object = None
            if at_source and batch.failure is None:
                try:
                    described = describe(self.returned(batch.output), "the model's output")
                except Exception as error:
                    self._keep_failure(self.last, batch, error)
            message = self.channel.broadcast_object(batch.failure or described, self.source)
            if isinstance(message, StageFailure):
                self.channel.wait_for_sends()
                if batch.error is not None:
                    raise batch.error
                raise PrepareError(
                    f"stage {message.stage} of the pipeline could not compute: {message.text}"
                )
            batch.shapes.output = message
            batch.shapes.loss_index = _loss_index(message)
            self.shapes[batch.key] = batch.shapes
        specs = specs_in(batch.shapes.output)
        if at_source:
            tensors = [
                tensor.detach().contiguous() for tensor in trees.leaves(self.returned(batch.output))
            ]
            if [tuple(tensor.shape) for tensor in tensors] != [spec.shape for spec in specs]:
                raise PrepareError(
                    "the model's output has other shapes than for an earlier batch of the same inputs: a pipeline "
                    "needs shapes that follow from those of the inputs"
                )
        elif on_all_ranks:
            tensors = [spec.empty(self.channel.device) for spec in specs]
        if on_all_ranks:
            self.channel.broadcast(tensors, self.source)
        self.channel.wait_for_sends()
        if not (on_all_ranks or at_source):
            return None
        batch.output = None
        if batch.grad and any(spec.requires_grad for spec in specs):
            tensors = list(_PipelineOutput.apply(self.anchor, self, batch, specs, tensors))
        return fill(batch.shapes.output, tensors)

    def returned(self, output: object) -> object:
        """What the call of the model returns of its output: all, or the loss alone."""
        if self.gather:
            return output
        loss = loss_of(output)
        if loss is None:
            raise PrepareError(
                "gather_output=False returns the loss alone, and the model returns none: give labels"
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
            arriving = (
                self._output_backward(batch, grads)
                if number == self.last
                else self._post_gradients(number, batch)
            )
            for micro, graph in enumerate(batch.graphs[number]):
                self._microbatch_backward(number, batch, graph, arriving[micro])
            batch.graphs[number] = []
        self.channel.wait_for_sends()

    def _output_backward(self, batch: Batch, grads: OutputGradients) -> Sequence[OutputGradients]:
        """The gradients of what the last block returned for each micro-batch."""
        assert batch.tail is not None
        _backward_through(batch.tail.outputs, grads)
        gradients = [None if tensor is None else tensor.grad for tensor in batch.tail.inputs]
        batch.tail = None
        return [
            [
                None if gradient is None else gradient.narrow(0, offset, size)
                for gradient in gradients
            ]
            for offset, size in zip(batch.inputs.offsets, batch.inputs.sizes, strict=True)
        ]

    def _post_gradients(
        self, number: int, batch: Batch
    ) -> Sequence[PendingReceive | OutputGradients]:
        sender = self.ranks[number + 1]
        if sender == self.channel.rank:
            return batch.local_gradients.pop(number + 1)
        boundaries = [batch.shapes.boundaries[number][size] for size in batch.inputs.sizes]
        return [
            self.channel.post_receive(
                [spec for spec in boundary.specs if spec.requires_grad], sender
            )
            for boundary in boundaries
        ]

    def _microbatch_backward(
        self, number: int, batch: Batch, graph: SavedGraph, grads: PendingReceive | OutputGradients
    ) -> None:
        outputs = graph.outputs
        if number != self.last:
            outputs = [tensor for tensor in outputs if tensor.requires_grad]
        _backward_through(outputs, grads.wait() if isinstance(grads, PendingReceive) else grads)
        if number == 0:
            return
        inputs = [tensor for tensor in graph.inputs if tensor is not None and tensor.requires_grad]
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs
        ]
        peer = self.ranks[number - 1]
        if peer == self.channel.rank:
            batch.local_gradients.setdefault(number, []).append(gradients)
        else:
            self.channel.send(gradients, peer)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.func's transforms, which have no storage."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return tensor.layout is torch.strided
    return False


def _loss_index(description: object) -> int | None:
    """Which tensor of the described output is the loss."""
    tensors = [
        torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs_in(description)
    ]
    loss = loss_of(fill(description, tensors))
    return next((number for number, tensor in enumerate(tensors) if tensor is loss), None)


def _backward_through(outputs: Sequence[torch.Tensor], grads: OutputGradients) -> None:
    """Backward from those outputs that have a gradient."""
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(outputs, grads, strict=True)
        if grad is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])


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
