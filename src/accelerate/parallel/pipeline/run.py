# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward through the stages of a pipeline, behind a call of the model and a backward of its loss.

The order is GPipe's: all micro-batches forward, then all backward. The forward runs this rank's stages; the last
stage's output reaches every rank, where the loop computes its loss from it. The output hangs on one autograd function,
whose backward takes each micro-batch's gradient from the next stage through this one to the former.

What follows on the last block (final norm, head, the model's own loss) is computed once, on the whole batch, unless it
was seen to give the same by parts: so an output is the plain model's, whatever it is a mean of.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from . import merge
from .backward import Backward
from .batch import Batch, Boundary, Known, Saved, Stage, StageFailure
from .inputs import Divider, key_of
from .p2p import Arriving, P2PChannel
from .split import StageSplit
from .stage import Part, Spec, StagedModel, describe, fill, holds_nan, is_spec


class Runner:
    """Runs a staged model. `stages` are this rank's; `ranks[s]` is the rank of the group that holds stage s."""

    def __init__(
        self,
        staged: StagedModel,
        cut: StageSplit,
        stages: dict[int, Stage],
        ranks: Sequence[int],
        wire: P2PChannel,
        divider: Divider,
        gather: bool = True,
    ) -> None:
        self.staged, self.cut, self.stages, self.ranks = staged, cut, stages, list(ranks)
        self.wire, self.divider, self.gather = wire, divider, gather
        self.last = cut.stages - 1
        self.source = self.ranks[self.last]
        self.known: dict[Any, Known] = {}
        # By structure of the inputs: whether the output may be computed by parts.
        self.parts_agree: dict[Any, bool] = {}
        # What the last stage learns from a new batch beside; called with the batch, its output and the parts'.
        self.examine: Callable[[Batch, Any, list[Any]], Any] | None = None
        self._backward = Backward(stages, self.ranks, wire)
        self.trained = False
        self.anchor = torch.zeros((), device=wire.device, requires_grad=True)
        # Called before and after a backward goes through.
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self._due = False

    # -- forward

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The batch of a call. Inputs are the same on all ranks of the pipeline, and so is what is known of them."""
        training, grad = self.staged.model.training, torch.is_grad_enabled()
        inputs = self.divider.divide(args, kwargs, first=training and not self.trained)
        self.trained = self.trained or training
        given = (inputs.args, inputs.kwargs)
        key = (key_of(given), training, grad)
        known = self.known.get(key)
        by_parts = self.parts_agree.get((key_of(given, shapes=False), training, grad))
        return Batch(inputs, known or Known(), key, grad, new=known is None, by_parts=by_parts)

    def forward(self, batch: Batch, everywhere: bool = True) -> Any:
        """All micro-batches through all stages; the model's output, on every rank or on the last stage's alone."""
        for number in sorted(self.stages):
            self._stage_forward(number, batch)
        if self.last in self.stages and batch.failure is None:
            self._attempt(self.last, batch, self._finish_output)
        batch.backward = self._backward
        return self.hand_out(batch, everywhere)

    def _attempt(self, number: int, batch: Batch, what: Callable[..., Any], *arguments: Any) -> Any:
        """With a new batch a stage's error is kept: the others wait for what it would have sent, and are told."""
        if not batch.new:
            return what(batch, *arguments)
        try:
            return what(batch, *arguments)
        except Exception as error:
            batch.failure, batch.error = StageFailure(number, f"{type(error).__name__}: {error}"), error
            return None

    def _stage_forward(self, number: int, batch: Batch) -> None:
        batch.saved[number] = []
        arriving = self._post_all(number, batch)
        sent = []
        for micro in range(len(batch.inputs.rows)):
            inlet, leaves = self._receive(number, micro, batch, arriving)
            was_told = batch.failure is not None
            computed = None if was_told else self._attempt(number, batch, self._compute, number, micro, inlet, leaves)
            if batch.failure is not None:
                if batch.error is not None and micro:
                    raise batch.error
                self._send(number, micro, batch, None, [])
                # A former stage that does not know yet sends all, which is taken; one that told of it sends no more.
                for rest in () if was_told else range(1, len(batch.inputs.rows)):
                    self._receive(number, rest, batch, arriving)
                return
            tensors, boundary = computed  # type: ignore[misc]
            batch.saved[number].append(Saved(leaves, tensors))
            if number != self.last:
                sent.append((boundary, tensors))
                # Two stages of a rank may talk to one peer: then all is received before anything is sent.
                if len(self.stages) == 1:
                    self._send(number, micro, batch, boundary, tensors)
        for micro, (boundary, tensors) in enumerate(sent if len(self.stages) > 1 else ()):
            self._send(number, micro, batch, boundary, tensors)

    def _post_all(self, number: int, batch: Batch) -> list[Arriving]:
        """Memory for all that will come, where its shapes are known."""
        if number == 0 or batch.new or self.ranks[number - 1] == self.wire.rank:
            return []
        inlets = batch.known.inlets
        return [self.wire.post(inlets[number, rows].specs, self.ranks[number - 1]) for rows in batch.inputs.rows]

    def _receive(
        self, number: int, micro: int, batch: Batch, arriving: list[Arriving]
    ) -> tuple[Boundary | None, list[torch.Tensor]]:
        if number == 0:
            return None, []
        sender, key = self.ranks[number - 1], (number, batch.inputs.rows[micro])
        inlets = batch.known.inlets
        if sender == self.wire.rank:
            told, tensors = batch.local.pop((number, micro))
            tensors = [tensor.detach() for tensor in tensors]
        else:
            told = inlets.get(key) or self.wire.receive_object(sender)
            tensors = []
        if isinstance(told, StageFailure):
            batch.failure = told
            return None, []
        inlet = inlets.setdefault(key, told)
        if sender != self.wire.rank:
            tensors = (arriving[micro] if arriving else self.wire.post(inlet.specs, sender)).take()
        if batch.grad:
            for tensor, spec in zip(tensors, inlet.specs, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        return inlet, tensors

    def _send(
        self, number: int, micro: int, batch: Batch, boundary: Boundary | None, tensors: list[torch.Tensor]
    ) -> None:
        """Hand a micro-batch to the next stage; with the first of its size what it is, or that there is none."""
        if number == self.last:
            return
        peer, key = self.ranks[number + 1], (number, batch.inputs.rows[micro])
        if peer == self.wire.rank:
            batch.local[number + 1, micro] = (batch.failure or boundary, tensors)
            batch.known.outlets.setdefault(key, boundary) if boundary is not None else None
            return
        if batch.failure is not None:
            self.wire.send_object(batch.failure, peer)
            return
        assert boundary is not None
        if batch.new and key not in batch.known.outlets:
            self.wire.send_object(boundary, peer)
            batch.known.outlets[key] = boundary
        self.wire.send(tensors, peer)

    def _compute(
        self, batch: Batch, number: int, micro: int, inlet: Boundary | None, leaves: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Boundary | None]:
        """One micro-batch through one stage: the tensors that it gives, and (of a new batch) their description."""
        is_last = number == self.last
        if batch.new and inlet is not None and not micro and inlet.digest not in ("", batch.inputs.digest()):
            raise PrepareError(
                "this rank was given other inputs than the stage before it: all ranks of a pipeline read the same "
                "samples, as the loader that prepare returns gives them"
            )
        start, stop = self.cut.bounds[number], self.cut.bounds[number + 1]
        if is_last and not batch.by_parts:
            stop = self.cut.tail
        rows = batch.inputs.rows[micro]
        seen = inlet.seen if inlet is not None else {}
        leave = not (is_last and batch.by_parts)
        part = Part(start, stop, seen=copy.copy(seen), record=batch.new, leave=leave, grad=batch.grad)
        if stop == start:
            # Nothing of the last stage is by micro-batches.
            assert inlet is not None
            output = fill(inlet.output, leaves)
        else:
            output = self._run(number, part, inlet, leaves, *batch.inputs.part(micro))
        if is_last:
            batch.given.append(output)
            if batch.known.tail is None:
                batch.known.tail = (rows, part.seen)
            return list(trees.leaves(output)), None
        tensors = list(trees.leaves(output))
        known = batch.known.outlets.get((number, rows))
        if known is None:
            return tensors, Boundary(describe(output, self._named_output(stop)), part.seen, batch.inputs.digest())
        self._check_specs(known, tensors, stop)
        return tensors, known

    def _run(
        self,
        number: int,
        part: Part,
        inlet: Boundary | None,
        leaves: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def job(_: int, received: Sequence[torch.Tensor]) -> Any:
            part.received = None if inlet is None else fill(inlet.output, received)
            return self.staged.run(part, args, kwargs)

        return self.stages[number](*leaves, job=job)

    def _named_output(self, stop: int) -> str:
        return f"the output of {self.cut.units[stop - 1]}"

    def _check_specs(self, known: Boundary, tensors: list[torch.Tensor], stop: int) -> None:
        for spec, tensor in zip(known.specs, tensors, strict=True):
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype or tensor.requires_grad != spec.requires_grad:
                raise PrepareError(
                    f"{self._named_output(stop)} was {spec} for an earlier batch of the same inputs and is "
                    f"{describe(tensor, '')} now: shapes must follow from those of the inputs, and parameters that "
                    "are frozen or freed during the training need a new prepare"
                )

    # -- the output

    def _finish_output(self, batch: Batch) -> None:
        """The model's output on the last stage, from what its micro-batches gave."""
        rows = batch.inputs.rows
        if batch.by_parts:
            batch.output = merge.merge(batch.given, rows)
            if batch.output is None:
                raise PrepareError("the model's output cannot be put together from parts any more")
            return
        description, tensors, batch.divided = merge.join(batch.given, rows)
        whole = Boundary(description, {})
        if batch.grad:
            for tensor, spec in zip(tensors, whole.specs, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        part = self._tail_part(batch, batch.inputs.batch)
        batch.output = self._run(self.last, part, whole, tensors, batch.inputs.args, batch.inputs.kwargs)
        if batch.new:
            self._check_undivided(batch, whole, tensors)
        batch.tail = Saved(tensors, list(trees.leaves(self._kept(batch.output))))
        if batch.new and (batch.by_parts is None or self.examine is not None):
            self._try_parts(batch, whole)

    def _check_undivided(self, batch: Batch, whole: Boundary, leaves: Sequence[torch.Tensor]) -> None:
        """Raise where the tail uses a tensor that needs a gradient and is not divided: NaN in its place shows."""
        alike = [tensor.requires_grad and not divided for tensor, divided in zip(leaves, batch.divided, strict=True)]
        if not any(alike) or holds_nan(batch.output):
            return
        lost = [
            torch.full_like(leaf, float("nan")) if is_alike else leaf
            for leaf, is_alike in zip(leaves, alike, strict=True)
        ]
        part = self._tail_part(batch, batch.inputs.batch)
        with torch.no_grad():
            output = self._run(self.last, part, whole, lost, batch.inputs.args, batch.inputs.kwargs)
        if holds_nan(output):
            raise merge.no_batch(
                next(leaf for leaf, is_alike in zip(leaves, alike, strict=True) if is_alike), batch.inputs.rows
            )

    def _try_parts(self, batch: Batch, whole: Boundary) -> None:
        """See, once for a structure of inputs, whether the tail gives the same by parts."""
        outputs = self._tail_by_parts(batch, whole)
        merged = merge.merge(outputs, batch.inputs.rows)
        inputs = (batch.inputs.args, batch.inputs.kwargs)
        key = (key_of(inputs, shapes=False), *batch.key[1:])
        self.parts_agree[key] = merged is not None and merge.is_same(merged, batch.output)
        batch.parts_agreed = self.parts_agree[key] and not batch.by_parts
        if self.examine is None or not batch.grad or not self.staged.model.training:
            return
        batch.notes = self.examine(batch, batch.output, outputs)
        if batch.notes == []:
            # Dropout behind the blocks draws other numbers by parts: it is judged without.
            with _evaluating(self.staged.model), torch.no_grad():
                part = self._tail_part(batch, batch.inputs.batch)
                inputs = (batch.inputs.args, batch.inputs.kwargs)
                leaves = [tensor.detach() for tensor in batch.tail.leaves]  # type: ignore[union-attr]
                output = self._run(self.last, part, whole, leaves, *inputs)
            with _evaluating(self.staged.model):
                batch.notes = self.examine(batch, output, self._tail_by_parts(batch, whole))

    def _tail_part(self, batch: Batch, rows: int) -> Part:
        """What follows on the blocks of the last stage, for so many rows."""
        assert batch.known.tail is not None
        seen = merge.widen(batch.known.tail[1], batch.known.tail[0], rows)
        return Part(self.cut.tail, len(self.cut.units), seen=seen, grad=batch.grad and torch.is_grad_enabled())

    @torch.no_grad()
    def _tail_by_parts(self, batch: Batch, whole: Boundary) -> list[Any]:
        outputs = []
        for micro, given in enumerate(batch.given):
            part = self._tail_part(batch, batch.inputs.rows[micro])
            leaves = [tensor.detach() for tensor in trees.leaves(given)]
            outputs.append(self._run(self.last, part, whole, leaves, *batch.inputs.part(micro)))
        return outputs

    def hand_out(self, batch: Batch, everywhere: bool = True) -> Any:
        """Give every rank the output of the last stage, with the graph behind it; else that stage's, and None."""
        at_source = self.wire.rank == self.source
        if batch.new:
            told = self._attempt(self.last, batch, self._describe_output) if at_source and not batch.failure else None
            self._agree(batch, self.wire.broadcast_object(batch.failure or told, self.source))
        specs = list(trees.leaves(batch.known.output, is_spec))
        if at_source:
            tensors = [tensor.detach().contiguous() for tensor in trees.leaves(self._kept(batch.output))]
            if [tuple(tensor.shape) for tensor in tensors] != [spec.shape for spec in specs]:
                raise PrepareError(
                    "the model's output has other shapes than for an earlier batch of the same inputs: a pipeline "
                    "needs shapes that follow from those of the inputs"
                )
        elif everywhere:
            tensors = [spec.empty(self.wire.device) for spec in specs]
        if everywhere:
            self.wire.broadcast(tensors, self.source)
        self.wire.settle()
        if not (everywhere or at_source):
            return None
        batch.output = None
        batch.given = []
        if batch.grad and any(spec.requires_grad for spec in specs):
            tensors = list(_Handed.apply(self.anchor, self, batch, specs, tensors))
        return fill(batch.known.output, tensors)

    def _describe_output(self, batch: Batch) -> tuple[Any, Any, bool]:
        described = describe(self._kept(batch.output), "the model's output")
        if batch.by_parts:
            # What is put together has no graph; its parts have.
            specs = zip(trees.leaves(described, is_spec), trees.leaves(batch.given[0]), strict=True)
            flagged = [replace(spec, requires_grad=tensor.requires_grad) for spec, tensor in specs]
            described = trees.replace_leaves(described, flagged, is_spec)
        return described, batch.notes, batch.parts_agreed

    def _kept(self, output: Any) -> Any:
        """The output, or its loss alone."""
        if self.gather:
            return output
        loss = merge.loss_of(output)
        if loss is None:
            raise PrepareError("gather_output=False hands out the loss alone, and the model returns none: give labels")
        return trees.map_leaves(lambda tensor: tensor if tensor is loss else None, output)

    def _agree(self, batch: Batch, told: Any) -> None:
        if isinstance(told, StageFailure):
            self.wire.settle()
            if batch.error is not None:
                raise batch.error
            raise PrepareError(f"stage {told.stage} of the pipeline could not compute: {told.text}")
        batch.known.output, batch.notes, batch.parts_agreed = told
        self.known[batch.key] = batch.known

    # -- backward

    def start_backward(self, batch: Batch, grads: list[torch.Tensor | None]) -> None:
        """The backward of a batch, called by autograd on every rank with the gradients of the output."""
        if batch.backward is None:
            raise AccelerateError(
                "backward was called a second time through the same output of a pipelined model: call the model again"
            )
        for call in self.before_backward:
            call()
        run, batch.backward = batch.backward, None
        run(batch, grads)
        self._due = True
        # At the end of the backward that this is a part of, however many outputs it goes through.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        if self._due:
            self._due = False
            for call in self.after_backward:
                call()


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


class _Handed(torch.autograd.Function):
    """The output on every rank. It hangs on a leaf that requires grad, so that its backward reaches every stage."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        runner: Runner,
        batch: Batch,
        specs: list[Spec],
        tensors: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        ctx.runner, ctx.batch = runner, batch
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(tensor for tensor, spec in zip(tensors, specs, strict=True) if not spec.requires_grad)
        )
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.runner.start_backward(ctx.batch, list(grads))
        return None, None, None, None, None
