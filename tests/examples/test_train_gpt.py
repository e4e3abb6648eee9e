# SPDX-License-Identifier: Apache-2.0
"""The GPT example: its parts, a short run with all that it writes, and two processes that go on from a checkpoint."""

import shutil
import sys

import pytest
import torch
from ranks import run_ranks, run_script
from safetensors.torch import load_file

TINY = [
    "--width",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--context",
    "32",
    "--eval_windows",
    "21",
    "--sample_bytes",
    "20",
    "--cpu",
]


@pytest.fixture
def gpt(example):
    return example("train_gpt")


def test_the_split_is_by_file_and_most_of_it_is_to_learn_from(gpt):
    train, held_out = gpt.standard_library(held_out=False), gpt.standard_library(held_out=True)
    assert train.dtype == torch.uint8
    assert 5 * len(held_out) < len(train)
    assert torch.equal(held_out, gpt.standard_library(held_out=True))
    assert bytes(held_out[:20_000].tolist()[:200]) not in bytes(train.tolist())


def test_windows_cover_the_text_and_targets_are_one_byte_on(gpt):
    windows = gpt.Windows(torch.arange(101, dtype=torch.uint8), context=10)
    assert len(windows) == 10
    inputs, targets = windows[3]
    assert (inputs.tolist(), targets.tolist()) == (list(range(30, 40)), list(range(31, 41)))
    assert windows[9][1][-1] == 100
    few = gpt.Windows(torch.arange(101, dtype=torch.uint8), context=10, count=5)
    assert [int(few[i][0][0]) for i in range(len(few))] == [0, 20, 40, 60, 80]
    with pytest.raises(SystemExit, match="longer than the text"):
        gpt.Windows(torch.arange(5, dtype=torch.uint8), context=10)


def test_the_model_looks_back_and_never_ahead(gpt):
    torch.manual_seed(0)
    model = gpt.GPT(width=16, layers=2, heads=2, context=8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()
    written = model.generate(b"def ", 12, 1.0, torch.Generator().manual_seed(0))
    assert (written[:4], len(written)) == (b"def ", 16)


def test_the_schedule_rises_in_a_line_and_falls_to_a_twentieth(gpt):
    rates = [gpt.rate(step, warmup=10, steps=110) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert (rates[10], rates[60], rates[110]) == pytest.approx((1.0, 0.525, 0.05))


@pytest.mark.timeout(300)
def test_a_short_run_learns_and_leaves_what_it_promises(script, tmp_path):
    folder = tmp_path / "gpt"
    options = [*TINY, "--output_dir", folder, "--batch_size", 8, "--lr", 0.02, "--warmup", 5]
    options += ["--eval_every", 20, "--save_every", 10]
    (done,) = run_ranks(script("train_gpt"), 1, *options, "--max_steps", 40)
    assert "sample for the prompt 'def '" in done.stdout
    # the tenth, twentieth and thirtieth step's checkpoints were rotated out, the last two stay
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_file(folder / "model" / "model.safetensors")["embed.weight"].shape == (256, 32)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "logs" / "train_gpt"))
    events.Reload()
    held_out = [(event.step, event.value) for event in events.Scalars("loss/held_out")]
    assert [step for step, _ in held_out] == [0, 20, 40]
    assert held_out[0][1] > 4.8
    assert held_out[-1][1] < 3.7
    assert [event.step for event in events.Scalars("loss/train")] == [10, 20, 30, 40]
    assert len(events.Scalars("lr")) == 4

    (again,) = run_ranks(script("train_gpt"), 1, *options, "--max_steps", 1)
    assert "moved the previous run" in again.stdout
    assert (tmp_path / "gpt.1" / "checkpoints" / "checkpoint_3").is_dir()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--max_steps", "0"], "must be positive, got 0"),
        (["--max_steps", "many"], "invalid positive_int value: 'many'"),
        (["--width", "30"], "--width 30 is not divisible by --heads 4"),
    ],
)
def test_wrong_arguments_are_told(gpt, monkeypatch, capsys, wrong, told):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *wrong])
    with pytest.raises(SystemExit) as stopped:
        gpt.parse_arguments()
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_two_processes_go_on_from_a_checkpoint_to_the_same_weights(script, ranks, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = [*TINY, "--max_steps", 9, "--save_every", 5, "--eval_every", 4, "--log_every", 2, "--warmup", 3]
    two = ranks(2)
    two.run(run_script, script("train_gpt"), *options, "--output_dir", whole)
    # the run as it would have been left by a kill after the fifth step
    shutil.copytree(whole / "checkpoints" / "checkpoint_0", resumed / "checkpoints" / "checkpoint_0")
    two.run(run_script, script("train_gpt"), *options, "--output_dir", resumed, "--resume")
    assert "resuming from step 5" in two.outputs[0].stdout
    expected = load_file(whole / "model" / "model.safetensors")
    found = load_file(resumed / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (resumed / "checkpoints" / "checkpoint_1").is_dir()
