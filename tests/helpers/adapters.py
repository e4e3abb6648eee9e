# SPDX-License-Identifier: Apache-2.0
"""Models of peft that tests train in each layout, and the same loop in plain PyTorch."""

from __future__ import annotations

import torch
from toys import Sequences, llama, next_token_loss, token_mean

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

ROWS = Sequences(32, length=8).rows
SIZE = 8  # rows of a global batch


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, pad_token_id=0,
        experts_implementation="eager",
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.loss_function = next_token_loss
    return model


# name -> (the base, the options of each adapter)
LAYERS = ["q_proj", "down_proj"]
CASES = {
    "lora": (llama, [{"target_modules": "all-linear"}]),
    "dora": (llama, [{"target_modules": LAYERS, "use_dora": True}]),
    "rslora": (llama, [{"target_modules": LAYERS, "use_rslora": True, "layers_to_transform": [1]}]),
    "modules_to_save": (llama, [{"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]),
    "embedding": (llama, [{"target_modules": ["embed_tokens", "q_proj"]}]),
    "tokens": (llama, [{"target_modules": ["q_proj"], "trainable_token_indices": [1, 2, 3]}]),
    "two": (llama, [{"target_modules": ["q_proj"]}, {"target_modules": LAYERS, "r": 2}]),
    "experts": (
        mixtral,
        [{"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}],
    ),
}


def base(name):
    """The base of a case, whose norms compute in its dtype: those of transformers compute in float32."""
    model = CASES[name][0]()
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, key, torch.nn.RMSNorm(child.weight.numel(), eps=1e-6))
    return model


def build(name, model=None):
    """The model of a case with its adapters, of which no matrix is zero."""
    import peft

    model = base(name) if model is None else model
    torch.manual_seed(1)
    first, *others = [peft.LoraConfig(**{"r": 4, **options}) for options in CASES[name][1]]
    model = peft.get_peft_model(model, first, autocast_adapter_dtype=False)
    for config in others:
        model.add_adapter("other", config, autocast_adapter_dtype=False)
        model.base_model.set_adapter(["default", "other"])
    for key, parameter in model.named_parameters():
        if "lora_B" in key or "lora_embedding_A" in key:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def plain(name, steps=4, model=None):
    """A case after some steps of a plain loop."""
    model = build(name) if model is None else model
    plain_steps(model, optimizer_of(model), 0, steps)
    return model


def plain_steps(model, optimizer, first, last):
    """The steps from `first` to `last` of the plain loop."""
    for step in range(first, last):
        token_mean(model, ROWS[step * SIZE : (step + 1) * SIZE]).backward()
        optimizer.step()
        optimizer.zero_grad()


def arguments(layout, nproc):
    """The arguments of `Accelerator` for a layout, and its shards of the data."""
    sizes = {"tp_size": 2} if "tp" in layout else {}
    options = {}
    if "fsdp" in layout:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT" if "full" in layout else "SHARDED_STATE_DICT",
        )  # fmt: skip
        sizes.update({"dp_shard_size": nproc // 2} if "tp" in layout else {})
    if "tp" in layout:
        options["parallelism_config"] = ParallelismConfig(**sizes)
    return options, nproc // sizes.get("tp_size", 1)


def train(accelerator, model, optimizer, shards, first=0, last=4):
    """The steps from `first` to `last` of the same loop, on this rank's rows of each batch."""
    size = SIZE // shards
    index = accelerator.process_index // (accelerator.num_processes // shards)
    for step in range(first, last):
        start = step * SIZE + index * size
        rows = ROWS[start : start + size]
        count = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
        accelerator.backward(token_mean(model, rows), num_items=count)
        optimizer.step()
        optimizer.zero_grad()
