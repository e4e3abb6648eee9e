# SPDX-License-Identifier: Apache-2.0
"""A copy of this rank's stages on fake tensors, to trace what its step needs: nothing is sent, nothing is received.

It runs in GPipe's order. With the schedule 1f1b, a step has the peak of GPipe's order on as many micro-batches as this
rank keeps at a time, when there are gradients already. What the stages pass to each other is known from an earlier
batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from unittest import mock

import torch
from torch import nn

from ...core import trees
from ...core.errors import PrepareError
from ..fsdp.traced import fake_sharded_copy
from ..prepared import Change
from .microbatch import Batch, BatchShapes, Boundary, resize, resized
from .model import Stages, defer_reduction
from .remote_tensor import RemoteTensor
from .runner import Runner
from .stage import Args, Kwargs

_TRACED = ("gpipe", "1f1b")


def changes(stages: Stages) -> dict[Change, str]:
    """The changes that a trace can try, with what they are called."""
    if stages.schedules.options.schedule == "gpipe":
        return {Change(scheduled=True): "schedule 1f1b (the model has to return its loss)"}
    count = 2 * stages.schedules.runner.splitter.num_microbatches
    return {Change(microbatches=True): f"num_microbatches={count}"}


def fake_stages(model: nn.Module, stages: Stages, change: Change) -> nn.Module:
    """The copy of the model, with the change. Call it in a fake mode.

    Raises:
        PrepareError: the schedule has another order, or no batch has shown yet what stages pass to each other.
    """
    runner, schedule = stages.schedules.runner, stages.schedules.options.schedule
    if schedule not in _TRACED:
        raise PrepareError(f"schedule {schedule} keeps other activations than GPipe's order and 1f1b")
    known = next((shapes for key, shapes in runner.shapes.items() if key.training and key.grad), None)
    if known is None:
        raise PrepareError("no batch has shown yet what the stages pass to each other")
    channel = copy.copy(runner.channel)
    channel.device, channel._pending = torch.device("cpu"), []
    staged, memo = runner.staged, dict[int, object]({id(runner.channel): channel})
    for module in model.modules():
        memo |= {id(value): value for value in vars(module).values() if isinstance(value, RemoteTensor)}
    # What refers to the run, and what an error may have left.
    memo |= {id(one): None for one in (runner.find_loss_rules, staged.segment, staged.entry, staged.remedy) if one}
    memo |= {id(runner.before_backward): [], id(runner.after_backward): []}
    memo[id(runner.anchor)] = torch.zeros((), requires_grad=True)
    with mock.patch.dict(vars(model)):
        # A user's copy would compute with the stages of the original.
        vars(model).pop("__deepcopy__", None)
        fake_sharded_copy(nn.ModuleList([*stages.modules.values(), model]), change, (), memo)
        copied: Runner = copy.deepcopy(runner, memo)
    copied.staged.device = channel.device
    copied.before_backward.append(functools.partial(defer_reduction, copied.stages.values()))
    scheduled = change.scheduled or schedule == "1f1b"
    count = runner.splitter.num_microbatches
    size = max(size for _, size in (known.stage_inputs or known.stage_outputs))
    microbatches = count * (1 + change.microbatches)
    ahead = copied.channel.size - copied.channel.rank

    def call(args: Args, kwargs: Kwargs) -> object:
        copied.splitter.num_microbatches = microbatches
        batch = copied.new_batch(args, kwargs)
        if scheduled and ahead < len(batch.inputs.sizes):
            # This rank keeps only some micro-batches at a time.
            kept, total = sum(batch.inputs.sizes[:ahead]), batch.inputs.batch_size

            def first(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.narrow(0, 0, kept) if tensor.dim() and tensor.shape[0] == total else tensor

            copied.splitter.num_microbatches = ahead
            args, kwargs = trees.map_leaves(first, (args, kwargs))
            batch = copied.new_batch(args, kwargs)
        if batch.is_new:
            _describe(batch, known, size, count * size)
        return copied.forward(batch)

    copied.staged.entry = call
    return copied.staged.model


def _describe(batch: Batch, known: BatchShapes, former: int, batch_size: int) -> None:
    """Give a batch of other sizes the shapes that follow from known ones, with `former` samples in a micro-batch."""
    batch.is_new, found = False, batch.shapes
    for size in set(batch.inputs.sizes):
        found.stage_inputs |= _boundaries(known.stage_inputs, former, size)
        found.stage_outputs |= _boundaries(known.stage_outputs, former, size)
    found.tail, found.loss_index = known.tail, known.loss_index
    found.output = resized(known.output, batch_size, batch.inputs.batch_size)


def _boundaries(known: Mapping[tuple[int, int], Boundary], former: int, size: int) -> dict[tuple[int, int], Boundary]:
    return {
        (stage, size): Boundary(resized(boundary.output, former, size), resize(boundary.unit_outputs, former, size))
        for (stage, samples), boundary in known.items()
        if samples == former
    }
