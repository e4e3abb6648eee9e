# SPDX-License-Identifier: Apache-2.0
"""Adapt a small language model with LoRA of peft: the loop is that of any model, in each layout.

    python examples/fine_tuning/lora.py
    accelerate launch --num_processes 2 examples/fine_tuning/lora.py
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 examples/fine_tuning/lora.py

The base is made from a configuration and stays frozen. The checkpoint has the adapter and its optimizer; at the end,
the adapter is merged into the base and written for `from_pretrained`.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import accelerate
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed


def base() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )
    )  # fmt: skip


def counting(rows: int, length: int = 16) -> torch.Tensor:
    """Sequences of numbers that count up by a stride."""
    generator = torch.Generator().manual_seed(0)
    start, stride = (torch.randint(1, high, (rows, 1), generator=generator) for high in (64, 5))
    return (start + stride * torch.arange(length)) % 64


def train(model: torch.nn.Module, output: Path, merge: bool) -> None:
    # Each process computes its part of a batch.
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(counting(256), 16, shuffle=True)
    )
    for epoch in range(3):
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(
            f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
        )
    accelerator.save_state(output / "checkpoint")
    accelerator.save_model(model, output / "adapter")
    if merge:
        accelerate.export(model, output / "merged", merge_adapters=True)
    if accelerator.is_main_process:
        for folder in sorted(path for path in output.iterdir() if path.is_dir()):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"{folder.name}: {size / 2**10:.0f} KiB")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("runs/lora"), help="folder for what is saved"
    )
    args = parser.parse_args()
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    train(get_peft_model(base(), config), args.output, merge=True)


if __name__ == "__main__":
    main()
