# SPDX-License-Identifier: Apache-2.0
"""Schedules that interleave forward and backward (torch's classes), for a model that returns its loss.

The first batch of its shapes runs in GPipe's order. It shows what is sent between the stages, and how the losses of
micro-batches make the loss of the batch. From the second one on, the backward runs inside the call of the model. Its
gradients are kept separately and take their factor (accumulation, loss scale, items) when the loop calls backward.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...config.parallel import PipelineParallelConfig
from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from ...core.imports import is_torch_version
from ...core.trees import first_leaf
from ...precision.base import Precision
from ..accumulated import AccumulatedGradients, Gradients
from ..gradients import multiply
from .microbatch import Batch, BatchKey, BatchShapes, MicroBatches, OutputGradients, is_batched, loss_of
from .p2p import TensorSpec, fill, specs_in
from .runner import Runner
from .stage import Segment

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

logger: logging.Logger = logging.getLogger(__name__)

_CACHED_SCHEDULES = 4
# torch keeps so many stages of a rank gathered at a time (2.13, `_add_unshard_reshard`). With no more stages than
# that, a stage is gathered once a window, and resharded where its gradients are reduced.
_GATHERED_STAGES = 3

# (inputs, outputs) of a stage, as tensors on meta.
Examples = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass
class ScheduledBatch:
    """A batch that a schedule runs.

    Fields:
        seed: what its losses are multiplied by, the loss scale. outputs: of the last stage, by micro-batch.
        gradients: of the batch, until the loop's backward.
    """

    batch: Batch
    seed: torch.Tensor
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=dict)


class ScheduleRunner:
    """Runs those batches of a pipelined model that its schedule can take; none with `schedule="gpipe"`."""

    def __init__(
        self, runner: Runner, options: PipelineParallelConfig, precision: Precision, accumulated: AccumulatedGradients
    ) -> None:
        self.runner = runner
        self.options = options
        self.precision = precision
        self.accumulated = accumulated
        self.rules: tuple[str, ...] = RULES
        self._started = self._has_warned = False
        self._running: ScheduledBatch | None = None
        self._built: dict[BatchKey, tuple[_PipelineSchedule, list[PipelineStage]]] = {}
        row = options.schedule_row
        self.implementation: str | None = row.implementation
        if self.implementation is None:
            return
        if is_torch_version("<", row.minimum_torch):
            raise PrepareError(
                f"schedule={options.schedule!r} needs torch {row.minimum_torch} or later, not {torch.__version__}, "
                "whose schedule of that name computes wrong gradients for some layers: use schedule='interleaved' or "
                "'1f1b'"
            )
        if row.gloo is not None and _is_gloo(runner.channel.group, runner.channel.device):
            self.implementation = row.gloo
        runner.find_loss_rules = self._find_rules
        try:
            self._build(dict.fromkeys(runner.stages, ((), ())))
        except ValueError as error:
            raise PrepareError(
                f"schedule={options.schedule!r} does not support num_microbatches={runner.splitter.num_microbatches} "
                f"on {runner.channel.size} ranks of {options.stages_per_rank} stages: {error}"
            ) from error

    # -- which batches

    def takes(self, batch: Batch) -> bool:
        """Whether the schedule runs a batch. Every rank of the pipeline comes to the same answer."""
        if self.implementation is None or not batch.grad or not self.runner.staged.model.training:
            return False
        count = self.runner.splitter.num_microbatches
        if batch.inputs.batch_size % count:
            if not self._started:
                raise PrepareError(
                    f"a batch of {batch.inputs.batch_size} samples is not divisible by num_microbatches={count}, "
                    f"which schedule={self.options.schedule!r} needs: change either number, or use schedule='gpipe'"
                )
            # The last batch of an epoch may be smaller: GPipe's order gives the same.
            return False
        self._started = True
        if batch.is_new or batch.shapes.loss_rules is None:
            return False
        first, *others = weights_by_rule(batch.inputs, self.rules).values()
        if all(abs(a - b) <= 1e-12 for row in others for a, b in zip(first, row, strict=True)):
            batch.loss_weights = first
            # The mean of a micro-batch without labels is not defined.
            return all(batch.loss_weights)
        # The remaining rules differ on this batch. It runs in GPipe's order, which shows the right one.
        batch.is_new, batch.shapes = True, BatchShapes()
        return False

    def learn(self, batch: Batch) -> None:
        """Keep the rules that applied to a new batch.

        Raises:
            PrepareError: on all ranks, where none did.
        """
        if self.implementation is None:
            return
        if batch.loss_rules is None:
            if self._has_warned or not self.runner.staged.model.training:
                return
            self._has_warned = True
            if dist.get_rank() == 0:
                logger.warning(
                    "schedule=%r needs a model that returns its loss. This one returns none in training, so batches "
                    "run in GPipe's order. Call the model with labels, or prepare a loss_fn.",
                    self.options.schedule,
                )
            return
        batch.shapes.loss_rules = batch.loss_rules
        self.rules = tuple(rule for rule in self.rules if rule in batch.loss_rules)
        if not self.rules:
            raise PrepareError(
                f"the model's loss over a batch does not follow from those of its micro-batches ({RULES} were "
                "tried): use schedule='gpipe', which takes any loss"
            )

    def _find_rules(self, batch: Batch, output: object, outputs: list[object]) -> list[str] | None:
        """The rules that hold for a new batch, on the last stage; None where the model returns no loss to train."""
        full, trained = loss_of(output), loss_of(batch.output)
        if full is None or trained is None or not trained.requires_grad:
            return None
        of_microbatches = [loss for output in outputs if (loss := loss_of(output)) is not None]
        rest = [[tensor for tensor in trees.leaves(output) if tensor is not loss_of(output)] for output in outputs]
        for column in zip(*rest, strict=True) if self.runner.gather else ():
            if not is_batched(column, batch.inputs.sizes):
                raise PrepareError(
                    f"the model's output has, in addition to its loss, a tensor of shape {tuple(column[0].shape)} "
                    "without a batch dimension, which cannot be merged from micro-batches: use schedule='gpipe', or "
                    "gather_output=False"
                )
        return matching_rules(full, of_microbatches, batch.inputs, self.precision.native_amp)

    # -- a batch

    def forward(self, batch: Batch) -> object:
        """Forward and backward of all micro-batches; the model's output, on every rank."""
        runner = self.runner
        # In float64, so that the weight of a micro-batch is not rounded before it meets a loss in float64.
        dtype = torch.float32 if runner.channel.device.type == "mps" else torch.float64
        one = torch.ones((), dtype=dtype, device=runner.channel.device)
        seed = one if self.precision.scaler is None else self.precision.scaler.scale(one)
        running = self._running = ScheduledBatch(batch, seed)
        # The other gradients of the window have their factor already.
        former = self.accumulated.take()
        try:
            self._run(batch)
        finally:
            self._running = None
            running.gradients = self.accumulated.take()
            self.accumulated.add(former)
        if runner.channel.rank == runner.source:
            batch.output = self._output(running)
        batch.backward = lambda _, grads: self._apply(running, grads)
        return runner.distribute_output(batch)

    def _run(self, batch: Batch) -> None:
        schedule, stages = self._schedule_for(batch)
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        count = len(batch.inputs.sizes)

        def job(micro: int) -> Callable[[int, Sequence[torch.Tensor]], object]:
            return lambda number, received: self._compute(number, micro, received)

        # `job` has the micro-batch's inputs, which are split by their names.
        schedule._step_microbatches(
            [()] * count, [{"job": job(micro)} for micro in range(count)], list(range(count)), [], False
        )

    def _compute(self, number: int, micro: int, received: Sequence[torch.Tensor]) -> object:
        """One micro-batch through one stage: what is sent to the next, or the weighted loss."""
        running, runner = self._running, self.runner
        assert running is not None
        batch = running.batch
        incoming = batch.shapes.stage_inputs.get((number, batch.inputs.sizes[micro]))
        start, stop = runner.cut.bounds[number], runner.cut.bounds[number + 1]
        unit_outputs = incoming.unit_outputs if incoming is not None else {}
        segment = Segment(start, stop, unit_outputs=unit_outputs, leave=number != runner.last, grad=True)
        segment.received = fill(incoming.output, received) if incoming is not None else None
        output = runner.staged.run(segment, *batch.inputs.microbatch(micro))
        if number != runner.last:
            # torch's stages send tensors as they are.
            return tuple(tensor.contiguous() for tensor in trees.leaves(output))
        loss = loss_of(output)
        assert loss is not None
        running.outputs[micro] = [tensor.detach() for tensor in trees.leaves(runner.returned(output))]
        return loss * (running.seed * batch.loss_weights[micro]).to(loss.dtype)

    def _output(self, running: ScheduledBatch) -> object:
        """The output of the batch, on the last stage."""
        batch = running.batch
        index = _loss_index(batch.shapes)
        columns = list(zip(*(running.outputs[micro] for micro in range(len(batch.inputs.sizes))), strict=True))
        tensors = [
            torch.stack([w * loss for w, loss in zip(batch.loss_weights, column, strict=True)]).sum(0)
            if number == index
            else torch.cat(column)
            for number, column in enumerate(columns)
        ]
        return fill(batch.shapes.output, tensors)

    def _apply(self, running: ScheduledBatch, grads: OutputGradients) -> None:
        """The loop's backward: multiply the gradients that were computed by the gradient of the loss."""
        index = _loss_index(running.batch.shapes)
        if any(grad is not None for number, grad in enumerate(grads) if number != index):
            raise AccelerateError(
                f"schedule={self.options.schedule!r} computes the gradient of the loss that the model returns, and "
                "the loss of this loop uses other tensors of its output: use schedule='gpipe'"
            )
        gradient = grads[index]
        if gradient is None:
            return
        multiply(list(running.gradients.values()), gradient / running.seed)
        self.accumulated.add(running.gradients)
        running.gradients = {}

    # -- torch's objects

    def _schedule_for(self, batch: Batch) -> tuple[_PipelineSchedule, list[PipelineStage]]:
        if batch.key not in self._built:
            if len(self._built) == _CACHED_SCHEDULES:
                self._built.pop(next(iter(self._built)))
            size, shapes = batch.inputs.sizes[0], batch.shapes
            loss = specs_in(shapes.output)[_loss_index(shapes)]
            examples = {}
            for stage in self.runner.stages:
                incoming, outgoing = shapes.stage_inputs.get((stage, size)), shapes.stage_outputs.get((stage, size))
                examples[stage] = (
                    _on_meta(() if incoming is None else incoming.specs),
                    _on_meta((loss,) if outgoing is None else outgoing.specs),
                )
            self._built[batch.key] = self._build(examples)
        return self._built[batch.key]

    def _build(self, examples: Mapping[int, Examples]) -> tuple[_PipelineSchedule, list[PipelineStage]]:
        from torch.distributed.pipelining import PipelineStage, schedules

        runner = self.runner
        stages = [
            PipelineStage(
                runner.stages[number],
                number,
                runner.cut.stages,
                runner.channel.device,
                input_args=inputs,
                output_args=outputs,
                group=runner.channel.group,
            )
            for number, (inputs, outputs) in sorted(examples.items())
        ]
        for stage in stages:
            # Gradients are reduced at the end of a window, by the loop's backward.
            stage.perform_reduce_grad = lambda grad_scale_factor: None  # type: ignore[method-assign]
        kind = pkgutil.resolve_name(str(self.implementation))
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        # The losses are weighted already.
        schedule = kind(
            stages if several else stages[0],
            n_microbatches=runner.splitter.num_microbatches,
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )
        if several and len(stages) <= _GATHERED_STAGES:
            schedule.register_custom_function(schedules.RESHARD, _reshard_later)
        return schedule, stages


