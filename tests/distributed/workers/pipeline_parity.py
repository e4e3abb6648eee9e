# SPDX-License-Identifier: Apache-2.0
"""Each rank: an unchanged loop over a pipelined model, against the plain loop in float64, to 1e-8."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from counting import Messages
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.errors import PrepareError
from accelerate.core.imports import is_torch_version
from accelerate.parallel.fsdp.units import groups as groups_of
from accelerate.parallel.pipeline.early import EarlyReceive1F1B
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

VOCABULARY, LENGTH, GLOBAL_BATCH, ACCUMULATION, CLIP = 32, 8, 8, 2, 0.1
SIZES = {"vocabulary": VOCABULARY, "width": 16, "hidden": 32, "layers": 4, "heads": 2, "kv_heads": 2}


def own(seed=0, **sizes):
    torch.manual_seed(seed)
    return Llama(LlamaConfig(**(SIZES | sizes)))


def of_transformers(seed=0):
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    config = Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64)


def batches(steps, padded):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps * ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if padded:
            # Unequal numbers of tokens count in the micro-batches.
            ends = torch.randint(2, LENGTH + 1, (GLOBAL_BATCH,), generator=generator)
            labels[torch.arange(LENGTH) >= ends[:, None]] = -100
        yield tokens[:, :-1], labels


def loss_of(model, tokens, labels, inside):
    if inside:
        output = model(tokens, labels=labels)
        return output[0] if isinstance(output, tuple) else output.loss
    logits = model(tokens)
    return nn.functional.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), labels.flatten())


def train(model, optimizer, accelerator, steps, inside, padded):
    norms, losses = [], []
    index, count = (0, 1) if accelerator is None else accelerator.strategy.data_shard
    for number, (tokens, labels) in enumerate(batches(steps, padded)):
        part = slice(index * GLOBAL_BATCH // count, (index + 1) * GLOBAL_BATCH // count)
        tokens, labels = tokens[part], labels[part]
        if accelerator is None:
            loss = loss_of(model, tokens, labels, inside)
            (loss / ACCUMULATION).backward()
            if number % ACCUMULATION == ACCUMULATION - 1:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        else:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens, labels, inside)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.detach().item())
    return norms, losses


def accelerator(options=None, plugin=None, precision=None, **sizes):
    AcceleratorState._reset_state()
    layout = ParallelismConfig(**sizes, pp_handler=options)
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        parallelism_config=layout,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
    )


def check_run(what, make, options, steps=20, inside=False, padded=False, plugin=None, tolerance=1e-8, **sizes):
    plain = make()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), None, steps, inside, padded)
    run = accelerator(options, plugin, **sizes)
    # Every rank but the first builds another model: the weights are rank 0's.
    model = make(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    held = sum(parameter.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in plain.parameters())
    assert held < 0.8 * whole, f"{what}: this rank holds {held} of {whole}"
    found = train(model, optimizer, run, steps, inside, padded)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert abs(mine - theirs) < tolerance, f"{what}: norm {mine} is not {theirs}"
    if sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1) == 1:
        for mine, theirs in zip(found[1], expected[1], strict=True):
            assert abs(mine - theirs) < tolerance, f"{what}: loss {mine} is not {theirs}"
    compare(what, run.prepared_model(model).state_dict(), plain.state_dict(), tolerance)
    return run, model, optimizer, plain


def compare(what, state, expected, tolerance=1e-8):
    if dist.get_rank() != 0:
        return
    assert set(state) == set(expected), f"{what}: {set(state) ^ set(expected)}"
    for name, value in expected.items():
        difference = (state[name] - value).abs().max().item()
        assert difference <= tolerance, f"{what}: {name} is off by {difference}"
    print(what, "equal", flush=True)


def refused(what, make, options, named, call=None, *objects):
    run = accelerator(options, pp_size=2, dp_replicate_size=dist.get_world_size() // 2)
    try:
        model, *_ = run.prepare(make(), torch.zeros(1), *objects)
        if call is not None:
            call(model)
    except PrepareError as error:
        assert named in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what}: accepted")


def runs_in_schedule(model, kind=None):
    built = [schedule for schedule, _ in model._pipelined.scheduled._built.values()]
    assert built, "every batch went in GPipe's order"
    assert kind is None or {type(schedule) for schedule in built} == {kind}, built


# Before 2.13 torch's own schedules that take the gradients of weights apart are wrong for some layers, and refused.
SPLIT_BACKWARD = ("zero_bubble", "zbv") if is_torch_version(">=", "2.13") else ()


def two():
    check_run("gpipe", own, Options(num_microbatches=4), pp_size=2)
    options = Options(schedule="1f1b", num_microbatches=4)
    _, model, *_ = check_run("1f1b", own, options, inside=True, pp_size=2)
    runs_in_schedule(model, EarlyReceive1F1B)
    if not SPLIT_BACKWARD:
        refused("zero bubble", own, Options(schedule="zero_bubble", num_microbatches=4), "needs torch 2.13")
    for schedule in ("1f1b", "interleaved", *SPLIT_BACKWARD):
        options = Options(schedule=schedule, num_microbatches=4)
        _, model, *_ = check_run(schedule, own, options, inside=True, padded=True, steps=4, pp_size=2)
        runs_in_schedule(model)
    # What every backend but gloo runs.
    with mock.patch("accelerate.parallel.pipeline.early.has_independent_directions", lambda *_: False):
        options = Options(schedule="1f1b", num_microbatches=4)
        _, model, *_ = check_run("1f1b in torch's order", own, options, inside=True, steps=4, pp_size=2)
        runs_in_schedule(model, Schedule1F1B)
    check_run("transformers", of_transformers, Options(num_microbatches=3), steps=4, pp_size=2)
    options = Options(schedule="1f1b", num_microbatches=2)
    # Its loss is in float32, whatever the model is in.
    _, model, *_ = check_run(
        "transformers 1f1b", of_transformers, options, 4, inside=True, padded=True, tolerance=1e-4, pp_size=2
    )
    runs_in_schedule(model)


def tied(seed=0):
    return own(seed, tied=True)


def four():
    half = Options(num_microbatches=2)
    check_run("pp=4, tied", tied, Options(num_microbatches=4), pp_size=4)
    check_run("pp x dp", own, half, pp_size=2, dp_replicate_size=2)
    check_run("pp x dp, tied", tied, half, steps=4, pp_size=2, dp_replicate_size=2)
    plugin = Plugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"])
    check_run("pp x fsdp", own, half, plugin=plugin, pp_size=2, dp_shard_size=2)
    check_run("pp x fsdp, tied", tied, half, steps=4, plugin=plugin, pp_size=2, dp_shard_size=2)
    for schedule in ("1f1b", "looped_bfs", "interleaved", *SPLIT_BACKWARD):
        early = Options(schedule=schedule, num_microbatches=4 if schedule == "zbv" else 2)
        what, sizes = f"pp x fsdp, {schedule}", {"pp_size": 2, "dp_shard_size": 2}
        run, model, *_ = check_run(what, own, early, 3, inside=True, plugin=plugin, **sizes)
        runs_in_schedule(model)
        check_messages(what, run, model)
    check_run("pp x tp", own, half, pp_size=2, tp_size=2)
    recomputed = dataclasses.replace(plugin, activation_checkpointing=True)
    check_run("pp x fsdp, recomputed", own, half, steps=2, plugin=recomputed, pp_size=2, dp_shard_size=2)
    early = Options(schedule="1f1b", num_microbatches=2)
    check_run("pp x tp, 1f1b", own, early, 3, inside=True, pp_size=2, tp_size=2)
    check_run("pp x dp, 1f1b, tied", tied, early, 3, inside=True, pp_size=2, dp_replicate_size=2)
    check_items()
    check_lowered(half, dataclasses.replace(plugin), dp_shard_size=2)
    check_lowered(early, dataclasses.replace(plugin), dp_shard_size=2)
    check_lowered(early, None, tp_size=2)
    check_lowered(half, None, dp_replicate_size=2)


def check_messages(what, run, model):
    """A window gathers and reduces each unit of FSDP once, however many batches it has."""
    units = [unit for stage in model._pipelined.runner.stages.values() for unit in stage.modules()]
    sharded = [unit._get_fsdp_state() for unit in units if isinstance(unit, FSDPModule)]
    groups = sum(len(groups_of(state)) for state in sharded)
    with Messages() as sent:
        for number, (tokens, labels) in enumerate(batches(2, False)):
            with contextlib.nullcontext() if number == 3 else run.no_sync(model):
                run.backward(loss_of(model, tokens[:4], labels[:4], True))
    for kind in ("reduce_scatter", "allgather"):
        found = sum(number for name, (number, _) in sent.counts.items() if kind in name)
        assert found == groups > 0, f"{what}: {found} of {kind} in a window, for {groups} units: {sent.counts}"


def check_items():
    """Means over unequal numbers of tokens on two copies: the mean over all of them."""
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
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-12)


def check_lowered(options, plugin, **sizes):
    """bf16 trains: the loss falls from where it is in fp32, and is one number on all ranks of a pipeline."""
    run = accelerator(options, plugin, precision="bf16", pp_size=2, **sizes)
    model = own().float()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    _, losses = train(model, optimizer, run, 4, True, False)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (run.strategy.data_shard, losses))
    assert len({str(row) for row in found}) == run.strategy.data_shard[1], found
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in model.parameters()), losses
    tokens, labels = next(iter(batches(1, False)))
    index, count = run.strategy.data_shard
    part = slice(index * GLOBAL_BATCH // count, (index + 1) * GLOBAL_BATCH // count)
    exact = loss_of(own().float(), tokens[part], labels[part], True).item()
    assert 0 < abs(losses[0] - exact) < 0.03, f"{sizes}: a first loss of {losses[0]} in bf16, {exact} in fp32"


def main():
    world = PartialState(cpu=True).num_processes
    torch.set_default_dtype(torch.float64)
    {2: two, 4: four}[world]()
    print("all equal")


if __name__ == "__main__":
    main()
