# SPDX-License-Identifier: Apache-2.0
"""Two backwards after one forward.

Certified in ddp:2 tp:2 cp:2.
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
    for batch in loader:
        with split_sequences(accelerator, batch):
            scores = model(batch["input_ids"], batch["position_ids"])
            loss = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss, retain_graph=True)
            accelerator.backward(0.1 * scores.square().mean())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
