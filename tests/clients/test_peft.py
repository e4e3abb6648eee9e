# SPDX-License-Identifier: Apache-2.0
"""peft: adapters that are prepared, saved, merged and offloaded, and trained under DDP, FSDP2 and FSDP1."""

from __future__ import annotations

import pytest
import torch
from packages import package
from rank_pool import on_ranks
from toys import Sequences, distance, llama, on_cpu, token_mean

from accelerate import Accelerator, FullyShardedDataParallelPlugin

peft = package("peft")
PRELOADED = ("transformers.models.llama.modeling_llama", "peft")
MAP = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip


def adapted(model=None, **options):
    model = model or llama()
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, **options)
    )


def probe(model):
    with torch.no_grad():
        return model.eval()(torch.arange(12)[None]).logits


def plain(batches):
    """LoRA trained by a loop in plain PyTorch."""
    model = adapted().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for rows in batches:
        token_mean(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def run(accelerator, folder):
    """Prepare, train 4 global batches of 8 rows, save the adapter; the weights of the adapter and its folder."""
    data, nproc = Sequences(32, length=8), accelerator.num_processes
    model = adapted()
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        accelerator.state.fsdp_plugin.auto_wrap_policy = peft.utils.other.fsdp_auto_wrap_policy(
            model
        )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=8 // nproc, collate_fn=list)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for rows in loader:
        count = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
        accelerator.backward(token_mean(model, rows), num_items=count)
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        adapter = peft.get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=state)
        expected = peft.get_peft_model_state_dict(adapted())
        assert {name: value.shape for name, value in adapter.items()} == {
            n: v.shape for n, v in expected.items()
        }
    accelerator.unwrap_model(model).save_pretrained(
        folder, state_dict=state, is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    return data


@on_ranks(1, 2, env=on_cpu())
@pytest.mark.parametrize("version", [None, 2, 1])
def test_training(nproc, version, tmp_path):
    torch.set_default_dtype(torch.float64)
    if version is not None and nproc == 1:
        pytest.skip("FSDP needs two ranks")
    plugin = None
    if version is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            cpu_ram_efficient_loading=False,
            use_orig_params=True if version == 1 else None,
        )
    data = run(Accelerator(cpu=True, fsdp_plugin=plugin), tmp_path / "adapter")
    expected = plain([data.rows[start : start + 8] for start in range(0, 32, 8)])
    found = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    saved = peft.get_peft_model_state_dict(found)
    # peft reads an adapter in float32.
    assert distance(peft.get_peft_model_state_dict(expected), saved) < 1e-7
    logits = probe(found)
    assert float((probe(expected) - logits).abs().max()) < 1e-6
    assert torch.allclose(probe(found.merge_and_unload()), logits, atol=1e-9)


@pytest.fixture
def offloaded(tmp_path):
    """A function that loads a Llama with modules on the disk, and the folder of an adapter for it."""
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "base")
    adapted(init_lora_weights=False).save_pretrained(tmp_path / "adapter")

    def load(name="offload"):
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", device_map=MAP, offload_folder=str(tmp_path / name)
        )

    return load, tmp_path / "adapter"


@pytest.mark.parametrize(
    "placement",
    [
        {"device_map": {f"base_model.model.{name}": place for name, place in MAP.items()}},
        {"max_memory": {"cpu": 40_000}},
    ],
    ids=["map", "limit"],
)
def test_adapter_of_an_offloaded_model(placement, offloaded, tmp_path, monkeypatch):
    """peft dispatches the model again, with its adapter, and merges into weights on the disk."""
    # It writes merged weights to a path in the current folder.
    monkeypatch.chdir(tmp_path)
    load, folder = offloaded
    expected = probe(peft.PeftModel.from_pretrained(llama(), folder))
    model = load()
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    model = peft.PeftModel.from_pretrained(
        model, folder, offload_folder=str(tmp_path / "second"), **placement
    )
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(probe(model), expected)
    assert torch.allclose(probe(model.merge_and_unload()), expected, atol=1e-5)
