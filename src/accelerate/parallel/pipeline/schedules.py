# SPDX-License-Identifier: Apache-2.0
"""Schedules that interleave forward and backward (torch's classes), for a model that returns its loss.

The backward runs inside the call of the model. Its gradients are kept separately and take their factor (accumulation,
loss scale, items) when the loop calls backward.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config.parallel import PipelineParallelConfig
from ...core import trees
from ...core.errors import AccelerateError, PrepareError
from ...precision.base import Precision
from ...torch_internals.pipelining import reshard_late
from ..accumulated import AccumulatedGradients
from ..gradients import multiply
from .microbatch import Args, Kwargs, MicroBatches, loss_of, resize
from .p2p import TensorSpec, specs_in
from .runner import Batch, BatchKey, BatchShapes, OutputGradients, Runner

_CACHED_SCHEDULES = 4
# torch keeps so many stages of a rank gathered at a time (2.13, `_add_unshard_reshard`). With no more stages than
# that, a stage is gathered once a window, and resharded where its gradients are reduced.
_GATHERED_STAGES = 3

# (inputs, outputs) of a stage, as tensors on meta.
Examples = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass(eq=False)
class ScheduledRunner(Runner):
    """Runs the training batches of a pipelined model in the order of a schedule of torch, and others in GPipe's."""

    options: PipelineParallelConfig
    precision: Precision
    accumulated: AccumulatedGradients

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.options
        self._started = False
        self._built: dict[BatchKey, Any] = {}
        if options.schedule_row.implementation is None:
            return
        # torch refuses a number of micro-batches that does not fit.
        self._build(dict.fromkeys(self.stages, ((), ())))

    def new_batch(self, args: Args, kwargs: Kwargs) -> Batch:
        """The batch of a call. It has weights of its micro-batches' losses if it is run in the schedule.

        Others run in GPipe's order: batches without a backward, the last batch of an epoch if it cannot be divided
        evenly, and batches of which a micro-batch has no items. Every rank of the pipeline comes to the same answer.
        """
        batch = super().new_batch(args, kwargs)
        has_schedule = self.options.schedule_row.implementation is not None
        if has_schedule and batch.key.grad and batch.key.training:
            batch.weights = self._weights(batch.inputs)
            batch.key = batch.key._replace(scheduled=bool(batch.weights))
        return batch

    def _weights(self, inputs: MicroBatches) -> list[float]:
        count = self.splitter.num_microbatches
        if inputs.batch_size % count:
            if not self._started:
                raise PrepareError(
                    f"a batch of {inputs.batch_size} samples is not divisible by "
                    f"num_microbatches={count}, as schedule={self.options.schedule!r} requires: "
                    "change one of the numbers, or use schedule='gpipe'"
                )
            return []
        self._started = True
        if self.options.num_items is not None:
            items = []
            for micro in range(count):
                args, kwargs = inputs.microbatch(micro)
                items.append(float(self.options.num_items(*args, **kwargs)))
            if not all(items):
                return []
            return [number / sum(items) for number in items]
        if self.options.loss_reduction == "sum":
            return [1.0] * count
        return [1 / count] * count

    def forward(self, batch: Batch, on_all_ranks: bool = True) -> object:
        """The model's output, on every rank. In a schedule the backward is computed too."""
        if not batch.weights:
            return super().forward(batch, on_all_ranks)
        if not batch.shapes.is_complete:
            self._complete(batch.shapes, batch.inputs)
        # In float64, so that the weight of a micro-batch is not rounded before it meets a loss in float64.
        dtype = torch.float64
        if self.channel.device.type == "mps":
            dtype = torch.float32
        batch.seed = torch.ones((), dtype=dtype, device=self.channel.device)
        if self.precision.scaler is not None:
            batch.seed = self.precision.scaler.scale(batch.seed)
        for number, stage in self.stages.items():
            # A stage computes micro-batches in their order.
            in_order = iter(range(len(batch.weights)))
            stage.compute = functools.partial(self._compute, batch, number, in_order)
        schedule = self._schedule_for(batch)
        # The other gradients of the window have their factor already.
        former = self.accumulated.take()
        try:
            # Stages split the inputs themselves; the target of a micro-batch is not used.
            schedule.step(target=torch.arange(len(batch.weights)), return_outputs=False)
        finally:
            self.staged.show(None)
            batch.gradients = self.accumulated.take()
            self.accumulated.add(former)
        self.staged.buffers.commit()
        if self.channel.rank == self.source:
            for number, column in enumerate(zip(*batch.outputs, strict=True)):
                if number == batch.shapes.loss_index:
                    weighted = map(torch.mul, column, batch.weights)
                    batch.returned.append(torch.stack(list(weighted)).sum(0))
                else:
                    batch.returned.append(torch.cat(column))
        batch.outputs = []
        batch.backward = self._apply
        return self.distribute_output(batch)

    def _complete(self, shapes: BatchShapes, inputs: MicroBatches) -> None:
        """The output of the complete batch follows from that of a micro-batch."""
        specs, index, size = specs_in(shapes.output), shapes.loss_index, inputs.sizes[0]
        if index is None or not specs[index].requires_grad:
            raise PrepareError(
                f"schedule={self.options.schedule!r} runs the backward pass of each micro-batch's "
                "loss, but the model does not return a loss in training: call it with labels, "
                "prepare it with a loss_fn, or use schedule='gpipe'"
            )
        for number, spec in enumerate(specs):
            if number != index and spec.shape[:1] != (size,):
                raise PrepareError(
                    f"the model's output has, in addition to its loss, a tensor of shape {spec.shape} without a batch "
                    "dimension, which cannot be merged from micro-batches: use schedule='gpipe', or "
                    "gather_output=False"
                )
        shapes.output = resize(shapes.output, size, inputs.batch_size)
        shapes.is_complete = True

    def _compute(
        self,
        batch: Batch,
        number: int,
        micro_batches: Iterator[int],
        received: Sequence[torch.Tensor],
    ) -> object:
        """The next micro-batch through one stage: what is sent to the next, or the weighted loss."""
        micro = next(micro_batches)
        args, kwargs = batch.inputs.microbatch(micro)
        segment = self.segment(number, batch.inputs.sizes[micro], batch)
        with self.staged.buffers.micro_batch(number):
            output = self.staged.run(segment, args, kwargs, received)
        if number != self.last:
            # torch's stages send tensors as they are.
            return tuple(tensor.contiguous() for tensor in trees.leaves(output))
        loss = loss_of(output)
        assert loss is not None
        returned = trees.leaves(self.returned(output))
        batch.outputs.append([tensor.detach() for tensor in returned])
        assert batch.seed is not None
        return loss * (batch.seed * batch.weights[micro]).to(loss.dtype)

    def _apply(self, batch: Batch, grads: OutputGradients) -> None:
        """The loop's backward: multiply the gradients that were computed by the gradient of the loss."""
        index = batch.shapes.loss_index
        if any(grad is not None for number, grad in enumerate(grads) if number != index):
            raise AccelerateError(
                f"schedule={self.options.schedule!r} computes the gradient of the loss that the "
                "model returns, but the loss of this loop uses other tensors of its output: use "
                "schedule='gpipe'"
            )
        assert index is not None and batch.seed is not None
        gradient = grads[index]
        if gradient is None:
            return
        if self.channel.has_values:
            multiply(list(batch.gradients.values()), gradient / batch.seed)
        self.accumulated.add(batch.gradients)
        batch.gradients = {}

    # -- torch's objects

    def _schedule_for(self, batch: Batch) -> Any:
        if batch.key not in self._built:
            if len(self._built) == _CACHED_SCHEDULES:
                self._built.pop(next(iter(self._built)))
            size, shapes = batch.inputs.sizes[0], batch.shapes
            assert shapes.loss_index is not None
            loss = specs_in(shapes.output)[shapes.loss_index]
            examples = {}
            for stage in self.stages:
                incoming = shapes.specs.get((stage - 1, size), [])
                outgoing = shapes.specs.get((stage, size), [loss])
                examples[stage] = _on_meta(incoming), _on_meta(outgoing)
            self._built[batch.key] = self._build(examples)
        return self._built[batch.key]

    def _build(self, examples: Mapping[int, Examples]) -> Any:
        # It takes long to import.
        from torch.distributed.pipelining import PipelineStage, schedules

        class LaterReduction(PipelineStage):
            """Gradients are reduced at the end of a window, by the loop's backward."""

            def perform_reduce_grad(self, grad_scale_factor: int) -> None:
                pass

        stages = [
            LaterReduction(
                self.stages[number],
                number,
                self.cut.stages,
                self.channel.device,
                input_args=inputs,
                output_args=outputs,
                group=self.channel.group,
            )
            for number, (inputs, outputs) in sorted(examples.items())
        ]
        kind = pkgutil.resolve_name(str(self.options.schedule_row.implementation))
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        # The losses are weighted already.
        schedule = kind(
            stages if several else stages[0],
            n_microbatches=self.splitter.num_microbatches,
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )
        if several and len(stages) <= _GATHERED_STAGES:
            reshard_late(schedule)
        return schedule


def reduction_of(number: int, stage: torch.nn.Module, runner: Runner) -> Callable[[int], None]:
    """A call that reduces the gradients that FSDP2 has accumulated for a stage, as torch's schedules do."""
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(
        stage, number, runner.cut.stages, runner.channel.device, group=runner.channel.group
    ).perform_reduce_grad


def _on_meta(specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)
        for spec in specs
    )
