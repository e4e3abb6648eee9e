# SPDX-License-Identifier: Apache-2.0
"""bf16 parameters with fp32 master weights in every layout, against the loop written by hand.

A step moves a weight by less than the distance to the next bf16 number: a run without master weights does not move.
Layouts sum gradients in another order, in bf16, and each sum has a rounding error (2**-9 of it).
So distances are relative to the distance that the reference has moved; they were 0.007 to 0.014.
"""

import sys
from pathlib import Path

import pytest
import torch
from layouts import units_of
from states import reset_states
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    MasterWeightsKwargs,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

BATCH, LENGTH, STEPS, ACCUMULATION, CLIP, LR = 8, 6, 20, 2, 0.3, 5e-5
CONFIG = LlamaConfig(vocabulary=16, width=16, hidden=24, layers=2)
NEAR = 0.03
HALF = STEPS * ACCUMULATION // 2 + 1


def sharded(**options):
    return units_of("Block", **options)


def composed(**sizes):
    return {"parallelism_config": lambda: ParallelismConfig(**sizes)}


LAYOUTS = {
    2: {
        "ddp": {},
        "fsdp": {"fsdp_plugin": sharded},
        "tp": composed(tp_size=2),
        "pp": composed(pp_size=2),
        "cp": composed(cp_size=2),
    },
    4: {
        "hsdp": composed(dp_replicate_size=2, dp_shard_size=2),
        "fsdp, full states": {
            "fsdp_plugin": lambda: sharded(
                state_dict_type="FULL_STATE_DICT", activation_checkpointing=True
            )
        },
        "fsdp, offloaded": {"fsdp_plugin": lambda: sharded(cpu_offload=True)},
        "fsdp x tp": composed(dp_shard_size=2, tp_size=2),
        "pp x fsdp": composed(pp_size=2, dp_shard_size=2),
        "pp x dp": composed(pp_size=2, dp_replicate_size=2),
        "cp x fsdp": composed(dp_shard_size=2, cp_size=2),
    },
}
BY_NAME = LAYOUTS[2] | LAYOUTS[4]
USUAL = [(2, "ddp"), (2, "fsdp"), (2, "pp")]
CASES = [
    pytest.param(
        nproc,
        what,
        marks=() if (nproc, what) in USUAL else pytest.mark.thorough,
        id=f"{nproc}-{what}",
    )
    for nproc, layouts in LAYOUTS.items()
    for what in layouts
]


def batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        CONFIG.vocabulary, (STEPS * ACCUMULATION, BATCH, LENGTH + 3), generator=generator
    )
    # Sequences of 8: a multiple of twice the ranks that split them.
    return [{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in tokens]


def make(seed=0):
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def by_hand(has_master_weights):
    """bf16 parameters, fp32 master weights, AdamW on these; or AdamW on the bf16 parameters themselves."""
    model, _ = make()
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        masters.values() if has_master_weights else model.parameters(), lr=LR
    )
    for number, batch in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch)[0]
        (loss.float() / ACCUMULATION).backward()
        if number % ACCUMULATION:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if has_master_weights:
                for name, parameter in model.named_parameters():
                    masters[name].grad = parameter.grad.float()
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    (parameter.copy_ if has_master_weights else masters[name].copy_)(
                        masters[name] if has_master_weights else parameter
                    )
            model.zero_grad()
    return {name: master.detach() for name, master in masters.items()}


def start(layout, masters=True):
    reset_states()
    return Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=ACCUMULATION,
        kwargs_handlers=[MasterWeightsKwargs()] if masters else [],
        **{name: make_it() for name, make_it in BY_NAME[layout].items()},
    )


def train(accelerator, parts, some):
    model, optimizer = parts
    index, count = accelerator.strategy.data_shard
    for batch in some:
        batch = {name: value.chunk(count)[index].clone() for name, value in batch.items()}
        split = [batch["input_ids"], batch["labels"]]
        length = split[0].shape[1]
        if accelerator.parallelism_config is not None and accelerator.parallelism_config.cp_enabled:
            batch["position_ids"] = torch.arange(length).expand_as(split[0]).clone()
            split.append(batch["position_ids"])
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel(split, [1] * len(split), set(split)),
        ):
            loss = model(**batch)[0]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        assert not accelerator.sync_gradients or all(p.grad is None for p in model.parameters())


def norm(state):
    return sum(value.double().square().sum() for value in state.values()).sqrt().item()


