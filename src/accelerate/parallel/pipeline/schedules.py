# SPDX-License-Identifier: Apache-2.0
"""Schedules that interleave forward and backward, torch's own, for a model that returns its loss.

The first batch of its shapes goes in GPipe's order: it tells what travels between the stages, and how the losses of
micro-batches make the loss of the batch. From the second on the backward runs inside the call of the model. What it
gave is kept beside the gradients, and takes its factor (accumulation, scaling, items) when the loop calls backward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...config.parallel import PipelineParallelConfig
from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from ...core.imports import is_torch_version
from ...precision.base import Precision
from ..accumulated import AccumulatedGradients, Gradients
from ..gradients import multiply
from . import losses, merge
from .batch import Batch, Boundary, Known
from .run import Runner
from .stage import Part, Spec, fill, is_spec

logger = logging.getLogger(__name__)

# Our words -> torch's classes.
_CLASSES = {
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
# They take the gradients of weights apart. Before 2.13 torch finds wrong ones where weights meet the inputs in several
# places (an LSTM).
_WEIGHTS_APART = ("zero_bubble", "zbv")
_KEPT_SCHEDULES = 4
# So many stages of a rank torch keeps gathered at a time (2.13, `_add_unshard_reshard`); it gives them back only at
# the end of a batch.
_KEPT_WHOLE = 3


@dataclass
class Step:
    """One batch on its way: what its losses are multiplied by, what the last stage gave, and the gradients."""

    batch: Batch
    seed: torch.Tensor
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=dict)


class Scheduled:
    """Runs those batches of a pipelined model that its schedule can take. Of GPipe's own it takes none."""

    def __init__(
        self, runner: Runner, options: PipelineParallelConfig, precision: Precision, held: AccumulatedGradients
    ) -> None:
        self.runner, self.options, self.precision, self.held = runner, options, precision, held
        self.rules: tuple[str, ...] = losses.RULES
        self.started = self.told = False
        self._step: Step | None = None
        self._built: dict[Any, Any] = {}
        self.kind = _CLASSES.get(str(options.schedule))
        if self.kind is None:
            return
        if options.schedule in _WEIGHTS_APART and is_torch_version("<", "2.13"):
            raise PrepareError(
                f"schedule={options.schedule!r} needs torch 2.13 or later, and this is {torch.__version__}, whose own "
                "schedule of that name finds wrong gradients for some layers: use schedule='interleaved' or '1f1b'"
            )
        runner.examine = self._examine
        try:
            self._schedule(dict.fromkeys(runner.stages, ((), ())))
        except ValueError as error:
            raise PrepareError(
                f"schedule={options.schedule!r} does not go with num_microbatches={runner.divider.parts} on "
                f"{runner.wire.size} ranks of {options.stages_per_rank} stages: {error}"
            ) from error

    # -- which batches

    def fits(self, batch: Batch) -> bool:
        """Whether a batch runs in this schedule; every rank of the pipeline finds the same."""
        if self.kind is None or not batch.grad or not self.runner.staged.model.training:
            return False
        parts = self.runner.divider.parts
        if batch.inputs.batch % parts:
            if not self.started:
                raise PrepareError(
                    f"a batch of {batch.inputs.batch} samples is not divisible by num_microbatches={parts}, which "
                    f"schedule={self.options.schedule!r} needs: choose another number of either, or schedule='gpipe'"
                )
            # The last batch of an epoch may be smaller: GPipe's order gives the same.
            return False
        self.started = True
        if batch.new or batch.known.notes is None:
            return False
        weights = losses.weights_by_rule(batch.inputs, self.rules)
        if losses.are_equal(weights):
            batch.weights = next(iter(weights.values()))
            # A micro-batch without labels has no mean.
            return all(batch.weights)
        # The rules that are left differ on this batch: it goes in GPipe's order, and tells.
        batch.new, batch.known = True, Known()
        return False

    def learn(self, batch: Batch) -> None:
        """Keep those rules that held for a new batch. Raises PrepareError, on all ranks, where none does."""
        if self.kind is None:
            return
        if batch.notes is None:
            if self.told or not self.runner.staged.model.training:
                return
            self.told = True
            if dist.get_rank() == 0:
                logger.warning(
                    "schedule=%r is for a model that returns its loss: this one's output has none in training, and "
                    "the batches go in GPipe's order. Give the model its labels, or prepare a loss_fn.",
                    self.options.schedule,
                )
            return
        batch.known.notes = batch.notes
        self.rules = tuple(rule for rule in self.rules if rule in batch.notes)
        if not self.rules:
            raise PrepareError(
                f"the model's loss over a batch does not follow from those of its micro-batches ({losses.RULES} were "
                "tried): use schedule='gpipe', which takes any loss"
            )

    def _examine(self, batch: Batch, output: Any, outputs: list[Any]) -> list[str] | None:
        """On the last stage, with a new batch: the rules by which losses of parts make the loss, if there is one."""
        whole, trained = merge.loss_of(output), merge.loss_of(batch.output)
        if whole is None or trained is None or not trained.requires_grad:
            return None
        parts = [merge.loss_of(output) for output in outputs]
        if self.runner.gather:
            self._check_rest(batch, outputs, parts)
        held = [part for part in parts if part is not None]
        return losses.holding(whole, held, batch.inputs, self.precision.native_amp)

    def _check_rest(self, batch: Batch, outputs: list[Any], parts: Sequence[Any]) -> None:
        rest = [
            [tensor for tensor in trees.leaves(output) if tensor is not loss]
            for output, loss in zip(outputs, parts, strict=True)
        ]
        for column in zip(*rest, strict=True):
            if not merge.is_divided(column, batch.inputs.rows):
                raise PrepareError(
                    f"the model's output holds a tensor of shape {tuple(column[0].shape)} beside its loss, which "
                    "cannot be put together from micro-batches: use schedule='gpipe', or gather_output=False"
                )

    # -- a batch

    def forward(self, batch: Batch) -> Any:
        """Forward and backward of all micro-batches; the model's output, on every rank."""
        runner = self.runner
        # The share of a micro-batch is rounded to the seed's precision before it meets a loss in float64.
        dtype = torch.float32 if runner.wire.device.type == "mps" else torch.float64
        one = torch.ones((), dtype=dtype, device=runner.wire.device)
        seed = one if self.precision.scaler is None else self.precision.scaler.scale(one)
        step = self._step = Step(batch, seed)
        # What this batch gives takes its factor by itself; the window's other gradients have theirs.
        former = self.held.take()
        try:
            self._run(batch)
        finally:
            self._step = None
            step.gradients = self.held.take()
            self.held.add(former)
        if runner.wire.rank == runner.source:
            batch.output = self._output(step)
        batch.backward = lambda _, grads: self._apply(step, grads)
        return runner.hand_out(batch)

    def _run(self, batch: Batch) -> None:
        schedule, stages = self._schedule_of(batch)
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        count = len(batch.inputs.rows)

        def job(micro: int) -> Any:
            return lambda number, received: self._compute(number, micro, received)

        # The batch is divided already, by names.
        schedule._step_microbatches(
            [()] * count, [{"job": job(micro)} for micro in range(count)], list(range(count)), [], False
        )

    def _compute(self, number: int, micro: int, received: Sequence[torch.Tensor]) -> Any:
        """One micro-batch through one stage: what goes to the next, or the weighed loss."""
        step, runner = self._step, self.runner
        assert step is not None
        batch = step.batch
        inlet = batch.known.inlets.get((number, batch.inputs.rows[micro]))
        start, stop = runner.cut.bounds[number], runner.cut.bounds[number + 1]
        seen = inlet.seen if inlet is not None else {}
        part = Part(start, stop, seen=seen, leave=number != runner.last, grad=True)
        part.received = fill(inlet.output, received) if inlet is not None else None
        output = runner.staged.run(part, *batch.inputs.part(micro))
        if number != runner.last:
            # torch's stages send tensors as they are.
            return tuple(tensor.contiguous() for tensor in trees.leaves(output))
        loss = merge.loss_of(output)
        assert loss is not None
        step.outputs[micro] = [tensor.detach() for tensor in trees.leaves(runner._kept(output))]
        return loss * (step.seed * step.batch.weights[micro]).to(loss.dtype)

    def _output(self, step: Step) -> Any:
        """The output of the batch, on the last stage."""
        described = step.batch.known.output
        place = _place_of_loss(step.batch.known)
        count = len(step.batch.inputs.rows)
        columns = list(zip(*(step.outputs[micro] for micro in range(count)), strict=True))
        tensors = [
            torch.stack([w * part for w, part in zip(step.batch.weights, column, strict=True)]).sum(0)
            if number == place
            else torch.cat(column)
            for number, column in enumerate(columns)
        ]
        return fill(described, tensors)

    def _apply(self, step: Step, grads: list[torch.Tensor | None]) -> None:
        """The backward of the loop: the gradients that are there already take their factor."""
        place = _place_of_loss(step.batch.known)
        if any(grad is not None for number, grad in enumerate(grads) if number != place):
            raise AccelerateError(
                f"schedule={self.options.schedule!r} takes the gradient of the loss that the model returns, and this "
                "loop's loss uses more of its output: use schedule='gpipe'"
            )
        gradient = grads[place]
        if gradient is None:
            return
        multiply(list(step.gradients.values()), gradient / step.seed)
        self.held.add(step.gradients)
        step.gradients = {}

    # -- torch's objects

    def _schedule_of(self, batch: Batch) -> tuple[Any, list[Any]]:
        if batch.key not in self._built:
            if len(self._built) == _KEPT_SCHEDULES:
                self._built.pop(next(iter(self._built)))
            rows = batch.inputs.rows[0]
            known = batch.known
            loss = list(trees.leaves(known.output, is_spec))[_place_of_loss(known)]
            shapes = {}
            for stage in self.runner.stages:
                came, goes = known.inlets.get((stage, rows)), known.outlets.get((stage, rows))
                shapes[stage] = (_examples(came, ()), _examples(goes, (loss,)))
            self._built[batch.key] = self._schedule(shapes)
        return self._built[batch.key]

    def _schedule(self, shapes: dict[int, tuple[Any, Any]]) -> tuple[Any, list[Any]]:
        from torch.distributed.pipelining import PipelineStage, schedules

        from .early import EarlyReceive1F1B, has_independent_directions

        runner = self.runner
        stages = [
            PipelineStage(
                runner.stages[number],
                number,
                runner.cut.stages,
                runner.wire.device,
                input_args=came,
                output_args=goes,
                group=runner.wire.group,
            )
            for number, (came, goes) in sorted(shapes.items())
        ]
        for stage in stages:
            # Shards are reduced at the end of a window, by the backward of the loop.
            stage.perform_reduce_grad = _reduce_later  # type: ignore[method-assign]
        kind = getattr(schedules, str(self.kind))
        if kind is schedules.Schedule1F1B and has_independent_directions(runner.wire.group, runner.wire.device):
            kind = EarlyReceive1F1B
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        # The weights of the micro-batches are in their losses already.
        schedule = kind(
            stages if several else stages[0],
            n_microbatches=runner.divider.parts,
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )
        if several and len(stages) <= _KEPT_WHOLE:
            schedule.register_custom_function(schedules.RESHARD, _stay_whole)
        return schedule, stages


def _place_of_loss(known: Known) -> int:
    if known.place_of_loss is None:
        stand_ins = [spec.stand_in(torch.device("cpu")) for spec in trees.leaves(known.output, is_spec)]
        loss = merge.loss_of(fill(known.output, stand_ins))
        known.place_of_loss = next(number for number, tensor in enumerate(stand_ins) if tensor is loss)
    return known.place_of_loss


def _reduce_later(grad_scale_factor: int) -> None:
    """What torch's schedules call at the end of a batch."""


def _stay_whole(action: Any, context: Any) -> None:
    """At the end of a batch: a stage is gathered once a window, and given back where its gradients are reduced."""
    context.schedule_ref.unsharded_stages.discard(action.stage_index)


def _examples(boundary: Boundary | None, otherwise: tuple[Spec, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors without memory that say what travels."""
    specs = otherwise if boundary is None else boundary.specs
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad) for spec in specs
    )
