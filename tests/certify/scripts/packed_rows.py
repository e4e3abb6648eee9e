# SPDX-License-Identifier: Apache-2.0
"""Rows of two documents, with a mean over the tokens that have a label.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2 cp:2 sp:2.
"""

import torch
import torch.nn.functional as F
from models import LENGTH, Decoder, Documents, split_sequences
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


class Rows(Documents):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        first = 1 + index % LENGTH
        # The last token of the first document has no next one.
        row["labels"][first - 1] = -100
        return {
            "input_ids": row["input_ids"],
            "labels": row["labels"],
            "seq_lens": torch.tensor([first, LENGTH - first]),
        }


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = Decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Rows(96), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        lengths = batch.pop("seq_lens")
        with accelerator.accumulate(model), split_sequences(accelerator, batch):
            scores = model(batch["input_ids"], seq_lens=lengths)
            labels = batch["labels"].flatten()
            count = (labels != -100).sum()
            loss = F.cross_entropy(scores.flatten(0, 1), labels, reduction="sum") / count
            accelerator.backward(loss, num_items=count)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
