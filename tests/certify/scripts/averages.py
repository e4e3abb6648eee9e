# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights, whose predictions are targets of the training.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2 pp:2 cp:2.
"""

import torch
import torch.nn.functional as F
from models import Decoder, Documents, split_sequences
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = accelerator.track_average(model, decay=0.9)
    average.update()
    for batch in loader:
        with split_sequences(accelerator, batch):
            inputs = (batch["input_ids"], batch["position_ids"])
            with average.applied(), torch.no_grad():
                targets = model(*inputs)
            scores = model(*inputs)
            loss = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss + F.mse_loss(scores, targets))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
