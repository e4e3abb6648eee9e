# SPDX-License-Identifier: Apache-2.0
"""The scripts of the recipes: what their pages show, and two processes train what one does."""

import re

import pytest
from s3_server import S3Server
from safetensors.torch import load_file

PRELOADED = ("transformers.models.llama.modeling_llama", "accelerate.parallel.fsdp.strategy")


@pytest.fixture
def losses(printed, tmp_path, monkeypatch):
    """A function that runs a recipe on ranks, and returns the losses that rank 0 printed."""
    monkeypatch.chdir(tmp_path)

    def run(name, nproc, *arguments):
        text = "\n".join(printed(f"recipes/{name}", nproc, *arguments))
        return [
            float(value)
            for value in re.findall(r"(?:loss|discriminator|generator|token) (\d\S*\d)", text)
        ]

    return run


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_each_sample_is_read_once_also_by_a_resumed_run(printed, tmp_path, form):
    pytest.importorskip({"parquet": "datasets"}.get(form, form))
    arguments = ["--format", form, "--output", tmp_path]
    assert printed("recipes/own_data", 2, *arguments, "--stop_after", 23) == [
        "started",
        "stopped after step 23",
    ]
    # The files of a stream that splits itself belong to the ranks; other data continues on another number of them.
    nproc, batch_size = (2, 16) if form == "webdataset" else (1, 32)
    first, *epochs = printed("recipes/own_data", nproc, *arguments, "--batch_size", batch_size)
    assert first == "resumed at step 20 of epoch 0"
    assert [line.split(";")[0] for line in epochs] == [
        f"epoch {n}: 1003 samples read once" for n in (0, 1)
    ]


def test_the_mean_over_tokens_is_that_of_one_process(printed):
    lines = [
        *printed("recipes/token_metrics", 1, "--batch_size", 1),
        *printed("recipes/token_metrics", 1),
        *printed("recipes/token_metrics", 2, "--batch_size", 3),
    ]
    tokens, means = zip(*(re.findall(r"\d\.\d+", line) for line in lines), strict=True)
    assert len(set(tokens)) == 1 and len(set(means)) == 3


def largest_difference(first, second):
    first, second = load_file(first), load_file(second)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_gan(losses):
    pytest.importorskip("sklearn")
    one = losses("gan", 1, "--dtype", "float64", "--epochs", 2)
    assert len(one) == 4
    assert losses("gan", 2, "--dtype", "float64", "--epochs", 2) == one


@pytest.mark.parametrize("options", [(), ("--four_bit",)], ids=["lora", "qlora"])
def test_lora(losses, tmp_path, options):
    pytest.importorskip("peft")
    arguments = ("--steps", 6, "--log_every", 2, *options)
    one = losses("finetune_lora", 1, *arguments, "--output", tmp_path / "1")
    assert len(one) == 3 and one[-1] < one[0]
    two = losses("finetune_lora", 2, *arguments, "--output", tmp_path / "2")
    tolerance = 1e-5 if not options else 5e-3
    assert two == pytest.approx(one, abs=max(tolerance, 1e-4))
    file = "adapter_model.safetensors"
    assert largest_difference(tmp_path / "1" / file, tmp_path / "2" / file) < tolerance


def test_fsdp2_resumes(losses, tmp_path):
    arguments = ("--log_every", 2, "--output")
    one = losses("finetune_fsdp2", 1, "--steps", 8, *arguments, tmp_path / "1")
    assert len(one) == 4
    saving = ("--checkpoints", tmp_path / "run", "--save_every", 4)
    first = losses("finetune_fsdp2", 2, "--steps", 4, *arguments, tmp_path / "2", *saving)
    second = losses("finetune_fsdp2", 2, "--steps", 8, *arguments, tmp_path / "2", *saving)
    assert first + second == pytest.approx(one, abs=1e-4)
    assert (
        largest_difference(
            tmp_path / "1" / "model.safetensors", tmp_path / "2" / "model.safetensors"
        )
        < 1e-5
    )


def test_the_script_of_the_cluster_files_continues(printed, tmp_path):
    (first,) = printed("clusters/train", 2, "--output", tmp_path, "--epochs", 1)
    (second,) = printed("clusters/train", 2, "--output", tmp_path, "--epochs", 2)
    assert first.startswith("epoch 0: ") and second.startswith("epoch 1: accuracy 0.9")
    with S3Server() as server:
        # A folder that is not used: `accelerate launch --resume` sets the variable.
        env = {**server.environment(), "ACCELERATE_RESUME": "s3://bucket/run"}
        for epochs, line in ((1, first), (2, second)):
            words = ["--output", tmp_path / "unused", "--epochs", epochs]
            assert printed("clusters/train", 2, *words, env=env) == [line]
        keys = server.keys()
    folders = {key.rpartition("/parts-")[0] for key in keys if "/parts-" in key}
    assert folders == {f"run/checkpoints/checkpoint_{number}" for number in (0, 1)}
    assert not (tmp_path / "unused").exists()
