# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft in each layout: every trained value, what a checkpoint has of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapters import CASES, arguments, base, build, optimizer_of, plain, plain_steps, train
from packages import package
from rank_pool import on_ranks
from s3_server import S3Server
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from toys import distance, llama, on_cpu

from accelerate import Accelerator
from accelerate.checkpointing import CheckpointMismatch, adapters
from accelerate.checkpointing.checksums import checksums
from accelerate.checkpointing.copying import copy_checkpoint
from accelerate.checkpointing.gathering import gather_on_host
from accelerate.core.errors import CheckpointError, PrepareError
from accelerate.core.files import location
from accelerate.state import PartialState
from accelerate.utils import load_fsdp_model, save_fsdp_model

peft = package("peft")
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "peft",
)


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def prepared(accelerator, case, model=None):
    model = build(case) if model is None else model
    return accelerator.prepare(model, optimizer_of(model))


def adapter_of(model, name="default", state=None):
    return peft.get_peft_model_state_dict(
        model, state_dict=state, adapter_name=name, save_embedding_layers=False
    )


def read_adapters(case, folder, others):
    """The adapters that peft reads from a folder, for the base of a case."""
    model = peft.PeftModel.from_pretrained(base(case), folder, autocast_adapter_dtype=False)
    for name in others:
        model.load_adapter(folder / name, name, autocast_adapter_dtype=False)
    return {name: adapter_of(model, name) for name in ("default", *others)}


# Cases whose shards on four ranks are of another kind than on two: a matrix of two rows leaves two ranks without any.
ON_FOUR = ("embedding", "two", "experts")
OTHERS = tuple(case for case in CASES if case not in ON_FOUR)
# DoRA and experts are refused under tensor parallelism.
SPLIT = tuple(case for case in CASES if case not in ("dora", "experts"))
# Layers split by rows and by columns, an embedding, and whole trained layers; the others are split alike.
SPLIT_AND_SHARDED = ("modules_to_save", "embedding", "two")
OTHERS_SPLIT = tuple(case for case in SPLIT if case not in SPLIT_AND_SHARDED)


@pytest.mark.parametrize(
    "nproc, layout, names",
    [
        pytest.param(1, "ddp", tuple(CASES), id="ddp-1"),
        pytest.param(2, "ddp", tuple(CASES), id="ddp-2"),
        pytest.param(4, "ddp", ON_FOUR, id="ddp-4"),
        pytest.param(4, "ddp", OTHERS, id="ddp-4-others", marks=pytest.mark.thorough),
        pytest.param(2, "fsdp", tuple(CASES), id="fsdp-2"),
        pytest.param(4, "fsdp", ON_FOUR, id="fsdp-4"),
        pytest.param(4, "fsdp", OTHERS, id="fsdp-4-others", marks=pytest.mark.thorough),
        pytest.param(2, "fsdp full", ON_FOUR, id="fsdp full-2"),
        pytest.param(2, "fsdp full", OTHERS, id="fsdp full-2-others", marks=pytest.mark.thorough),
        pytest.param(2, "tp", SPLIT, id="tp-2"),
        pytest.param(4, "fsdp tp", SPLIT_AND_SHARDED, id="fsdp tp-4"),
        pytest.param(4, "fsdp tp", OTHERS_SPLIT, id="fsdp tp-4-others", marks=pytest.mark.thorough),
    ],
)
def test_training_and_checkpoint(ranks, nproc, layout, names, tmp_path):
    """The values of a plain loop; a checkpoint of the adapters alone, which peft reads and which resumes bit-equal."""
    ranks(nproc).run(train_and_resume, nproc, layout, names, tmp_path, env=on_cpu(), timeout=300)


