# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` under FSDP2 and DeepSpeed: the weights of plain PyTorch, and a resume in mid-epoch."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from rank_pool import on_ranks
from toys import (
    Sequences,
    StopAfter,
    batches_read,
    distance,
    llama,
    on_cpu,
    plain_training,
    trained,
    transformers_4,
    unsharded_state,
)  # fmt: skip

transformers = pytest.importorskip("transformers")
PRELOADED = ("transformers.models.llama.modeling_llama", "transformers.trainer")
pytestmark = pytest.mark.thorough
needs_deepspeed = pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="needs deepspeed"
)


def fsdp(**options):
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **options}
    if transformers_4():
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **wrapped}}
    return {"fsdp": True, "fsdp_config": wrapped}


def zero(stage, **options):
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    optimization = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3}
    return {
        "deepspeed": {"zero_optimization": optimization, **dict.fromkeys(names, "auto"), **options}
    }


LAYOUTS = {
    "fsdp2": fsdp(),
    "fsdp2_sharded_state": fsdp(state_dict_type="SHARDED_STATE_DICT"),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3_bf16": {**zero(3, bf16={"enabled": "auto"}), "bf16": True},
}


@pytest.mark.timeout(300)
@on_ranks(2, env=on_cpu(), timeout=150)
@pytest.mark.parametrize(
    "name",
    [name if "fsdp" in name else pytest.param(name, marks=needs_deepspeed) for name in LAYOUTS],
)
def test_layout(name, tmp_path):
    precise = name.startswith("fsdp")
    torch.set_default_dtype(torch.float64 if precise else torch.float32)
    limit = 1e-8 if precise else 0.02 if "bf16" in name else 5e-5
    options = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 4,
        **LAYOUTS[name],
    }  # fmt: skip
    data = Sequences(48)
    straight = trained(tmp_path / "straight", data, **options)
    batches = [[data.rows[row] for row in batch] for batch in batches_read(data, 4, 2)]
    found = unsharded_state(straight)
    trained(tmp_path / "cut", Sequences(48), callbacks=[StopAfter(4)], **options)
    resumed = unsharded_state(trained(tmp_path / "cut", Sequences(48), resume=True, **options))
    if straight.accelerator.is_main_process:
        torch.set_default_dtype(torch.float64 if precise else torch.float32)
        assert distance(plain_training(llama(), batches, 2).state_dict(), found) < limit
        assert distance(found, resumed) == 0.0
