# SPDX-License-Identifier: Apache-2.0
"""`accelerate export`: what transformers and peft read from a checkpoint has the values of the model."""

from __future__ import annotations

import json

import pytest
import torch
from adapters import CASES, base, build
from packages import package
from toys import distance, llama, on_cpu

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.checkpointing.copying import copy_checkpoint
from accelerate.commands.export import main
from accelerate.core.files import location

peft = package("peft")
transformers = package("transformers")
PRELOADED = ("transformers.models.llama.modeling_llama",)


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def model_of(**options):
    """A Llama whose values no initialization has."""
    model = llama(tie_word_embeddings=True, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.linspace(0, 1, parameter.numel()).view_as(parameter))
    return model


def export(*words):
    main([str(word) for word in words])


def read(folder, kind=transformers.AutoModelForCausalLM):
    model, report = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    return model.state_dict()


def same(expected, state):
    return distance(expected, state) == 0 and {v.dtype for v in state.values()} == {
        v.dtype for v in expected.values()
    }


def save(folder):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.set_default_dtype(torch.float64)
    accelerator.prepare(model_of())
    accelerator.save_state(folder)


def test_shards_of_two_ranks(ranks, tmp_path):
    ranks(2).run(save, tmp_path / "checkpoint", env=on_cpu())
    assert (tmp_path / "checkpoint" / "pytorch_model_fsdp_0").is_dir()
    export(tmp_path / "checkpoint", tmp_path / "out", "--max-shard-size", "20KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert same(model_of().state_dict(), read(tmp_path / "out"))
    # Nothing of an earlier export is left for a reader to find first.
    export(tmp_path / "checkpoint", tmp_path / "out")
    assert len(list(tmp_path.glob("out/*.safetensors*"))) == 1
    assert same(model_of().state_dict(), read(tmp_path / "out"))


@pytest.mark.parametrize(
    "options", [{}, {"safe_serialization": False}, {"layout": "compat"}], ids=str
)
def test_unsharded_checkpoints(options, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = model_of().to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7
    accelerator.prepare(model, llama())
    accelerator.save_state(tmp_path / "checkpoint", **options)
    file = (
        "pytorch_model.bin" if options.get("safe_serialization") is False else "model.safetensors"
    )
    export(tmp_path / "checkpoint" / file, tmp_path / "out")
    assert same(model.state_dict(), read(tmp_path / "out"))
    assert (
        json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_new_tokens"] == 7
    )


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}], ids=str)
def test_checkpoints_in_a_bucket(options, tmp_path, capsys):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model_of().to(torch.bfloat16))
    accelerator.save_state(tmp_path / "one", **options)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "two", **options)
    place = f"memory://export-{bool(options)}"
    for name in ("one", "two"):
        copy_checkpoint(tmp_path / name, location(f"{place}/{name}", "place"))
    main_file = "pytorch_model.bin" if options else "model.safetensors"
    for number, words in enumerate(([f"{place}/one"], [f"{place}/two/{main_file}"])):
        export(*words, tmp_path / f"out{number}")
        assert same(model.state_dict(), read(tmp_path / f"out{number}"))
        assert not list((tmp_path / f"out{number}").glob(".*"))
    with pytest.raises(SystemExit):
        export(f"{place}/two", tmp_path / "out")
    # The error names files of the bucket.
    assert f"such as {place}/two/{main_file.replace('.', '_1.')}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export(tmp_path / "one", f"{place}/out")
    assert f"{place}/out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export(f"{place}/three", tmp_path / "out")
    assert f"{place}/three does not have" in capsys.readouterr().err


def test_a_configuration_from_elsewhere(tmp_path, capsys):
    """Of weights without a manifest."""
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(model_of()), tmp_path / "weights")
    export(tmp_path / "weights", tmp_path / "out")
    assert (
        "without a config.json" in capsys.readouterr().out
        and not (tmp_path / "out" / "config.json").exists()
    )
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    export(tmp_path / "weights", tmp_path / "out", "--base", tmp_path / "base")
    assert same(model_of().state_dict(), read(tmp_path / "out"))


