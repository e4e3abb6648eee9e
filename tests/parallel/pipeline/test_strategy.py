# SPDX-License-Identifier: Apache-2.0
"""An unchanged loop over a pipelined model, alone and composed, against the plain loop in float64, to 1e-8."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import cases
from counting import Messages
from layouts import units_of
from pipelines import (
    GLOBAL_BATCH,
    accelerator,
    batches,
    check_run,
    counted,
    loss_of,
    of_transformers,
    own,
    refused,
    runs_in_schedule,
    tied,
    train,
)  # fmt: skip
from rank_pool import on_ranks
from states import all_ranks
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, schedules

from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.enums import PIPELINE_SCHEDULES
from accelerate.core.imports import is_torch_version
from accelerate.state import PartialState
from accelerate.torch_internals.fsdp2 import shard_groups

PRELOADED = ("transformers.models.llama.modeling_llama",)
pytestmark = pytest.mark.usefixtures("float64")
# Before 2.13 torch's own schedules that take the gradients of weights apart are wrong for some layers, and refused.
SPLIT_BACKWARD = tuple(
    name
    for name, row in PIPELINE_SCHEDULES.items()
    if row.splits_backward and is_torch_version(">=", row.minimum_torch)
)
INSIDE = {"inside": True, "padded": True, "steps": 4}
HALF, EARLY = (
    Options(num_microbatches=2),
    Options(schedule="1f1b", num_microbatches=2, num_items=counted),
)
# Its loss leaves the first label of each sample out.
SHIFTED = dataclasses.replace(
    EARLY, num_items=lambda tokens, labels: counted(tokens, labels[:, 1:])
)
UNITS = units_of("Block")

# The model, the pipeline, the rest of the run; the loss inside of the model goes through a schedule.
TWO = {
    "gpipe": (own, Options(num_microbatches=4), {}),
    "1f1b": (
        own,
        Options(schedule="1f1b", num_microbatches=4, loss_reduction="mean"),
        {"inside": True},
    ),
    "1f1b, padded": (own, Options(schedule="1f1b", num_microbatches=4, num_items=counted), INSIDE),
    "interleaved, padded": (
        own,
        Options(schedule="interleaved", num_microbatches=4, num_items=counted),
        INSIDE,
    ),
    **{
        f"{name}, padded": (
            own,
            Options(schedule=name, num_microbatches=4, num_items=counted),
            INSIDE,
        )
        for name in SPLIT_BACKWARD
    },
    "transformers": (of_transformers, Options(num_microbatches=3), {"steps": 4}),
    # Its loss is in float32, whatever the model is in.
    "transformers, 1f1b": (of_transformers, SHIFTED, {**INSIDE, "tolerance": 1e-4}),
}


@on_ranks(2)
@pytest.mark.parametrize(
    "what", cases(TWO, thorough=["1f1b", "interleaved, padded", "transformers, 1f1b"])
)
def test_two_stages(what):
    PartialState(cpu=True)
    make, options, others = TWO[what]
    run, model, *_ = check_run(make, options, pp_size=2, **others)
    if others.get("inside"):
        runs_in_schedule(run, model, Schedule1F1B if what == "1f1b" else None)


@pytest.mark.skipif(not SPLIT_BACKWARD, reason="torch before 2.13 computes wrong gradients")
@on_ranks(2)
def test_a_schedule_is_one_row():
    """torch's DualPipeV, which the table does not have."""
    PartialState(cpu=True)
    row = PIPELINE_SCHEDULES["zbv"]._replace(
        implementation=f"{schedules.__name__}:ScheduleDualPipeV"
    )
    with mock.patch.dict(PIPELINE_SCHEDULES, {"dual_pipe_v": row}):
        options = Options(schedule="dual_pipe_v", num_microbatches=8, loss_reduction="mean")
        run, model, *_ = check_run(own, options, inside=True, steps=4, pp_size=2)
        runs_in_schedule(run, model, schedules.ScheduleDualPipeV)


@pytest.mark.skipif(bool(SPLIT_BACKWARD), reason="this torch has them right")
@on_ranks(2)
def test_schedules_that_split_the_backward_are_refused_before_torch_2_13():
    PartialState(cpu=True)
    refused(
        own,
        Options(schedule="zero_bubble", num_microbatches=4, loss_reduction="mean"),
        "needs a torch version later",
    )