def distance(found, expected):
    assert list(found) == list(expected), (list(found), list(expected))
    assert {value.dtype for value in found.values()} == {torch.float32}
    return norm({name: found[name] - value for name, value in expected.items()})


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_state(parts):
    """This rank's shards of the parameters and of the optimizer's state."""
    model, optimizer = parts
    found = {f"p.{name}": local(p).detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = (
                local(value).clone() if isinstance(value, torch.Tensor) else value
            )
    return found


def is_equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


def check_layout(accelerator, what, parts):
    """The parameters are bf16, the state of the optimizer and the reported memory are fp32's."""
    model, optimizer = parts
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, what
    moments = [entry["exp_avg"] for entry in optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}, what
    own = {id(p) for p in model.parameters()}
    assert {id(parameter) for parameter in optimizer.state} == own, what
    report = accelerator.explain()
    assert report.find("run", "master_weights") == "given"
    count = sum(p.numel() for p in model.parameters())
    name = next(section for section in report.sections if section.startswith("model"))
    assert report.find(name, "parameters") == f"{count:,} in bfloat16", report
    assert report.find(name, "master weights") == f"{count:,} in float32", report
    return report


@pytest.fixture(scope="module")
def reference():
    """(the final weights, how far they have moved, how far they would be off without master weights)"""
    expected = by_hand(has_master_weights=True)
    begin = dict(make()[0].named_parameters())
    moved = norm({name: value - begin[name].detach() for name, value in expected.items()})
    lost = distance(by_hand(has_master_weights=False), expected)
    assert lost > 0.8 * moved, (
        f"the updates are not small: without master weights {lost / moved:.2f} of them is lost"
    )
    return expected, moved


@pytest.mark.parametrize("nproc, what", CASES)
def test_trains_and_resumes(nproc, what, ranks, reference, tmp_path):
    ranks(nproc).run(train_and_resume, what, reference, tmp_path)
    if (tmp_path / "end.pt").exists():
        ranks(1).run(load_in_one_process, tmp_path)


def train_and_resume(what, reference, folder):
    expected, moved = reference
    accelerator = start(what)
    # Other ranks start from other weights: the first one's count.
    parts = accelerator.prepare(*make(accelerator.process_index))
    # Saved in the middle of a window.
    train(accelerator, parts, batches()[:HALF])
    evaluate(accelerator, parts)
    accelerator.save_state(folder / what)
    train(accelerator, parts, batches()[HALF:])
    check_layout(accelerator, what, parts)
    state = accelerator.get_state_dict(parts[0])
    if state:
        off = distance(state, expected) / moved
        assert off < NEAR, f"off by {off:.3f} of the distance"
    done = local_state(parts)
    again = start(what)
    others = again.prepare(*make(seed=7))
    for state in ("new", "trained"):
        again.load_state(folder / what)
        train(again, others, batches()[HALF:])
        assert is_equal(local_state(others), done), f"the {state} run differs"
    if "fsdp_plugin" in BY_NAME[what]:
        # A checkpoint made by hand: its states have the master weights, and loading restores them.
        keep = {name: local(p).clone() for name, p in again.get_state_dict(others[0]).items()}
        others[1].load_state_dict(others[1].state_dict())
        assert is_equal(again.get_state_dict(others[0]), keep)
        sharded_by_hand(start(what))
        by_the_apis_functions(again, what, others, folder / f"{what}, by the API", keep)
        again.save_state(folder / "end")
        if again.is_main_process:
            torch.save(keep, folder / "end.pt")
    if what == "ddp":
        local_average(again, others)
    accelerator.wait_for_everyone()


def sharded_by_hand(accelerator):
    """A model that somebody has sharded is cast before its first forward, and refused after it."""
    model, _ = make()
    fully_shard(model)
    prepared = accelerator.prepare(model)
    assert {p.dtype for p in prepared.parameters()} == {torch.bfloat16}
    model, _ = make()
    fully_shard(model)
    model(**batches()[0])
    with pytest.raises(PrepareError, match="before prepare and has already run"):
        accelerator.prepare(model)


def evaluate(accelerator, parts):
    """A forward that has no backward may leave parameters gathered."""
    model = parts[0].eval()
    index, count = accelerator.strategy.data_shard
    with torch.no_grad():
        model(batches()[0]["input_ids"].chunk(count)[index])
    model.train()


def by_the_apis_functions(accelerator, what, parts, folder, keep):
    plugin = accelerator.state.fsdp_plugin
    done = local_state(parts)
    save_fsdp_model(plugin, accelerator, parts[0], folder)
    save_fsdp_optimizer(plugin, accelerator, parts[1], parts[0], folder)
    accelerator = start(what)
    others = accelerator.prepare(*make(seed=9))
    load_fsdp_model(plugin, accelerator, others[0], folder)
    load_fsdp_optimizer(plugin, accelerator, others[1], others[0], folder)
    assert is_equal(local_state(others), done)
    assert is_equal({n: local(p) for n, p in accelerator.get_state_dict(others[0]).items()}, keep)


def local_average(accelerator, parts):
    """Averages are those of the master weights."""
    model, optimizer = parts
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as block:
        for batch in batches()[:4]:
            index, count = accelerator.strategy.data_shard
            with accelerator.accumulate(model):
                accelerator.backward(
                    model(**{k: v.chunk(count)[index] for k, v in batch.items()})[0]
                )
                optimizer.step()
                optimizer.zero_grad()
            block.step()
    state = accelerator.get_state_dict(model)
    for name, mine in state.items():
        first = accelerator.gather(mine.reshape(1, -1))
        assert torch.equal(first[0], first[1]), name
    rounded = dict(accelerator.unwrap_model(model).named_parameters())
    assert all(torch.equal(value.bfloat16(), rounded[name]) for name, value in state.items())


def load_in_one_process(folder):
    expected = torch.load(folder / "end.pt")
    for has_masters in (True, False):
        accelerator = start("ddp", has_masters)
        model, optimizer = accelerator.prepare(*make(seed=3))
        accelerator.load_state(folder / "end")
        assert is_equal(dict(accelerator.get_state_dict(model)), expected), has_masters
        assert {p.dtype for p in model.parameters()} == {
            torch.bfloat16 if has_masters else torch.float32
        }
        assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {torch.float32}
    # A checkpoint of a run without master weights is resumed with them.
    accelerator.save_state(folder / "plain")
    accelerator = start("ddp")
    model, _ = accelerator.prepare(*make(seed=4))
    accelerator.load_state(folder / "plain")
    assert is_equal(dict(accelerator.get_state_dict(model)), expected)