def _loss_index(shapes: BatchShapes) -> int:
    """Which tensor of the model's output is the loss."""
    if shapes.loss_index is None:
        tensors = _on_meta(specs_in(shapes.output))
        loss = loss_of(fill(shapes.output, tensors))
        shapes.loss_index = next(number for number, tensor in enumerate(tensors) if tensor is loss)
    return shapes.loss_index


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return str(group._get_backend(device).name()) == "gloo"


def _reshard_later(action: Any, context: Any) -> None:
    """In place of resharding a stage at the end of a batch."""
    context.schedule_ref.unsharded_stages.discard(action.stage_index)


def _on_meta(specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad) for spec in specs
    )


# Names of inputs with the labels of samples or tokens, and the label that does not count.
_LABELS = ("labels", "label", "targets", "target")
_IGNORED = -100
RULES = ("samples", "sum", "labels", "next labels")

# Relative differences of the loss that micro-batches may cause by computing in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def weights_by_rule(inputs: MicroBatches, rules: Sequence[str]) -> dict[str, list[float]]:
    """Rule -> the weight of each micro-batch, for the rules that the inputs allow.

    A loss may be a mean over samples, over labels that count, over labels shifted by one, or a sum. Those rules hold
    whose weighted sum is the loss of the batch.
    """
    found: dict[str, list[float]] = {}
    for rule in rules:
        if rule == "samples":
            found[rule] = [size / inputs.batch_size for size in inputs.sizes]
        elif rule == "sum":
            found[rule] = [1.0] * len(inputs.sizes)
        elif (labels := _labels(inputs)) is not None:
            counted = labels[:, 1:] if rule == "next labels" and labels.dim() > 1 else labels
            # One synchronization with the device for all samples.
            each = (counted != _IGNORED).reshape(inputs.batch_size, -1).sum(dim=1).tolist()
            slices = zip(inputs.offsets, inputs.sizes, strict=True)
            counts = [sum(each[start : start + size]) for start, size in slices]
            total = sum(counts)
            found[rule] = [count / total if total else 0.0 for count in counts]
    return found


