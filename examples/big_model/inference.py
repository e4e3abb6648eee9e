# SPDX-License-Identifier: Apache-2.0
"""Apply a model to a dataset on all processes. Kill it and start it again: it computes what is missing.

python examples/big_model/inference.py --output predictions
accelerate launch --num_processes 2 examples/big_model/inference.py --output predictions
"""

import argparse
import inspect
import json
import string

import torch
from plan import Model

from accelerate import PartialState
from accelerate.inference import map_dataset


def samples() -> list[dict[str, object]]:
    """Texts of the standard library, as the bytes of one paragraph each."""
    texts = [inspect.getdoc(getattr(str, name)) or "" for name in dir(str)] + [string.__doc__ or ""]
    return [{"input_ids": list(text.encode()[:200]) or [0]} for text in texts * 4]


def collate(batch: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sample of the batch. Samples of similar length come together."""
    rows = [torch.tensor(sample["input_ids"]) for sample in batch]
    return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}


class Embedding(torch.nn.Module):
    """The mean of a model's scores over the bytes of a text, without padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = (ids != 0).unsqueeze(-1)
        scores = self.model(ids) * mask
        mean = scores.sum(1) / mask.sum(1).clamp(min=1)
        return {"bytes": mask.sum((1, 2)), "best": mean.argmax(-1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="predictions")
    given = parser.parse_args()
    state = PartialState()
    dataset = samples()
    files = map_dataset(
        Embedding(), dataset, given.output, batch_size=16, part_size=32, collate=collate
    )
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    state.print(
        f"{len(dataset)} samples, {len(rows)} rows in {len(files)} files, the first is {rows[0]}"
    )
    state.destroy_process_group()


if __name__ == "__main__":
    main()
