# SPDX-License-Identifier: Apache-2.0
"""Two stages, one process, then two stages of two copies: each goes on from the state of the one before."""

import pytest
import torch
import torch.distributed as dist
from layouts import compare
from pipelines import ACCUMULATION, CLIP, GLOBAL_BATCH, accelerator, batches, loss_of, own, tied
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.errors import CheckpointError
from accelerate.state import PartialState

LAYOUTS = {2: {"pp_size": 2}, 4: {"pp_size": 2, "dp_replicate_size": 2}}
STEPS = 2
pytestmark = pytest.mark.usefixtures("float64")


def optimizer_of(model):
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    rest = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    return torch.optim.AdamW([{"params": norms, "lr": 0.02}, {"params": rest}], lr=0.01)


def train(model, optimizer, run, shard):
    index, count = shard
    rows = slice(index * GLOBAL_BATCH // count, (index + 1) * GLOBAL_BATCH // count)
    for number, (tokens, labels) in enumerate(batches(STEPS, False)):
        loss = loss_of(model, tokens[rows], labels[rows], False)
        if run is None:
            (loss / ACCUMULATION).backward()
            if number % ACCUMULATION:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            continue
        with run.accumulate(model):
            run.backward(loss)
            if run.sync_gradients:
                run.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def test_a_checkpoint_goes_on_in_other_layouts(ranks, tmp_path):
    for nproc in (2, 1, 4):
        ranks(nproc).run(go_on, tmp_path)


def go_on(folder):
    """Load what the layout before saved, train two steps, compare with the plain loop, save for the next."""
    world = PartialState(cpu=True).num_processes
    rounds = {2: 1, 1: 2, 4: 3}[world]
    if world == 1:
        run = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    else:
        run = accelerator(Options(num_microbatches=2), **LAYOUTS[world])
    # Only the first run begins with the plain loop's weights; the others have them from the checkpoint.
    model = tied(0 if rounds == 1 else 7)
    optimizer = optimizer_of(model)
    model, optimizer = run.prepare(model, optimizer)
    if rounds > 1:
        run.load_state(folder / f"state_{rounds - 1}")
    train(model, optimizer, run, run.strategy.data_shard)
    run.save_state(folder / f"state_{rounds}")
    plain = tied(0)
    reference = optimizer_of(plain)
    for _ in range(rounds):
        train(plain, reference, None, (0, 1))
    if world == 1:
        compare(model.state_dict(), plain.state_dict())
    else:
        compare(run.prepared_model(model).state_dict(), plain.state_dict())
        found, wanted = (
            run.prepared_model(model).prepared_optimizer(optimizer).state_dict(),
            reference.state_dict(),
        )
        if dist.get_rank() == 0:
            assert [group["params"] for group in found["param_groups"]] == [
                g["params"] for g in wanted["param_groups"]
            ]
            assert [group["lr"] for group in found["param_groups"]] == [0.02, 0.01]
            compare(found["state"], wanted["state"])
    run.wait_for_everyone()


@on_ranks(2, thorough=[4])
@pytest.mark.parametrize("tie", [False, True], ids=["plain", "tied"])
def test_an_optimizer_made_after_the_model_was_prepared(tie):
    """On each rank it has that rank's parameters alone; its state is that of the plain optimizer all the same."""
    four = PartialState(cpu=True).num_processes == 4
    plugin = Plugin(fsdp_version=2, auto_wrap_policy="NO_WRAP") if four else None
    run = accelerator(
        Options(num_microbatches=2), plugin, pp_size=2, **({"dp_shard_size": 2} if four else {})
    )
    model = run.prepare(own(0, tied=tie))
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    plain = own(0, tied=tie)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(2):
        train(model, optimizer, run, run.strategy.data_shard)
        train(plain, reference, None, (0, 1))
        prepared = run.prepared_model(model)
        found, wanted = (
            prepared.prepared_optimizer(optimizer.optimizer).state_dict(),
            reference.state_dict(),
        )
        if dist.get_rank() == 0:
            assert found["param_groups"][0]["params"] == wanted["param_groups"][0]["params"]
            compare(found["state"], wanted["state"])
        compare(prepared.state_dict(), plain.state_dict())
        # What was saved comes back.
        for entry in optimizer.optimizer.state.values():
            entry["exp_avg"].zero_()
        prepared.prepared_optimizer(optimizer.optimizer).load_state_dict(found)


def test_optimizers_of_equal_models_keep_their_own_state(ranks):
    ranks(2).run(two_models)


def two_models():
    """Two models of one class, an optimizer each: the state of each optimizer is that of its model."""
    run = accelerator(Options(num_microbatches=2), pp_size=2)
    pairs, plain = [], []
    for seed in (0, 1):
        model = tied(seed)
        pairs.append(run.prepare(model, optimizer_of(model)))
        model = tied(seed)
        plain.append((model, optimizer_of(model)))
    for number, (model, optimizer) in enumerate(pairs):
        train(model, optimizer, run, run.strategy.data_shard)
        train(*plain[number], None, (0, 1))
    for prepared, (_, reference) in zip(run._objects.prepared_optimizers(), plain, strict=True):
        found, wanted = prepared.state_dict(), reference.state_dict()
        if dist.get_rank() == 0:
            compare(found["state"], wanted["state"])
    first, second = tied(0), tied(1)
    both = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    run.prepare(first, second, both)
    with pytest.raises(CheckpointError, match="another pipelined model"):
        run._objects.prepared_optimizers()[-1].state_dict()
