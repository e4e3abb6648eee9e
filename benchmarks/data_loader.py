# SPDX-License-Identifier: Apache-2.0
"""Time per batch of prepared loaders, compared with the torch loaders that they wrap."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from timing import alternate, emit
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate.data_loader import prepare_data_loader

BATCHES = 64
ROUNDS = 81
FEATURES, LABELS = torch.randn(64 * BATCHES, 16), torch.randint(0, 10, (64 * BATCHES,))


class Samples(Dataset):
    """A map-style dataset of dictionaries."""

    def __init__(self, length: int) -> None:
        self.samples = [{"x": FEATURES[index], "y": int(LABELS[index])} for index in range(length)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.samples[index]


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.samples = Samples(length).samples

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self.samples)


class Generator(Stream):
    """The same stream as a generator function, which might draw random numbers."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        yield from self.samples


def loaders(size: int) -> dict[str, DataLoader]:
    length = size * BATCHES
    return {
        f"loader: tensors, batch {size}": DataLoader(
            TensorDataset(FEATURES[:length], LABELS[:length]), batch_size=size, shuffle=True
        ),
        f"loader: samples, batch {size}": DataLoader(
            Samples(length), batch_size=size, shuffle=True
        ),
        f"loader: stream, batch {size}": DataLoader(Stream(length), batch_size=size),
        f"loader: generator stream, batch {size}": DataLoader(Generator(length), batch_size=size),
    }


def read(loader: DataLoader) -> None:
    for _ in loader:
        pass


def main() -> None:
    torch.set_num_threads(1)
    for size in (8, 64):
        for name, raw in loaders(size).items():
            own = prepare_data_loader(raw, num_processes=1, process_index=0)
            readers = {"raw": partial(read, raw), "own": partial(read, own)}
            seconds = alternate(readers, rounds=ROUNDS, repeat=1)
            emit(name, "us", seconds["raw"] / BATCHES, seconds["own"] / BATCHES)


if __name__ == "__main__":
    main()
