# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward through the stages of a pipeline, behind a call of the model and a backward of its loss.

The order is GPipe's: all micro-batches forward, then all backward. The forward runs this rank's stages. The last
stage's output is broadcast to every rank, where the training loop computes its loss. One autograd function stands for
the output; its backward sends each micro-batch's gradient from the last stage to the first.

The tail is what follows the last block (final norm, head, the model's own loss). It runs once on the complete batch,
unless running it on each micro-batch was seen to give the same output. So the output is the plain model's, whatever
mean it takes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, TypeVarTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from ...gradient_state import GradientState
from . import microbatch
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
    structure_key,
)
from .p2p import P2PChannel, PendingReceive, TensorSpec, describe, fill, is_spec, specs_in
from .split import StageSplit
from .stage import Segment, StagedModel

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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
        # By structure of the inputs: whether the tail may run on each micro-batch.
        self.splits_tail: dict[BatchKey, bool] = {}
        # On the last stage, with a new batch, its output and those of its micro-batches: the rules of its loss.
        self.find_loss_rules: Callable[[Batch, object, list[object]], list[str] | None] | None = None
        self.trained: bool = False
        self.anchor: torch.Tensor = torch.zeros((), device=self.channel.device, requires_grad=True)
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self._backward_is_running = False

    # -- forward

    def new_batch(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Batch:
        """The batch of a call. All ranks of the pipeline have the same inputs, so they agree on what is known.

        Raises:
            PrepareError: the call is one of torch.func, or its inputs cannot be split.
        """
        parameters = (parameter for stage in self.stages.values() for parameter in stage.parameters())
        if torch._C._are_functorch_transforms_active() or not all(parameter.is_leaf for parameter in parameters):
            raise PrepareError(
                "the pipelined model was called inside of torch.func (functional_call, vmap, grad, jvp, ...), whose "
                "tensors and parameters do not reach the stages of other ranks. Use DDP for such a model"
            )
        training, grad = self.staged.model.training, torch.is_grad_enabled()
        # The last batch of an epoch may have few samples, also where a resumed run begins with it.
        first = training and not self.trained and not GradientState().end_of_dataloader
        inputs = self.splitter.split(args, kwargs, first)
        self.trained = self.trained or training
        given = (inputs.args, inputs.kwargs)
        key = BatchKey(structure_key(given), training, grad)
        shapes = self.shapes.get(key)
        splits_tail = self.splits_tail.get(BatchKey(structure_key(given, shapes=False), training, grad))
        return Batch(inputs, shapes or BatchShapes(), key, grad, is_new=shapes is None, splits_tail=splits_tail)

    def forward(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """All micro-batches through all stages; the model's output, on every rank or on the last stage's only."""
        for number in sorted(self.stages):
            self._stage_forward(number, batch)
        if self.last in self.stages and batch.failure is None:
            self._attempt(self.last, batch, self._finish_output)
        batch.backward = self._backward
        return self.distribute_output(batch, on_all_ranks)

    def _attempt(self, number: int, batch: Batch, function: Callable[[Batch, *Ts], T], *arguments: *Ts) -> T | None:
        """With a new batch, keep a stage's error: the others wait for a message, which then reports the error."""
        if not batch.is_new:
            return function(batch, *arguments)
        try:
            return function(batch, *arguments)
        except Exception as error:
            batch.failure, batch.error = StageFailure(number, f"{type(error).__name__}: {error}"), error
            return None

    def _stage_forward(self, number: int, batch: Batch) -> None:
        graphs = batch.graphs[number] = []
        pending = self._post_receives(number, batch)
        unsent = []
        for micro in range(len(batch.inputs.sizes)):
            incoming, inputs = self._receive(number, micro, batch, pending)
            had_failed = batch.failure is not None
            computed = (
                None if had_failed else self._attempt(number, batch, self._compute, number, micro, incoming, inputs)
            )
            if batch.failure is not None:
                if batch.error is not None and micro:
                    raise batch.error
                self._send(number, micro, batch, None, [])
                # A stage before this one that does not know yet sends all its micro-batches, which are received; one
                # that has reported the failure sends no more.
                for rest in () if had_failed else range(1, len(batch.inputs.sizes)):
                    self._receive(number, rest, batch, pending)
                return
            assert computed is not None
            outputs, boundary = computed
            graphs.append(SavedGraph(inputs, outputs))
            if number != self.last:
                unsent.append((boundary, outputs))
                # Two stages of a rank may send to one peer: then all is received before anything is sent.
                if len(self.stages) == 1:
                    self._send(number, micro, batch, boundary, outputs)
        for micro, (boundary, outputs) in enumerate(unsent if len(self.stages) > 1 else ()):
            self._send(number, micro, batch, boundary, outputs)

    def _post_receives(self, number: int, batch: Batch) -> list[PendingReceive]:
        """Start to receive all micro-batches of a stage, where their shapes are known."""
        if number == 0 or batch.is_new or self.ranks[number - 1] == self.channel.rank:
            return []
        known = batch.shapes.stage_inputs
        sender = self.ranks[number - 1]
        return [self.channel.post_receive(known[number, size].specs, sender) for size in batch.inputs.sizes]

    def _receive(
        self, number: int, micro: int, batch: Batch, pending: list[PendingReceive]
    ) -> tuple[Boundary | None, list[torch.Tensor]]:
        if number == 0:
            return None, []
        sender, key = self.ranks[number - 1], (number, batch.inputs.sizes[micro])
        known = batch.shapes.stage_inputs
        message: Boundary | StageFailure
        if sender == self.channel.rank:
            message, tensors = batch.local.pop((number, micro))  # type: ignore[assignment]
            tensors = [tensor.detach() for tensor in tensors]
        else:
            message = known.get(key) or self.channel.receive_object(sender)
            tensors = []
        if isinstance(message, StageFailure):
            batch.failure = message
            return None, []
        incoming = known.setdefault(key, message)
        if sender != self.channel.rank:
            tensors = (pending[micro] if pending else self.channel.post_receive(incoming.specs, sender)).wait()
        if batch.grad:
            for tensor, spec in zip(tensors, incoming.specs, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        return incoming, tensors

    def _send(
        self, number: int, micro: int, batch: Batch, boundary: Boundary | None, tensors: list[torch.Tensor]
    ) -> None:
        """Send a micro-batch to the next stage; with the first of its size its boundary, or the failure."""
        if number == self.last:
            return
        peer, key = self.ranks[number + 1], (number, batch.inputs.sizes[micro])
        known = batch.shapes.stage_outputs
        if peer == self.channel.rank:
            batch.local[number + 1, micro] = (batch.failure or boundary, tensors)
            if boundary is not None:
                known.setdefault(key, boundary)
            return
        if batch.failure is not None:
            self.channel.send_object(batch.failure, peer)
            return
        assert boundary is not None
        if batch.is_new and key not in known:
            self.channel.send_object(boundary, peer)
            known[key] = boundary
        self.channel.send(tensors, peer)

    def _compute(
        self, batch: Batch, number: int, micro: int, incoming: Boundary | None, inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Boundary | None]:
        """One micro-batch through one stage: its output tensors, and their boundary."""
        is_last = number == self.last
        if batch.is_new and incoming is not None and not micro and incoming.digest not in ("", batch.inputs.digest()):
            raise PrepareError(
                "this rank was given other inputs than the stage before it: all ranks of a pipeline read the same "
                "samples, as the loader that prepare returns gives them"
            )
        start, stop = self.cut.bounds[number], self.cut.bounds[number + 1]
        if is_last and not batch.splits_tail:
            stop = self.cut.tail
        size = batch.inputs.sizes[micro]
        unit_outputs = copy.copy(incoming.unit_outputs) if incoming is not None else {}
        leave = not (is_last and batch.splits_tail)
        segment = Segment(start, stop, unit_outputs=unit_outputs, record=batch.is_new, leave=leave, grad=batch.grad)
        if stop == start:
            # All units of the last stage belong to the tail.
            assert incoming is not None
            output = fill(incoming.output, inputs)
        else:
            output = self._run(number, segment, incoming, inputs, *batch.inputs.microbatch(micro))
        if is_last:
            batch.last_outputs.append(output)
            if batch.shapes.tail is None:
                batch.shapes.tail = (size, segment.unit_outputs)
            return list(trees.leaves(output)), None
        tensors = list(trees.leaves(output))
        known = batch.shapes.stage_outputs.get((number, size))
        if known is None:
            described = describe(output, self._output_name(stop))
            return tensors, Boundary(described, segment.unit_outputs, batch.inputs.digest())
        self._check_specs(known, tensors, stop)
        return tensors, known

    def _run(
        self,
        number: int,
        segment: Segment,
        incoming: Boundary | None,
        inputs: Sequence[torch.Tensor],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        def job(_: int, received: Sequence[torch.Tensor]) -> object:
            segment.received = None if incoming is None else fill(incoming.output, received)
            return self.staged.run(segment, args, kwargs)

        return self.stages[number](*inputs, job=job)

    def _output_name(self, stop: int) -> str:
        return f"the output of {self.cut.units[stop - 1]}"

    def _check_specs(self, known: Boundary, tensors: list[torch.Tensor], stop: int) -> None:
        for spec, tensor in zip(known.specs, tensors, strict=True):
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype or tensor.requires_grad != spec.requires_grad:
                raise PrepareError(
                    f"{self._output_name(stop)} was {spec} for an earlier batch of the same inputs and is "
                    f"{describe(tensor, '')} now: shapes must follow from those of the inputs, and parameters that "
                    "are frozen or unfrozen during training need a new prepare"
                )

    # -- the output

    def _finish_output(self, batch: Batch) -> None:
        """The model's output on the last stage, from those of its micro-batches."""
        if batch.splits_tail:
            batch.output = microbatch.merge(batch.last_outputs, batch.inputs.sizes)
            if batch.output is None:
                raise PrepareError("a tensor of the model's output has lost its batch dimension")
            return
        joined, inputs, batch.batched, unequal = microbatch.join(batch.last_outputs, batch.inputs.sizes)
        if batch.grad:
            for tensor, spec in zip(inputs, joined.specs, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        lost = [
            not batched and (differs or tensor.requires_grad)
            for tensor, batched, differs in zip(inputs, batch.batched, unequal, strict=True)
        ]
        try:
            batch.output = self._run_tail(batch, joined, inputs)
        except RuntimeError as error:
            if any(lost):
                raise microbatch.not_batched(inputs[lost.index(True)], batch.inputs.sizes) from error
            raise
        if batch.is_new:
            self._check_batched(batch, joined, inputs, lost)
        batch.tail = SavedGraph(inputs, list(trees.leaves(self.returned(batch.output))))
        if batch.is_new and (batch.splits_tail is None or self.find_loss_rules is not None):
            self._try_split_tail(batch, joined, batch.tail)

    def _run_tail(self, batch: Batch, joined: Boundary, inputs: Sequence[torch.Tensor]) -> object:
        """The tail on the complete batch."""
        segment = self._tail_segment(batch, batch.inputs.batch_size)
        return self._run(self.last, segment, joined, inputs, batch.inputs.args, batch.inputs.kwargs)

    def _check_batched(self, batch: Batch, joined: Boundary, inputs: Sequence[torch.Tensor], lost: list[bool]) -> None:
        """Raise where the tail uses a `lost` tensor, which is not batched and differs between micro-batches.

        NaN instead of it shows whether the output depends on it.
        """
        if not any(lost) or microbatch.holds_nan(batch.output):
            return
        marked = [torch.full_like(x, float("nan")) if is_lost else x for x, is_lost in zip(inputs, lost, strict=True)]
        with torch.no_grad():
            output = self._run_tail(batch, joined, marked)
        if microbatch.holds_nan(output):
            raise microbatch.not_batched(inputs[lost.index(True)], batch.inputs.sizes)

    def _try_split_tail(self, batch: Batch, joined: Boundary, tail: SavedGraph) -> None:
        """See, once for a structure of inputs, whether the tail gives the same on each micro-batch."""
        outputs = self._tail_of_microbatches(batch, joined)
        merged = microbatch.merge(outputs, batch.inputs.sizes)
        given = (batch.inputs.args, batch.inputs.kwargs)
        key = batch.key._replace(structure=structure_key(given, shapes=False))
        self.splits_tail[key] = merged is not None and microbatch.outputs_match(merged, batch.output)
        batch.tail_matches = self.splits_tail[key] and not batch.splits_tail
        if self.find_loss_rules is None or not batch.grad or not self.staged.model.training:
            return
        batch.loss_rules = self.find_loss_rules(batch, batch.output, outputs)
        if batch.loss_rules == []:
            # Dropout in the tail draws other numbers for micro-batches: the rules are found without it.
            with _evaluating(self.staged.model):
                with torch.no_grad():
                    output = self._run_tail(batch, joined, [tensor.detach() for tensor in tail.inputs])
                batch.loss_rules = self.find_loss_rules(batch, output, self._tail_of_microbatches(batch, joined))

    def _tail_segment(self, batch: Batch, size: int) -> Segment:
        assert batch.shapes.tail is not None
        known_size, unit_outputs = batch.shapes.tail
        unit_outputs = microbatch.resize(unit_outputs, known_size, size)
        grad = batch.grad and torch.is_grad_enabled()
        return Segment(self.cut.tail, len(self.cut.units), unit_outputs=unit_outputs, grad=grad)

    @torch.no_grad()
    def _tail_of_microbatches(self, batch: Batch, joined: Boundary) -> list[object]:
        outputs = []
        for micro, output in enumerate(batch.last_outputs):
            segment = self._tail_segment(batch, batch.inputs.sizes[micro])
            inputs = [tensor.detach() for tensor in trees.leaves(output)]
            outputs.append(self._run(self.last, segment, joined, inputs, *batch.inputs.microbatch(micro)))
        return outputs

    def distribute_output(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """The output of the last stage, with a graph behind it, on every rank; otherwise None on the others."""
        at_source = self.channel.rank == self.source
        if batch.is_new:
            described = (
                self._attempt(self.last, batch, self._describe_output) if at_source and not batch.failure else None
            )
            self._take_description(batch, self.channel.broadcast_object(batch.failure or described, self.source))
        specs = specs_in(batch.shapes.output)
        if at_source:
            tensors = [tensor.detach().contiguous() for tensor in trees.leaves(self.returned(batch.output))]
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
        batch.last_outputs = []
        if batch.grad and any(spec.requires_grad for spec in specs):
            tensors = list(_PipelineOutput.apply(self.anchor, self, batch, specs, tensors))
        return fill(batch.shapes.output, tensors)

    def _describe_output(self, batch: Batch) -> tuple[object, list[str] | None, bool]:
        described = describe(self.returned(batch.output), "the model's output")
        if batch.splits_tail:
            # The merged output has no graph; those of the micro-batches have.
            specs = zip(specs_in(described), trees.leaves(batch.last_outputs[0]), strict=True)
            flagged = [replace(spec, requires_grad=tensor.requires_grad) for spec, tensor in specs]
            described = trees.replace_leaves(described, flagged, is_spec)
        return described, batch.loss_rules, batch.tail_matches

    def returned(self, output: object) -> object:
        """What the call of the model returns of its output: all, or the loss alone."""
        if self.gather:
            return output
        loss = microbatch.loss_of(output)
        if loss is None:
            raise PrepareError("gather_output=False returns the loss alone, and the model returns none: give labels")
        return trees.map_leaves(lambda tensor: tensor if tensor is loss else None, output)

    def _take_description(self, batch: Batch, message: StageFailure | tuple[object, list[str] | None, bool]) -> None:
        if isinstance(message, StageFailure):
            self.channel.wait_for_sends()
            if batch.error is not None:
                raise batch.error
            raise PrepareError(f"stage {message.stage} of the pipeline could not compute: {message.text}")
        batch.shapes.output, batch.loss_rules, batch.tail_matches = message
        self.shapes[batch.key] = batch.shapes

    # -- backward

    def start_backward(self, batch: Batch, grads: OutputGradients) -> None:
        """The backward of a batch, called by autograd on every rank with the gradients of the output."""
        if batch.backward is None:
            raise AccelerateError(
                "backward was called a second time through the same output of a pipelined model: add the losses and "
                "call backward once, or call the model again"
            )
        for call in self.before_backward:
            call()
        run, batch.backward = batch.backward, None
        run(batch, grads)
        self._backward_is_running = True
        # At the end of autograd's backward, however many outputs of the pipeline it goes through.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        if self._backward_is_running:
            self._backward_is_running = False
            for call in self.after_backward:
                call()

    def _backward(self, batch: Batch, grads: OutputGradients) -> None:
        for number in sorted(self.stages, reverse=True):
            if number == self.last:
                arriving: Sequence[PendingReceive | OutputGradients] = self._output_backward(batch, grads)
            else:
                arriving = self._post_gradients(number, batch)
            for micro, graph in enumerate(batch.graphs[number]):
                self._microbatch_backward(number, micro, batch, graph, arriving[micro])
            batch.graphs[number] = []
        self.channel.wait_for_sends()

    def _output_backward(self, batch: Batch, grads: OutputGradients) -> Sequence[OutputGradients]:
        """The gradients of what the last stage returned for each micro-batch."""
        slices = list(zip(batch.inputs.offsets, batch.inputs.sizes, strict=True))
        if batch.tail is None:
            return [[None if grad is None else grad.narrow(0, *bounds) for grad in grads] for bounds in slices]
        _backward_through(batch.tail.outputs, grads)
        found = [
            tensor.grad if batched else None for tensor, batched in zip(batch.tail.inputs, batch.batched, strict=True)
        ]
        batch.tail = None
        return [[None if grad is None else grad.narrow(0, *bounds) for grad in found] for bounds in slices]

    def _post_gradients(self, number: int, batch: Batch) -> Sequence[PendingReceive | OutputGradients]:
        sender, sizes = self.ranks[number + 1], batch.inputs.sizes
        if sender == self.channel.rank:
            return [batch.local_gradients.pop((number, micro)) for micro in range(len(sizes))]
        boundaries = [batch.shapes.stage_outputs[number, size] for size in sizes]
        return [
            self.channel.post_receive([spec for spec in boundary.specs if spec.requires_grad], sender)
            for boundary in boundaries
        ]

    def _microbatch_backward(
        self, number: int, micro: int, batch: Batch, graph: SavedGraph, grads: PendingReceive | OutputGradients
    ) -> None:
        outputs = graph.outputs
        if isinstance(grads, PendingReceive):
            grads = grads.wait()
        if number != self.last:
            outputs = [tensor for tensor in outputs if tensor.requires_grad]
        _backward_through(outputs, grads)
        if number == 0:
            return
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in graph.inputs if x.requires_grad]
        peer = self.ranks[number - 1]
        if peer == self.channel.rank:
            batch.local_gradients[number - 1, micro] = found
        else:
            self.channel.send(found, peer)


def _backward_through(outputs: Sequence[torch.Tensor], grads: OutputGradients) -> None:
    """Backward from those outputs that have a gradient."""
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(outputs, grads, strict=True)
        if grad is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
