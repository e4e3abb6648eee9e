# SPDX-License-Identifier: Apache-2.0
"""What the recipes for language models share: prompts with completions, and a tiny model that needs no network."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator


class ByteTokenizer:
    """Each byte of the text is a token; 256 ends a text."""

    eos_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def tokenizer_of(model: str | None) -> ByteTokenizer:
    """Return the tokenizer of a model on the Hub or in a folder, or one for the tiny model."""
    return AutoTokenizer.from_pretrained(model) if model else ByteTokenizer()


def tiny_model(accelerator: Accelerator, folder: Path = Path("runs/tiny-llama")) -> str:
    """Write a model with random weights and 0.2 million parameters, and return its folder."""
    if accelerator.is_main_process:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            use_cache=False,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    accelerator.wait_for_everyone()
    return str(folder)


def prompts(path: Path | None) -> list[tuple[str, str]]:
    """Return (prompt, completion) pairs of a JSON Lines file, or sums of two numbers."""
    if path:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [(row["prompt"], row["completion"]) for row in rows]
    numbers = random.Random(0)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(2000)]
    return [(f"{a} + {b} = ", str(a + b)) for a, b in pairs]


def tokens_of(
    pairs: list[tuple[str, str]], tokenizer: ByteTokenizer, length: int
) -> list[dict[str, list[int]]]:
    """Return token ids, and labels that are -100 on the prompt: only the completion counts for the loss."""
    rows = []
    for prompt, completion in pairs:
        first = tokenizer.encode(prompt)
        second = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
        ids, labels = (first + second)[:length], ([-100] * len(first) + second)[:length]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch, padded to its longest row."""
    length = max(len(row["input_ids"]) for row in rows)

    def column(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])

    mask = torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    )
    return {
        "input_ids": column("input_ids", 0),
        "attention_mask": mask,
        "labels": column("labels", -100),
    }
