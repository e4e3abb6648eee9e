"""Train a causal language model on packed rows, exactly as on one document per row.

    python examples/features/packed.py
    accelerate launch --num_processes 2 examples/features/packed.py
    accelerate certify --layouts ddp:2 fsdp:2 cp:2 --cpu examples/features/packed.py

`pack` joins documents to rows, whose `seq_lens` are the lengths of the documents. The loop passes them to the prepared
model with the batch. Attention then stays inside of each document, and positions begin with 0 in each.
"""

import inspect
import string
import textwrap

import torch
import torch.nn.functional as F
from common import print_table
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import pack, set_seed

LENGTH, ROWS, LONGEST = 128, 4, 64


def documents() -> list[torch.Tensor]:
    """The paragraphs of two modules of the standard library, at most `LONGEST` bytes of each."""
    text = inspect.getsource(string) + inspect.getsource(textwrap)
    paragraphs = [paragraph.encode()[:LONGEST] for paragraph in text.split("\n\n")]
    return [torch.tensor(list(paragraph)) for paragraph in paragraphs if len(paragraph) > 1]


class Model(nn.Module):
    """A causal language model over bytes. Nothing in it knows of packed rows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        heads = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + seen.transpose(1, 2).flatten(2))


def train() -> tuple[Accelerator, list[tuple[int, int, float]]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    # The first token of a document has no label: nothing of this document comes before it.
    rows = pack(documents(), LENGTH, labels=True, drop_last=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # With split_batches=True this is the batch size of all processes together.
    loader = DataLoader(rows, ROWS, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = []
    for batch in loader:
        targets = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        # Without context parallelism the block has no effect.
        buffers = [batch["input_ids"], batch["position_ids"], targets]
        with accelerator.maybe_context_parallel(
            buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            logits = model(**batch)
            items = (targets != -100).sum()
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            accelerator.backward(total / items.clamp(min=1), num_items=items)
        optimizer.step()
        optimizer.zero_grad()
        sums = torch.stack([total.detach(), items, (batch["seq_lens"] > 0).sum()])
        loss, tokens, count = accelerator.reduce(sums, "sum").tolist()
        steps.append((int(count), int(tokens), loss / tokens))
    return accelerator, steps


def main() -> None:
    accelerator, steps = train()
    rows = [(step, *figures) for step, figures in enumerate(steps)]
    print_table(accelerator, ("step", "documents", "tokens with a label", "loss"), *rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()