def train_and_resume(nproc, layout, names, tmp_path):
    torch.set_default_dtype(torch.float64)
    options, shards = arguments(layout, nproc)
    accelerator = Accelerator(cpu=True, **options)
    for case in names:
        folder = tmp_path / case
        model, optimizer = prepared(accelerator, case)
        train(accelerator, model, optimizer, shards, 0, 2)
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, shards, 2, 4)
        last = accelerator.get_state_dict(model)
        accelerator.free_memory()

        model, optimizer = prepared(accelerator, case)
        accelerator.load_state(folder)
        train(accelerator, model, optimizer, shards, 2, 4)
        resumed = accelerator.get_state_dict(model)
        accelerator.free_memory()
        if accelerator.is_main_process:
            # DDP adds up the gradients of more than two ranks in another order in its first backward.
            assert distance(last, resumed) < (0 if nproc <= 2 else 1e-12) + 1e-300, case
            others = ["other"] if case == "two" else []
            expected = build(case)
            expected_optimizer = optimizer_of(expected)
            plain_steps(expected, expected_optimizer, 0, 2)
            for name, state in read_adapters(case, folder / "adapter", others).items():
                assert distance(adapter_of(expected, name), state) < 1e-8, (case, name)
            plain_steps(expected, expected_optimizer, 2, 4)
            assert distance(expected.state_dict(), last) < 1e-8, case
            files = json.loads((folder / "checkpoint_manifest.json").read_text())["manifest"][
                "files"
            ]
            sizes = {
                name: row["size"] for name, row in files.items() if name.endswith(".safetensors")
            }
            trained = 8 * sum(p.numel() for p in expected.parameters() if p.requires_grad)
            embedding = (
                8 * base(case).model.embed_tokens.weight.numel() if case == "embedding" else 0
            )  # as peft saves
            assert sum(sizes.values()) < 3.01 * trained + embedding + 20_000, (case, sizes)
        accelerator.wait_for_everyone()


def test_a_checkpoint_in_a_bucket(ranks, tmp_path):
    """It resumes bit-equal, and its copy in a folder is read by peft."""
    pytest.importorskip("obstore")
    with S3Server() as server:
        variables = on_cpu(**server.environment())
        ranks(2).run(resume_from_bucket, tmp_path / "copy", env=variables)


def resume_from_bucket(copy):
    torch.set_default_dtype(torch.float64)
    options, shards = arguments("fsdp", 2)
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = prepared(accelerator, "two")
    train(accelerator, model, optimizer, shards, 0, 2)
    place = accelerator.save_state("s3://bucket/run/adapters")
    train(accelerator, model, optimizer, shards, 2, 4)
    last = accelerator.get_state_dict(model)
    accelerator.free_memory()
    model, optimizer = prepared(accelerator, "two")
    accelerator.load_state(place)
    train(accelerator, model, optimizer, shards, 2, 4)
    resumed = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert distance(last, resumed) == 0
        copy_checkpoint(location(place, "place"), copy)
        expected = build("two")
        plain_steps(expected, optimizer_of(expected), 0, 2)
        for name, state in read_adapters("two", copy / "adapter", ["other"]).items():
            assert distance(adapter_of(expected, name), state) < 1e-8, name


def trained(layout, nproc, steps):
    """An accelerator and its model after so many steps."""
    torch.set_default_dtype(torch.float64)
    options, shards = arguments(layout, nproc)
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = prepared(accelerator, "modules_to_save")
    train(accelerator, model, optimizer, shards, 0, steps)
    return accelerator, model


def save(layout, folder):
    accelerator, _ = trained(layout, 4, 2)
    accelerator.save_state(folder)


def load(layout, folder):
    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True)
    _, shards = arguments(layout, accelerator.num_processes)
    model, optimizer = prepared(accelerator, "modules_to_save")
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, shards, 2, 4)
    return distance(plain("modules_to_save").state_dict(), accelerator.get_state_dict(model))


@pytest.mark.parametrize("layout", ["fsdp", "fsdp tp"])
def test_another_layout(ranks, layout, tmp_path):
    """Saved on four ranks, and continued by DDP on one and two."""
    ranks(4).run(save, layout, tmp_path, env=on_cpu())
    for nproc in (1, 2):
        assert max(ranks(nproc).run(load, "ddp", tmp_path, env=on_cpu())) < 1e-8


@on_ranks(2, env=on_cpu())
def test_tensor_parallelism_splits_lora_alone():
    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True, **arguments("tp", 2)[0])
    with pytest.raises(PrepareError, match=r"layers\.0\.self_attn\.q_proj, whose adapter is Dora"):
        accelerator.prepare(build("dora"))
    adalora = peft.AdaLoraConfig(target_modules=["down_proj"], total_step=10)
    with pytest.raises(PrepareError, match=r"layers\.0\.mlp\.down_proj, whose adapter is ADALORA"):
        accelerator.prepare(peft.get_peft_model(llama(), adalora))
    with pytest.raises(PrepareError, match="target_parameters"):
        accelerator.prepare(build("experts"))
    layer = accelerator.prepare(build("lora")).base_model.model.model.layers[0]
    shapes = {
        f"{name}.{part}": tuple(
            getattr(getattr(getattr(layer, block), name), part)["default"].weight.to_local().shape
        )
        for block, name, part in (("self_attn", "q_proj", "lora_B"), ("mlp", "down_proj", "lora_A"))
    }
    assert shapes == {"q_proj.lora_B": (16, 4), "down_proj.lora_A": (4, 24)}


