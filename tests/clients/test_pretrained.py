# SPDX-License-Identifier: Apache-2.0
"""`from_pretrained(device_map=..., offload_folder=...)` of transformers on a saved folder."""

from __future__ import annotations

import pytest
import torch
from packages import package
from toys import distance, llama

transformers = package("transformers")
MAPS = {
    "disk": {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
        "model.rotary_emb": "cpu", "lm_head": "disk",
    },
    "auto": "auto", "balanced": "balanced", "sequential": "sequential", "cpu": {"": "cpu"},
}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    model = llama().eval()
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    return model, tmp_path / "saved"


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("name", MAPS)
def test_device_map(name, saved, tmp_path):
    model, folder = saved
    tokens = torch.arange(12)[None]
    loaded = load(folder, device_map=MAPS[name], offload_folder=str(tmp_path / "offload"))
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta == (name == "disk")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    generated = [one.generate(tokens, max_new_tokens=4, do_sample=False) for one in (model, loaded)]
    assert torch.equal(*generated)


def test_memory_limit_and_saving_again(saved, tmp_path):
    """A limit offloads what does not fit; such a model is saved with all its weights."""
    model, folder = saved
    limited = load(
        folder,
        device_map="auto",
        max_memory={"cpu": 60_000},
        offload_folder=str(tmp_path / "offload"),
    )
    assert set(limited.hf_device_map.values()) == {"cpu", "disk"}
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(limited(tokens).logits, model(tokens).logits)
    limited.save_pretrained(tmp_path / "again")
    assert distance(load(tmp_path / "again").state_dict(), model.state_dict()) == 0.0
