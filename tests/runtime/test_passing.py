# SPDX-License-Identifier: Apache-2.0
"""Under DDP rank 0 saves alone, as `if accelerator.is_main_process` in most published scripts, and the run goes on."""

from __future__ import annotations

import logging
import time
from unittest import mock

import pytest
import torch
from rank_pool import on_ranks

from accelerate import Accelerator
from accelerate.checkpointing import verify
from accelerate.runtime import agreement, passing

EPOCHS, STEPS = 2, 4


class Net(torch.nn.Sequential):
    """A model of the user's, with a method of its own to save it."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), f"{folder}/own.pt")


def samples():
    return torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(1))


def plain(epochs):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in samples().split(8):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def distance(model, other):
    return max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def save_own(models, weights, folder):
    assert type(models[0]) is Net
    models[0].save_pretrained(folder)
    weights.pop()


def load_own(models, folder):
    model = models.pop()
    assert type(model) is Net
    model.load_state_dict(torch.load(f"{folder}/own.pt", weights_only=True))


@on_ranks(2)
@pytest.mark.parametrize("how", ["prepared loader", "own loop", "hooks", "background", "compat"])
def test_the_main_process_saves_alone(how, tmp_path):
    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True)
    rank, is_main, model = accelerator.process_index, accelerator.is_main_process, Net()
    messages, saves = [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(handler)
    if how == "hooks":
        accelerator.register_save_state_pre_hook(save_own)
        accelerator.register_load_state_pre_hook(load_own)
    if how == "own loop":
        loader = [batch[4 * rank : 4 * rank + 4] for batch in samples().split(8)]
    else:
        loader = accelerator.prepare(torch.utils.data.DataLoader(samples(), batch_size=4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def epoch(saves_steps):
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if saves_steps and is_main:
                begin = time.perf_counter()
                options = {
                    "blocking": how != "background",
                    "layout": "compat" if how == "compat" else "native",
                }
                accelerator.save_state(tmp_path / f"step_{len(saves)}", **options)
                saves.append(time.perf_counter() - begin)

    epoch(True)
    if is_main and how == "background":
        accelerator._checkpoints._writer.wait()
    if is_main:  # every method that does not communicate in data parallelism
        accelerator.save_model(model, tmp_path / "weights")
        accelerator.save(accelerator.get_state_dict(model), tmp_path / "weights.pt")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert type(accelerator.unwrap_model(model)) is Net
        accelerator.log({"loss": 1.0})
    accelerator.wait_for_everyone()
    assert distance(plain(1), accelerator.unwrap_model(model)) < 1e-12
    if is_main:
        # The longest of them also where the machine is busy.
        assert sorted(saves)[STEPS // 2] < 1.0 and max(saves) < 15.0, saves
        about = [text for text in messages if "rank 0 only" in text]
        assert (
            len(about) == 1 and "random states" in about[0] and "of rank 1 are missing" in about[0]
        ), messages
    else:
        assert not messages
    accelerator.wait_for_everyone()
    last = tmp_path / f"step_{STEPS - 1}"
    manifest = verify(last)
    assert (manifest.ranks, manifest.world_size) == ("rank 0 only", 2)
    assert (
        ("own.pt" in manifest.files) == (how == "hooks") != ("model.safetensors" in manifest.files)
    )

    draws = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        torch.rand(1 + rank)
        report = accelerator.load_state(last)
        draws.append(torch.rand(2))
    # The last batch of the epoch was read: what follows is the next epoch, as in a plain run.
    epoch(False)
    assert distance(plain(2), accelerator.unwrap_model(model)) < 1e-12
    assert len([note for note in report.notes if "rank 0" in note]) == 1
    assert torch.equal(*draws)
    both = accelerator.gather(draws[0])
    assert not torch.equal(both[:2], both[2:])

    # With all ranks it is complete, also after saves of one.
    accelerator.save_state(tmp_path / "all")
    manifest = verify(tmp_path / "all")
    assert manifest.ranks == "all" and "random_states_1.json" in manifest.files


@on_ranks(2)
def test_the_last_call_of_a_run(tmp_path):
    """The other rank has left."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    if not accelerator.is_main_process:
        accelerator.end_training()
        return
    begin = time.perf_counter()
    accelerator.save_state(tmp_path / "last")
    assert time.perf_counter() - begin < 15.0
    assert verify(tmp_path / "last").ranks == "rank 0 only"


class Slow:
    """A registered object whose state takes long on one rank."""

    def __init__(self, seconds):
        self.seconds = seconds

    def state_dict(self):
        time.sleep(self.seconds)
        return {}

    def load_state_dict(self, state):
        pass


def hundredfold(ranks=2, limit=1e9, pauses=agreement.pauses):
    """The pauses of a clock on which a second is 100 seconds."""
    for waited in pauses(ranks, limit / 100):
        yield 100 * waited


@on_ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_is_waited_for(late, tmp_path):
    """By over 100 seconds: before it calls, and inside of the call."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    delay = 1.2 * (accelerator.process_index == late)
    with (
        mock.patch.object(agreement, "pauses", hundredfold),
        mock.patch.object(passing, "pauses", hundredfold),
    ):
        time.sleep(delay)
        accelerator.save_state(tmp_path / "before")
        time.sleep(delay)
        accelerator.load_state(tmp_path / "before")
        accelerator.register_for_checkpointing(Slow(delay))
        accelerator.save_state(tmp_path / "inside")
    for name in ("before", "inside"):
        assert verify(tmp_path / name).ranks == "all"
