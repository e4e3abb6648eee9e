# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model with LoRA, or QLoRA with --four_bit, and save the adapter.

    python examples/recipes/finetune_lora.py                       # a tiny model, no download
    python examples/recipes/finetune_lora.py --model Qwen/Qwen3-0.6B --data questions.jsonl --four_bit
    accelerate launch --num_processes 2 examples/recipes/finetune_lora.py

Each line of the data is an object with "prompt" and "completion". Without --data the model learns sums.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from text_data import pad, prompts, tiny_model, tokenizer_of, tokens_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from accelerate import Accelerator, DataLoaderConfiguration, export
from accelerate.utils import set_seed


def load_model(name: str, four_bit: bool, rank: int, device: torch.device) -> torch.nn.Module:
    """Return the frozen model with LoRA layers."""
    if four_bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = AutoModelForCausalLM.from_pretrained(
            name, quantization_config=quantization, device_map={"": device}
        )
        # Norms in float32, and activations recomputed in the backward.
        model = prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(name)
    set_seed(0)  # the same adapter in each process
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    )


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.accumulate,
        exact=True,  # each sample once, and the same batches on any number of processes
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    name = arguments.model or tiny_model(accelerator)
    model = load_model(name, arguments.four_bit, arguments.rank, accelerator.device)
    tokenizer = tokenizer_of(arguments.model)
    rows = tokens_of(prompts(arguments.data), tokenizer, arguments.length)
    loader = DataLoader(rows, batch_size=arguments.batch_size, shuffle=True, collate_fn=pad)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr)
    accelerator.print(f"{sum(parameter.numel() for parameter in trained):,} parameters are trained")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, window = 0, torch.zeros(2, device=accelerator.device, dtype=torch.float64)
    while step < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                tokens = (batch["labels"][:, 1:] != -100).sum()
                accelerator.backward(
                    loss, num_items=tokens
                )  # a mean over tokens, however many each batch has
                window += torch.stack([loss.detach() * tokens, tokens])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                total, count = accelerator.reduce(window).tolist()
                window.zero_()
                if step % arguments.log_every == 0:
                    accelerator.print(f"step {step:>4}  loss of a token {total / count:.4f}")
                if step == arguments.steps:
                    break

    if arguments.output:
        export(model, arguments.output)  # every process calls it, and the main process writes
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder of a causal language model, or its name on the Hub")
    parser.add_argument("--data", type=Path, help="JSON Lines with prompt and completion")
    parser.add_argument("--output", type=Path, help="folder for the adapter")
    parser.add_argument(
        "--four_bit", action="store_true", help="QLoRA: the frozen weights in 4 bits (bitsandbytes)"
    )
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], help="bf16 on a GPU")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter's matrices")
    parser.add_argument(
        "--batch_size", type=int, default=16, help="samples in a batch, over all processes"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="batches in an optimizer step")
    parser.add_argument("--length", type=int, default=512, help="longest sample, in tokens")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--log_every", type=int, default=10, help="steps between two printed losses"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