def _labels(inputs: MicroBatches) -> torch.Tensor | None:
    given = {**dict(zip(inputs.names, inputs.args, strict=False)), **inputs.kwargs}
    named = next((given[name] for name in _LABELS if given.get(name) is not None), None)
    labels: torch.Tensor | None = first_leaf(named)
    if labels is None or labels.dtype.is_floating_point or not labels.dim() or labels.shape[0] != inputs.batch_size:
        return None
    return labels


def matching_rules(
    batch_loss: torch.Tensor, microbatch_losses: Sequence[torch.Tensor], inputs: MicroBatches, low_precision: bool
) -> list[str]:
    """The rules by which the losses of micro-batches make that of the batch; empty where none does."""
    weights = weights_by_rule(inputs, RULES)
    loss = float(batch_loss.detach())
    values = [float(part.detach()) for part in microbatch_losses]
    residuals = {
        rule: abs(sum(weight * value for weight, value in zip(row, values, strict=True) if weight) - loss)
        for rule, row in weights.items()
    }
    least = min(residuals.values())
    tolerance = 2e-2 if low_precision else _TOLERANCE.get(batch_loss.dtype, 2e-2)
    if not least <= tolerance * max(abs(loss), 1e-3):
        return []
    rounding = 64 * torch.finfo(batch_loss.dtype).eps * max(abs(loss), 1e-3)
    return [rule for rule, residual in residuals.items() if residual <= max(8 * least, rounding)]
