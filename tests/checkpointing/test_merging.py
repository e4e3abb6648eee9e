# SPDX-License-Identifier: Apache-2.0
"""Shards that two processes saved become one file: every tensor is that of the plain model; damage is named."""

import shutil

import pytest
import torch
from rank_pool import Ranks
from s3_server import S3Server
from safetensors.torch import load_file

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.checkpointing import merging
from accelerate.checkpointing.copying import copy_checkpoint
from accelerate.checkpointing.export_checkpoint import export_checkpoint
from accelerate.commands.merge import main
from accelerate.core.errors import CheckpointError
from accelerate.core.files import location
from accelerate.utils import merge_fsdp_weights, save_fsdp_model


class Tied(torch.nn.Module):
    """Rows that do not divide by two, a tied pair, buffers of other dtypes, a part in bfloat16."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 5)
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.full((1,), 0.5))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("narrow", torch.linspace(0, 1, 4).to(torch.bfloat16))

    def forward(self, x):
        return self.head(self.inner(x)) * self.scale


def make():
    torch.manual_seed(3)
    models = Tied(), torch.nn.Linear(3, 9)
    return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def inputs():
    return torch.linspace(-1, 1, 24).reshape(4, 6), torch.linspace(0, 1, 12).reshape(4, 3)


def train(models, optimizers, inputs, backward):
    for model, optimizer, x in zip(models, optimizers, inputs, strict=True):
        backward(model(x).square().mean())
        optimizer.step()


def train_and_save(root):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    models, optimizers = make()
    a, b, *optimizers = accelerator.prepare(*models, *optimizers)
    rank = accelerator.process_index
    train((a, b), optimizers, [x[2 * rank : 2 * rank + 2] for x in inputs()], accelerator.backward)
    accelerator.save_state(root / "run")
    kept = [parameter.full_tensor().clone() for model in (a, b) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in (*a.parameters(), *b.parameters()):
            parameter.zero_()
    accelerator.load_state(root / "run")
    for before, parameter in zip(kept, [*a.parameters(), *b.parameters()], strict=True):
        assert torch.equal(before, parameter.full_tensor())
    assert a.head.weight is a.embed.weight
    for index, model in enumerate((a, b)):
        save_fsdp_model(plugin, accelerator, model, str(root / "api"), model_index=index)
    accelerator.end_training()


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    Ranks(rank_pool, 2).run(train_and_save, root)
    return root


@pytest.fixture(scope="module")
def plain():
    """The same training in one process, in plain PyTorch."""
    models, optimizers = make()
    train(models, optimizers, inputs(), lambda loss: loss.backward())
    return [model.state_dict() for model in models]


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, msg=name)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["run", "api"])
def test_merged_models_are_the_plain_ones(saved, plain, kind, tmp_path, monkeypatch, capsys):
    # Few tensors at a time, so that the file is really put together from several readings.
    monkeypatch.setattr(merging, "WINDOW", 100)
    main([str(saved / kind), str(tmp_path / "out")])
    told = capsys.readouterr().out
    assert "model.safetensors" in told and "model_1.safetensors" in told
    same(load_file(tmp_path / "out" / "model.safetensors"), plain[0])
    same(load_file(tmp_path / "out" / "model_1.safetensors"), plain[1])
    merge_fsdp_weights(
        saved / kind / "pytorch_model_fsdp_1", tmp_path / "one", safe_serialization=False
    )
    same(torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True), plain[1])
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["pytorch_model.bin"]


def test_shards_in_a_bucket(saved, plain, tmp_path, capsys):
    with S3Server() as server:
        copy_checkpoint(saved / "run", location("s3://bucket/run", "place"))
        server.requests.clear()
        main(["s3://bucket/run", str(tmp_path / "all")])
        main(["s3://bucket/run/pytorch_model_fsdp_1", str(tmp_path / "second")])
        # Only the models are read.
        read = {request.key for request in server.requests if request.act == "get"}
        assert any("pytorch_model_fsdp_0" in key for key in read)
        assert not any("optimizer" in key for key in read)
        with pytest.raises(SystemExit):
            main(["s3://bucket/run", str(tmp_path / "removed"), "--remove_checkpoint_dir"])
        assert "--remove_checkpoint_dir" in capsys.readouterr().err
    same(load_file(tmp_path / "all" / "model.safetensors"), plain[0])
    same(load_file(tmp_path / "all" / "model_1.safetensors"), plain[1])
    same(load_file(tmp_path / "second" / "model.safetensors"), plain[1])
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["model.safetensors"]


def test_what_is_removed_and_what_is_not(saved, plain, tmp_path, capsys):
    shutil.copytree(saved / "run", tmp_path / "run")
    told = refused(capsys, tmp_path / "run", tmp_path / "out", "--remove_checkpoint_dir")
    assert "would also remove optimizer_0, optimizer_1" in told
    assert not (tmp_path / "out").exists() and (tmp_path / "run" / "pytorch_model_fsdp_0").is_dir()
    main(
        [
            str(tmp_path / "run/pytorch_model_fsdp_0"),
            str(tmp_path / "out"),
            "--remove-checkpoint-dir",
        ]
    )
    assert (
        not (tmp_path / "run/pytorch_model_fsdp_0").exists()
        and (tmp_path / "run/optimizer_0").is_dir()
    )
    same(load_file(tmp_path / "out" / "model.safetensors"), plain[0])
    shutil.copytree(saved / "api", tmp_path / "api")
    main([str(tmp_path / "api"), str(tmp_path / "out"), "--remove_checkpoint_dir"])
    assert not (tmp_path / "api").exists()
    same(load_file(tmp_path / "out" / "model_1.safetensors"), plain[1])


@pytest.mark.parametrize(("kind", "number"), [("run", 0), ("run", 1), ("api", 0)])
def test_damage_is_named_before_anything_is_written(saved, kind, number, tmp_path, capsys):
    shutil.copytree(saved / kind, tmp_path / "bad")
    shards = tmp_path / "bad" / "pytorch_model_fsdp_0"
    victim = sorted(
        path for path in shards.iterdir() if path.suffix in (".safetensors", ".distcp")
    )[number]
    if kind == "run":
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
        told = refused(capsys, tmp_path / "bad", tmp_path / "out")
        assert f"pytorch_model_fsdp_0/{victim.name}" in told and "checksum" in told
    victim.unlink()
    assert victim.name in refused(capsys, tmp_path / "bad", tmp_path / "out")
    # Without a manifest the folder of the shards says which files it had.
    (tmp_path / "bad" / "checkpoint_manifest.json").unlink(missing_ok=True)
    assert victim.name in refused(capsys, shards, tmp_path / "out")
    with pytest.raises(CheckpointError, match=victim.name):
        export_checkpoint(
            shards, tmp_path / "out", None, merge_adapters=False, max_shard_size="5GB"
        )
    assert not (tmp_path / "out").exists()


def test_what_is_no_sharded_model_is_told(saved, tmp_path, capsys):
    assert "does not exist" in refused(capsys, tmp_path / "none", tmp_path / "out")
    assert "not hold the shards of a model" in refused(capsys, tmp_path, tmp_path / "out")
    assert "the shards of an optimizer" in refused(
        capsys, saved / "run" / "optimizer_0", tmp_path / "out"
    )
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(capsys, saved / "run", tmp_path / "file")
