# SPDX-License-Identifier: Apache-2.0
"""Traced mixtures whose experts transformers shards over ranks, against ranks that load and train one."""

import pytest
import torch
from packages import package

from accelerate import Accelerator
from accelerate.planning import experts, layouts, trace
from accelerate.planning.ledger import Ledger, Work
from accelerate.planning.model import fake_batch, loss_of, parse_batch

transformers = package("transformers")

PRELOADED = ("transformers.models.mixtral.modeling_mixtral",)
BATCH = parse_batch("8x16")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip


def build():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))


def real_step(layout, folder):
    """(messages of the second step, bytes of this rank's parameters) of a model that transformers shards."""
    accelerator = Accelerator(cpu=True)
    config = transformers.distributed.DistributedConfig(**dict(layout.loading))
    model = transformers.MixtralForCausalLM.from_pretrained(
        folder, distributed_config=config
    ).train()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.strategy.data_shard[0])
    shapes = fake_batch(model, BATCH.of_rank(layout))
    inputs = {
        name: torch.randint_like(shape, SIZES["vocab_size"]) for name, shape in shapes.items()
    }
    with Ledger() as ledger:
        for _ in range(2):
            ledger.work = Work()
            accelerator.backward(loss_of(model(**inputs)))
            optimizer.step()
            optimizer.zero_grad()
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return ledger.work.messages, sum(one.numel() * one.element_size() for one in local)


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        ("ep2+fsdp2", 2),
        *(
            pytest.param(name, nproc, marks=pytest.mark.thorough)
            for name, nproc in (
                ("ep2+tp2", 2),
                ("ep2+fsdp4", 4),
                ("ep4+fsdp4", 4),
                ("ep2+tp2+fsdp2", 4),
            )
        ),
    ],
)
def test_ranks_keep_and_send_what_is_planned(name, nproc, ranks, tmp_path):
    """The numbers of messages and the bytes of parameters are equal; how many tokens are exchanged varies."""
    build().save_pretrained(tmp_path)
    with torch.device("meta"):
        training = trace.PlannedTraining(build(), BATCH)
    layout = {each.name: each for each in layouts.expert_candidates(nproc)}[name]
    ((_, step),) = trace.trace_all(training, [layout])
    assert step.failure is None and 0 < step.uneven < 0.2
    buffers = sum(one.nbytes for one in training.model.buffers())
    for messages, parameters in ranks(nproc).run(real_step, layout, tmp_path):
        planned = dict(step.work[1].messages)
        assert step.memory["weights"] == parameters + buffers
        (exchange,) = (kind for kind in messages if kind[0] == "all-to-all")
        (number, sent), (expected, size) = messages.pop(exchange), planned.pop(exchange)
        assert number == expected and sent == pytest.approx(size, rel=0.5)
        assert messages == planned


def test_groups_of_other_ranks_follow_from_those_of_the_first():
    """Of the dimensions of a mesh of 2 x 3 x 2 ranks."""
    mesh = torch.arange(12).reshape(2, 3, 2)
    for dimension in range(3):
        groups = mesh.movedim(dimension, -1).reshape(-1, mesh.shape[dimension]).tolist()
        for group in groups:
            for rank in group:
                assert experts._group_of(rank, tuple(groups[0])) == tuple(group)


def test_a_described_plan_says_how_experts_are_started():
    layout = {each.name: each for each in layouts.expert_candidates(4)}["ep2+tp2+fsdp2"]
    assert layout.distributed_config == "DistributedConfig(fsdp_size=2, tp_size=2, ep_size=2)"
    assert (layout.data_ranks, layout.replicated) == (2, False)
    with torch.device("meta"):
        assert experts.has_experts(build()) and not experts.has_experts(torch.nn.Linear(1, 1))