@pytest.mark.parametrize("case", ["lora", "modules_to_save", "two", "experts"])
def test_adapters(case, tmp_path, capsys):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(build(case))
    accelerator.save_state(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        base(case), tmp_path / "adapter", autocast_adapter_dtype=False
    )
    for name in ["default"] + ["other"] * (len(CASES[case][1]) - 1):
        if name == "other":
            loaded.load_adapter(tmp_path / "adapter" / name, name, autocast_adapter_dtype=False)
        options = {"adapter_name": name, "save_embedding_layers": False}
        states = [
            peft.get_peft_model_state_dict(model, **options) for model in (build(case), loaded)
        ]
        assert distance(*states) == 0
    base(case).save_pretrained(tmp_path / "base")
    export(
        tmp_path / "checkpoint",
        tmp_path / "merged",
        "--base",
        tmp_path / "base",
        "--merge-adapters",
    )
    # With its base, in a file whose tied weights have one name.
    accelerator.save_state(tmp_path / "entire", layout="compat")
    export(tmp_path / "entire", tmp_path / "joined", "--merge-adapters")
    for folder in ("merged", "joined"):
        assert (
            distance(build(case).merge_and_unload().state_dict(), read(tmp_path / folder)) < 1e-12
        )


def test_a_head_that_the_base_does_not_have(tmp_path):
    """It is made when the base is loaded, with other values each time, and trained by the adapter."""
    llama().save_pretrained(tmp_path / "base")
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path / "base", num_labels=3)
    model = peft.get_peft_model(
        model, peft.LoraConfig(task_type="SEQ_CLS"), autocast_adapter_dtype=False
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "checkpoint")
    export(
        tmp_path / "checkpoint", tmp_path / "out", "--base", tmp_path / "base", "--merge-adapters"
    )
    assert distance(model.merge_and_unload().state_dict(), read(tmp_path / "out", kind)) < 1e-12


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Checkpoints by name, and two bases."""
    folder = tmp_path_factory.mktemp("project")
    trained = build("rslora")
    trained.base_model.model.model.norm.weight.requires_grad_(True)
    models = {
        "checkpoint_0": [llama()],
        "checkpoint_1": [build("lora")],
        "two": [llama(), llama()],
        "peft": [trained],
    }
    models["adapter"] = models["checkpoint_1"]
    for name, parts in models.items():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*parts)
        accelerator.save_state(folder / name)
        accelerator.free_memory()
    other = llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    other.save_pretrained(folder / "other")
    llama(hidden_size=64).save_pretrained(folder / "wide")
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("nothing out", ["nothing does not exist"]),
        (". out", ["is not a checkpoint", "checkpoint_1"]),
        ("two out", ["several models", "two/model_1.safetensors"]),
        ("checkpoint_0 file", ["file", "pass a folder"]),
        ("checkpoint_0 out --max_shard_size 5", ["--max_shard_size", "5.0GB"]),
        (
            "checkpoint_0 out --merge_adapters --base other",
            ["--merge_adapters", "without adapters"],
        ),
        (
            "checkpoint_0 out --base wide",
            ["wide", "model.embed_tokens.weight (saved [32, 32], here [32, 64])"],
        ),
        ("checkpoint_1 out --merge_adapters", ["checkpoint_1/adapter", "--base"]),
        ("checkpoint_1 out --merge_adapters --base ./gone", ["--base ./gone", "not a folder"]),
        ("checkpoint_1 out --base other", ["--merge_adapters"]),
        (
            "checkpoint_1 out --merge_adapters --base other",
            ["other", "1 of 21 ", "layers.1.mlp.up_proj.weight"],
        ),
        ("peft out", ["adapters and their base", "--merge_adapters"]),
        ("peft out --merge_adapters --base other", ["--base", "adapters and their base"]),
    ],
)
def test_what_is_refused(words, facts, project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as end:
        export(*words.split())
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1, lines
    assert all(fact in lines[0] for fact in facts), lines
    assert not (project / "out").exists()


def test_a_damaged_checkpoint(project, tmp_path, capsys):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(llama())
    accelerator.save_state(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"x")
    with pytest.raises(SystemExit):
        export(tmp_path, tmp_path / "out")
    assert "model.safetensors" in capsys.readouterr().err and not (tmp_path / "out").exists()