FOUR = {
    "pp=4, tied": (tied, Options(num_microbatches=4), {"pp_size": 4}),
    "dp": (own, HALF, {"dp_replicate_size": 2}),
    "dp, tied": (tied, HALF, {"dp_replicate_size": 2, "steps": 4}),
    "fsdp": (own, HALF, {"dp_shard_size": 2, "plugin": UNITS}),
    "fsdp, tied": (tied, HALF, {"dp_shard_size": 2, "plugin": UNITS, "steps": 4}),
    "fsdp, recomputed": (
        own, HALF,
        {"dp_shard_size": 2, "plugin": dataclasses.replace(UNITS, activation_checkpointing=True), "steps": 2},
    ),
    "fsdp, some modules whole": (
        own, HALF,
        {"dp_shard_size": 2, "plugin": dataclasses.replace(UNITS, ignored_modules="layers.[12].mlp"), "steps": 3},
    ),
    "tp": (own, HALF, {"tp_size": 2}),
    "tp, 1f1b": (own, EARLY, {"tp_size": 2, "steps": 3, "inside": True}),
    # Both ends of the model on one rank, in two stages.
    **{
        f"fsdp, {name}, tied": (
            tied, Options(schedule=name, num_microbatches=4, num_items=counted),
            {"dp_shard_size": 2, "plugin": UNITS, "steps": 3, "inside": True},
        )
        for name in SPLIT_BACKWARD[1:]
    },
    "dp, 1f1b, tied": (tied, EARLY, {"dp_replicate_size": 2, "steps": 3, "inside": True}),
}  # fmt: skip


@on_ranks(4)
@pytest.mark.parametrize(
    "what",
    cases(
        FOUR,
        thorough=[
            "dp, tied",
            "fsdp",
            "fsdp, recomputed",
            "fsdp, some modules whole",
            "tp",
            "dp, 1f1b, tied",
        ],
    ),
)
def test_composed(what):
    PartialState(cpu=True)
    make, options, others = FOUR[what]
    check_run(make, options, **{"pp_size": 2, **others})


@on_ranks(4)
@pytest.mark.parametrize(
    "schedule",
    cases(
        ["1f1b", "looped_bfs", "interleaved", *SPLIT_BACKWARD],
        thorough=["1f1b", "looped_bfs", "interleaved", "zbv"],
    ),
)
def test_schedules_with_fsdp(schedule):
    """A window gathers and reduces each unit of FSDP once, however many batches it has."""
    PartialState(cpu=True)
    options = Options(
        schedule=schedule, num_microbatches=4 if schedule == "zbv" else 2, loss_reduction="mean"
    )
    run, model, *_ = check_run(
        own, options, 3, inside=True, plugin=UNITS, pp_size=2, dp_shard_size=2
    )
    runs_in_schedule(run, model)
    stages = run.prepared_model(model).stages.modules.values()
    groups = sum(1 for stage in stages for _ in shard_groups(stage))
    with Messages() as sent:
        for number, (tokens, labels) in enumerate(batches(2, False)):
            with contextlib.nullcontext() if number == 3 else run.no_sync(model):
                run.backward(loss_of(model, tokens[:4], labels[:4], True))
    for kind in ("reduce_scatter", "allgather"):
        found = sum(number for name, (number, _) in sent.counts.items() if kind in name)
        assert found == groups > 0, (
            f"{found} of {kind} in a window, for {groups} units: {sent.counts}"
        )


@on_ranks(4)
def test_items():
    """Means over unequal numbers of tokens on two copies: the mean over all of them."""
    PartialState(cpu=True)
    tokens, labels = next(iter(batches(1, True)))
    plain = own()
    nn.functional.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten()).backward()
    run = accelerator(Options(num_microbatches=2), pp_size=2, dp_replicate_size=2)
    model = run.prepare(own(dist.get_rank()))
    index, _ = run.strategy.data_shard
    half = slice(4 * index, 4 * index + 4)
    loss = nn.functional.cross_entropy(model(tokens[half]).flatten(0, 1), labels[half].flatten())
    run.backward(loss, num_items=(labels[half] != -100).sum())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-12
        )


@on_ranks(4)
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        pytest.param(HALF, {"dp_shard_size": 2}, id="fsdp"),
        pytest.param(EARLY, {"dp_shard_size": 2}, id="fsdp, 1f1b", marks=pytest.mark.thorough),
        pytest.param(EARLY, {"tp_size": 2}, id="tp, 1f1b"),
        pytest.param(HALF, {"dp_replicate_size": 2}, id="dp"),
    ],
)
def test_lowered(options, sizes):
    """bf16 trains: the loss falls from where it is in fp32, and is one number on all ranks of a pipeline."""
    PartialState(cpu=True)
    plugin = UNITS if "dp_shard_size" in sizes else None
    run = accelerator(options, plugin, precision="bf16", pp_size=2, **sizes)
    model = own().float()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    _, losses = train(model, optimizer, run, 4, True, False)
    found = all_ranks((run.strategy.data_shard, losses))
    assert len({str(row) for row in found}) == run.strategy.data_shard[1], found
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in model.parameters()), (
        losses
    )
    tokens, labels = next(iter(batches(1, False)))
    index, count = run.strategy.data_shard
    part = slice(index * GLOBAL_BATCH // count, (index + 1) * GLOBAL_BATCH // count)
    exact = loss_of(own().float(), tokens[part], labels[part], True).item()
    assert 0 < abs(losses[0] - exact) < 0.03, (
        f"{sizes}: a first loss of {losses[0]} in bf16, {exact} in fp32"
    )