@on_ranks(2, env=on_cpu())
def test_a_lost_shard_is_found(tmp_path, monkeypatch):
    """A tensor that is collected with the values of one rank only is not saved."""
    torch.set_default_dtype(torch.float64)
    options, shards = arguments("fsdp", 2)
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = prepared(accelerator, "lora")
    train(accelerator, model, optimizer, shards, 0, 1)
    gather = adapters.gather_on_host

    def with_one_shard(*args):
        joined = gather(*args)
        for name, full in joined.items():
            if "gate_proj.lora_B" in name:
                full[24:] = 0
        return joined

    monkeypatch.setattr(adapters, "gather_on_host", with_one_shard)
    with pytest.raises(CheckpointError, match=r"gate_proj\.lora_B\.default\.weight"):
        accelerator.save_state(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@on_ranks(2, thorough=[4])
def test_shards_of_all_dtypes_are_gathered_on_rank_0(nproc):
    PartialState(cpu=True)
    mesh, places = init_device_mesh("cpu", (nproc,)), {}
    full = {
        f"{dtype}, {dim}": (3 * torch.arange(35).view(5, 7)).to(dtype)
        for dtype in (
            torch.bfloat16,
            torch.bool,
            torch.float64,
            torch.int8,
            torch.float32,
            torch.complex64,
        )
        for dim in range(2)
    }
    tensors = {name: distribute_tensor(full[name], mesh, [Shard(int(name[-1]))]) for name in full}
    for _ in range(2):
        found = gather_on_host(tensors, torch.device("cpu"), places)
        assert found.keys() == (full.keys() if dist.get_rank() == 0 else set())
        assert all(torch.equal(found[name], full[name]) for name in found)


@on_ranks(2, env=on_cpu())
@pytest.mark.parametrize("layout", ["fsdp", "fsdp full"])
def test_the_functions_that_trainer_calls(layout, tmp_path):
    accelerator, model = trained(layout, 2, 1)
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, model, tmp_path, adapter_only=True)
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    model, _ = prepared(accelerator, "modules_to_save")
    load_fsdp_model(plugin, accelerator, model, tmp_path, adapter_only=True)
    loaded = accelerator.get_state_dict(model)
    assert not accelerator.is_main_process or distance(saved, loaded) == 0


