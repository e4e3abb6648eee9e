# SPDX-License-Identifier: Apache-2.0
"""The GPT example: its parts, a short run with all that it writes, and two processes that go on from a checkpoint."""

import os
import shutil
import sys
from datetime import date

import pytest
import torch
from ranks import run_ranks, run_script
from s3_server import S3Server
from safetensors.torch import load_file

from accelerate.tracking import read_values

TINY = ["--width", "32", "--layers", "1", "--heads", "2", "--eval_samples", "21", "--cpu"]


@pytest.fixture
def gpt(example):
    return example("train_gpt")


def test_days_are_trained_on_or_held_out(gpt):
    train, held_out = gpt.Dates(held_out=False), gpt.Dates(held_out=True)
    assert not set(train.days) & set(held_out.days)
    assert len(train.days) + len(held_out.days) == 36_525  # 75 years of 365 days and 25 of 366
    assert len(held_out) == len(gpt.STYLES) * len(held_out.days) < 0.12 * len(train)
    few = gpt.Dates(held_out=True, count=70)
    assert len(few) == 70
    assert {number % len(gpt.STYLES) for number in few.indices} == set(range(len(gpt.STYLES)))


def test_a_sample_is_a_date_in_a_style_and_the_iso_date(gpt):
    day = date(1998, 3, 3)
    assert [style(day).lower() for style in gpt.STYLES] == [
        "march 3rd, 1998",
        "the 3rd of march 1998",
        "tuesday, 3 march 1998",
        "3 mar 1998",
        "mar 3 '98",
        "3/3/1998",
        "3.3.1998",
    ]
    names = {
        1: "1st",
        2: "2nd",
        3: "3rd",
        11: "11th",
        12: "12th",
        13: "13th",
        20: "20th",
        21: "21st",
        22: "22nd",
    }
    assert {number: gpt.ordinal(number) for number in names} == names
    dates = gpt.Dates(held_out=False)
    assert max(len(style(day)) for style in gpt.STYLES for day in dates.days) < gpt.QUESTION
    index = len(gpt.STYLES) * 40 + 1
    text = bytes(dates[index].tolist()).decode()
    assert text == dates.question(index).rjust(gpt.QUESTION) + dates.days[40].isoformat()
    assert text.lstrip().startswith("the ")


def test_the_model_looks_back_and_never_ahead(gpt):
    torch.manual_seed(0)
    model = gpt.GPT(width=16, layers=2, heads=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(128, (2, 44))
    changed = tokens.clone()
    changed[:, 35] = (changed[:, 35] + 1) % 128
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[:35] == 0).all()
    assert (difference[35:] > 0).all()
    answered = gpt.answer(model, tokens[:, :34])
    assert answered.shape == (2, 44)
    assert torch.equal(answered[:, 34:], model(answered)[:, 33:-1].argmax(dim=-1))
    expected = torch.nn.functional.cross_entropy(
        model(tokens)[:, 33:-1].reshape(20, 128), tokens[:, 34:].reshape(20)
    )
    assert torch.allclose(gpt.loss_of(model, tokens), expected)


def test_the_schedule_rises_in_a_line_and_falls_to_a_twentieth(gpt):
    rates = [gpt.rate(step, warmup=10, steps=110) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert (rates[10], rates[60], rates[110]) == pytest.approx((1.0, 0.525, 0.05))


@pytest.mark.timeout(300)
def test_a_short_run_learns_and_leaves_what_it_promises(script, tmp_path, logs_no_mistake):
    folder = tmp_path / "gpt"
    options = [*TINY, "--output_dir", folder, "--batch_size", 8, "--lr", 0.02, "--warmup", 5]
    options += ["--eval_every", 20, "--save_every", 10]
    (done,) = run_ranks(script("train_gpt"), 1, *options, "--max_steps", 40)
    logs_no_mistake([done])
    assert done.stdout.count("right") + done.stdout.count("wrong") == 7
    # the checkpoints of the tenth and twentieth step were rotated out, the last two stay
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "checkpoint_2",
        "checkpoint_3",
    ]
    assert load_file(folder / "model" / "model.safetensors")["embed.weight"].shape == (128, 32)
    records = read_values(folder / "train_gpt")
    losses = {
        record["step"]: record["values"]["loss"] for record in records if "loss" in record["values"]
    }
    assert list(losses) == [10, 20, 30, 40]
    assert losses[10] > 2.5 > losses[40]
    assert [record["step"] for record in records if "held-out accuracy" in record["values"]] == [
        20,
        40,
    ]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--max_steps", "many"], "invalid int value: 'many'"),
        (["--width", "30"], "--width 30 is not divisible by --heads 4"),
    ],
)
def test_wrong_arguments_are_told(gpt, monkeypatch, capsys, wrong, told):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *wrong])
    with pytest.raises(SystemExit) as stopped:
        gpt.parse_arguments()
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_a_new_run_needs_an_empty_folder(gpt, monkeypatch, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="pass --resume, or another --output_dir"):
        gpt.parse_arguments()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    assert gpt.parse_arguments().resume


@pytest.mark.timeout(300)
def test_two_processes_go_on_from_a_checkpoint_to_the_same_weights(
    script, ranks, tmp_path, logs_no_mistake
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = [
        *TINY,
        "--max_steps",
        9,
        "--save_every",
        5,
        "--eval_every",
        4,
        "--log_every",
        2,
        "--warmup",
        3,
    ]
    options += ["--batch_size", 4, "--accumulate", 2]
    two = ranks(2)
    two.run(run_script, script("train_gpt"), *options, "--output_dir", whole)
    # the run as it would have been left by a kill after the fifth step
    shutil.copytree(
        whole / "checkpoints" / "checkpoint_0", resumed / "checkpoints" / "checkpoint_0"
    )
    two.run(run_script, script("train_gpt"), *options, "--output_dir", resumed, "--resume")
    logs_no_mistake(two.outputs)
    assert "resumed" in two.outputs[0].stderr and "step 5" in two.outputs[0].stderr
    expected = load_file(whole / "model" / "model.safetensors")
    found = load_file(resumed / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (resumed / "checkpoints" / "checkpoint_1").is_dir()


def test_checkpoints_in_a_bucket(script, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with S3Server() as server:
        options = [*TINY, "--max_steps", 2, "--output_dir", "s3://bucket/runs/gpt"]
        ranks(1).run(run_script, script("train_gpt"), *options, env=server.environment())
        keys = server.keys()
    assert "runs/gpt/checkpoints/checkpoint_0/checkpoint_manifest.json" in keys
    # All else is in the local folder of this name.
    assert (tmp_path / "runs/gpt/model/model.safetensors").exists()
    assert sorted(os.listdir("runs/gpt")) == ["model", "train_gpt"]
