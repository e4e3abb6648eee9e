# SPDX-License-Identifier: Apache-2.0
"""Train all weights of a transformers model with FSDP2, compilation and activation checkpointing.

    accelerate launch --num_processes 8 examples/recipes/finetune_fsdp2.py --model Qwen/Qwen3-8B --data book.txt
    accelerate launch --num_processes 2 examples/recipes/finetune_fsdp2.py            # a tiny model, no download

Start the same command again to resume. `--output` gets the weights, which `from_pretrained` loads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from text_data import prompts, tiny_model, tokenizer_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from accelerate import Accelerator, DataLoaderConfiguration, export
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
    set_seed,
)


def windows(path: Path | None, model: str | None, length: int) -> list[dict[str, torch.Tensor]]:
    """Cut a text into windows of equal length, so that no token is padding."""
    text = (
        path.read_text()
        if path
        else "\n".join(prompt + completion for prompt, completion in prompts(None))
    )
    tokens = torch.tensor(tokenizer_of(model).encode(text))
    return [
        {"input_ids": window, "labels": window}
        for window in tokens.split(length)
        if len(window) == length
    ]


def main() -> None:
    arguments = parse_arguments()
    compiled = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",  # each block is a unit; transformers names its blocks
            cpu_ram_efficient_loading=True,  # only rank 0 reads the weights
            activation_checkpointing=True,  # activations inside of a block are recomputed in the backward
            state_dict_type="SHARDED_STATE_DICT",  # each rank saves its shard
        ),
        dynamo_plugin=compiled if arguments.compile else None,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            arguments.checkpoints,
            automatic_checkpoint_naming=bool(arguments.checkpoints),
            total_limit=2,
        ),
    )
    set_seed(0)
    # The shards are float32, whatever the checkpoint has; the blocks compute in the mixed precision of the run.
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model or tiny_model(accelerator), dtype=torch.float32
    )
    data = windows(arguments.data, arguments.model, arguments.length)
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    report = accelerator.resume() if arguments.checkpoints else None
    step = report.step if report else 0
    while step < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                mean = accelerator.reduce(loss.detach(), "mean").item()
                if step % arguments.log_every == 0:
                    accelerator.print(f"step {step:>4}  loss {mean:.4f}")
                if arguments.checkpoints and step % arguments.save_every == 0:
                    accelerator.save_state()
                if step == arguments.steps:
                    break

    if arguments.output:
        export(model, arguments.output)  # gathered one tensor at a time, for `from_pretrained`
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder of a causal language model, or its name on the Hub")
    parser.add_argument("--data", type=Path, help="text file")
    parser.add_argument("--output", type=Path, help="folder for the trained model")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder for checkpoints, from which the run resumes"
    )
    parser.add_argument("--save_every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], help="bf16 on GPUs")
    parser.add_argument(
        "--batch_size", type=int, default=8, help="windows in a batch, over all processes"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="batches in an optimizer step")
    parser.add_argument("--length", type=int, default=128, help="tokens in a window")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--log_every", type=int, default=5, help="steps between two printed losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
