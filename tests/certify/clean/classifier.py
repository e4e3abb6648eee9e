# SPDX-License-Identifier: Apache-2.0
"""A tiny BERT that classifies padded sentences: attention whose gradient of the keys' biases cancels."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from accelerate import Accelerator
from accelerate.utils import set_seed


class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.randint(4, 13, (60,), generator=generator)
        self.tokens = torch.randint(2, 40, (60, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        mask = (torch.arange(12) < self.lengths[index]).long()
        tokens = self.tokens[index] * mask
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.sum() % 3}


def main():
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = BertConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=16, num_labels=3, pad_token_id=0
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(Sentences(), batch_size=5, shuffle=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 20)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


main()