@on_ranks(2, env=on_cpu())
def test_prompts_are_saved_with_their_model(tmp_path):
    torch.set_default_dtype(torch.float64)
    options, _ = arguments("fsdp", 2)
    accelerator = Accelerator(cpu=True, **options)
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = accelerator.prepare(peft.get_peft_model(base("lora"), config))
        if seed == 0:
            accelerator.save_state(tmp_path)
        else:
            accelerator.load_state(tmp_path)
        states.append(
            {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        )
        accelerator.free_memory()
    assert not accelerator.is_main_process or distance(*states) == 0


def test_resized_embeddings_are_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "base")

    def resized(seed):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.manual_seed(seed)  # of the rows that are added
        model.resize_token_embeddings(40)
        return model

    accelerator = Accelerator(cpu=True)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = accelerator.prepare(peft.get_peft_model(resized(0), config))
    accelerator.save_model(model, tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(resized(1), tmp_path / "adapter")
    assert distance(model.state_dict(), found.state_dict()) == 0


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("case", ["two", "embedding"])
def test_save_model_writes_the_files_of_peft(case, safe, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = build(case)
    model.save_pretrained(
        tmp_path / "peft", safe_serialization=safe, save_embedding_layers=case == "embedding"
    )
    accelerator.save_model(accelerator.prepare(model), tmp_path / "ours", safe_serialization=safe)
    names = {
        path.relative_to(tmp_path / "ours")
        for path in (tmp_path / "ours").rglob("*")
        if path.is_file()
    }
    assert names == {
        path.relative_to(tmp_path / "peft")
        for path in (tmp_path / "peft").rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    for name in names:
        ours, theirs = tmp_path / "ours" / name, tmp_path / "peft" / name
        if name.suffix == ".json":
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
        else:
            assert distance(_tensors(ours), _tensors(theirs)) == 0


def _tensors(path: Path):
    if path.suffix == ".bin":
        return torch.load(path)
    from safetensors.torch import load_file

    return load_file(path)


# --- what a checkpoint has to have entirely, and what is refused


def test_another_base(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(build("lora"))
    accelerator.save_state(tmp_path / "adapter")
    accelerator.free_memory()
    other = base("lora")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    model = build("lora", other)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = accelerator.prepare(model)
    with pytest.raises(
        CheckpointMismatch, match=r"1 of 21 frozen .* model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        accelerator.load_state(tmp_path / "adapter")
    assert distance(before, model.state_dict()) == 0
    accelerator.free_memory()
    accelerator.prepare(base("lora"))
    with pytest.raises(CheckpointMismatch, match="PeftModel"):
        accelerator.load_state(tmp_path / "adapter")
    accelerator.free_memory()
    accelerator.prepare(build("rslora"))
    with pytest.raises(CheckpointMismatch, match="gate_proj"):
        accelerator.load_state(tmp_path / "adapter")


@on_ranks(2, env=on_cpu())
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_base_that_was_written_in_the_program_that_saved(layout, tmp_path):
    """Also by `data`, which no version shows. A save afterwards has the checksums of the new values."""
    options, _ = arguments(layout, 2)
    accelerator = Accelerator(cpu=True, **options)
    model, _ = prepared(accelerator, "lora")
    frozen = [p for p in accelerator.unwrap_model(model).parameters() if not p.requires_grad]
    accelerator.save_state(tmp_path / "first")
    accelerator.load_state(tmp_path / "first")
    with torch.no_grad():
        frozen[0].add_(1)
    accelerator.save_state(tmp_path / "second")
    accelerator.load_state(tmp_path / "second")
    with pytest.raises(CheckpointMismatch, match=r"1 of .* frozen"):
        accelerator.load_state(tmp_path / "first")
    frozen[1].data.add_(1)
    with pytest.raises(CheckpointMismatch, match=r"1 of .* frozen"):
        accelerator.load_state(tmp_path / "second")


@pytest.mark.parametrize("change", ["unfrozen", "buffer", "hook", "compat"])
def test_a_base_that_changes_is_saved_too(change, tmp_path):
    """Of a model whose base trains or has statistics, where hooks take the weights, and in the API's own format."""
    accelerator = Accelerator(cpu=True)

    def make():
        model = build("rslora")
        if change == "unfrozen":
            model.base_model.model.model.norm.weight.requires_grad_(True)
        if change == "buffer":
            model.base_model.model.statistics = torch.nn.BatchNorm1d(2, affine=False)
        return model

    model, optimizer = prepared(accelerator, None, make())
    if change == "hook":
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    train(accelerator, model, optimizer, 1, 0, 2)
    accelerator.save_state(tmp_path, layout="compat" if change == "compat" else "native")
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "adapter").exists()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.free_memory()
    model, optimizer = prepared(accelerator, None, make())
    accelerator.load_state(tmp_path)
    assert distance(saved, model.state_dict()) == 0


@on_ranks(4)
def test_checksums_do_not_depend_on_the_layout():
    accelerator = Accelerator(cpu=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    tensors = {
        "rows": torch.randn(7, 5, dtype=torch.float32),
        "vector": torch.randn(33, dtype=torch.float32),
        "three": torch.randn(3, 4, 6, dtype=torch.float64),
        "half": torch.randn(16, 6).bfloat16(),
        "complex": torch.randn(4, 2, dtype=torch.complex64),
        "scalar": torch.tensor(3.0),
    }
    expected = checksums(tensors)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["rows"][[0, 1]] = changed["rows"][[1, 0]]
    assert [name for name, text in checksums(changed).items() if text != expected[name]] == ["rows"]
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sharded(mesh, *placements):
        return {
            name: distribute_tensor(tensor, mesh, [p(tensor) for p in placements])
            for name, tensor in tensors.items()
            if tensor.ndim and not tensor.is_complex()
        }

    first, last = lambda tensor: Shard(0), lambda tensor: Shard(tensor.ndim - 1)
    copies = lambda tensor: Replicate()  # noqa: E731
    layouts = [tensors, sharded(line, first), sharded(line, last), sharded(square, first, last)]
    layouts += [
        sharded(square, copies, first),
        sharded(square["tp"], first),
        sharded(square, first, first),
    ]
    for dimension in (0, 1):
        layer = torch.nn.Linear(5, 7, bias=False, dtype=torch.float32)
        split = distribute_tensor(tensors["rows"], square["tp"], [Shard(dimension)])
        layer.weight = torch.nn.Parameter(split)
        fully_shard(layer, mesh=square["dp"])
        layouts.append({"rows": layer.weight})
    for layout in layouts:
        found = checksums(layout, accelerator.device)
        assert found == {name: expected[name] for name in found}


def test_the_loop_of_a_model_without_adapters_is_as_before(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(llama())
    accelerator.save_state(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
