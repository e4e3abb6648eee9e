# SPDX-License-Identifier: Apache-2.0
"""Datasets, samplers and loops for the tests of the data path."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    get_worker_info,
)


class Ids(Dataset):
    """Sample `i` is `{"id": i, "noise": a draw from torch's global generator}`; notes what was read."""

    def __init__(self, length: int, noisy: bool = False) -> None:
        self.length = length
        self.noisy = noisy
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.read.append(index)
        noise = torch.rand(2) if self.noisy else torch.zeros(2)
        return {"id": torch.tensor(index), "noise": noise}


class ManyIds(Ids):
    """The same, read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class Numbers(IterableDataset):
    """The numbers below `length`, parted between workers; shuffled by torch's global generator where asked."""

    def __init__(self, length: int, shuffled: bool = False) -> None:
        self.length = length
        self.shuffled = shuffled
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist() if self.shuffled else range(self.length)
        info = get_worker_info()
        part = slice(None) if info is None else slice(info.id, None, info.num_workers)
        for number in order[part]:
            self.read += 1
            yield number


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.length


class StatefulNumbers(IterableDataset):
    """The numbers below `length`, going on from a position; notes how many were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0
        self.resumed = False
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.position = 0
        self.resumed = False
        info = get_worker_info()
        index, count = (0, 1) if info is None else (info.id, info.num_workers)
        while self.position * count + index < self.length:
            number = self.position * count + index
            self.position += 1
            self.read += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.resumed = True


class Shuffle(Sampler):
    """The indices below `length`, in an order that subclasses draw."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class PythonShuffle(Shuffle):
    """Shuffles with Python's and NumPy's generators, as users do."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())


class EagerOrder(Shuffle):
    """Draws its whole order as soon as it is iterated, as samplers that group by length do."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class EagerBatches:
    """A batch sampler with batches of its own lengths, which draws as soon as it is iterated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return len(self._cut(list(range(self.length))))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._cut(torch.randperm(self.length).tolist()))

    def _cut(self, order: list[int]) -> list[list[int]]:
        lengths = itertools.cycle((1, 3, 2))
        batches = []
        while order:
            take = next(lengths)
            batches.append(order[:take])
            order = order[take:]
        return batches


def drawn(source: str, below: int) -> int:
    """A number from a global generator: `python`'s, `numpy`'s or `torch`'s."""
    if source == "python":
        return random.randrange(below)
    if source == "numpy":
        return int(np.random.randint(below))
    return int(torch.randint(below, ()))


class DrawsAsItGoes(Shuffle):
    """Draws each index when it is asked for it, from the ones that are left."""

    def __init__(self, length: int, source: str) -> None:
        super().__init__(length)
        self.source = source

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(drawn(self.source, len(left)))


class BatchesAsItGoes(Sampler):
    """Batches of one to three samples, each drawn when it is asked for."""

    def __init__(self, length: int, source: str, size: int | None = None) -> None:
        self.length = length
        self.source = source
        self.size = size
        # What batch samplers mostly have; its order is not that of these batches.
        self.sampler = SequentialSampler(range(length))

    def __len__(self) -> int:
        return sum(1 for _ in self._lengths())

    def _lengths(self) -> Iterator[int]:
        lengths, left = (
            itertools.cycle((1, 3, 2) if self.size is None else (self.size,)),
            self.length,
        )
        while left:
            length = min(left, next(lengths))
            left -= length
            yield length

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(self.length))
        for length in self._lengths():
            yield [left.pop(drawn(self.source, len(left))) for _ in range(length)]


class OwnGenerator(Shuffle):
    """Draws each index from a generator of its own, of Python's or NumPy's kind."""

    def __init__(self, length: int, generator: Any) -> None:
        super().__init__(length)
        self.rng = generator

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(int(self.rng.random() * len(left)))


class StreamAsItGoes(IterableDataset):
    """The numbers below `length`, shuffled through a buffer with a global generator."""

    def __init__(self, length: int, source: str) -> None:
        self.length = length
        self.source = source

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        info = get_worker_info()
        for number in (
            range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        ):
            buffer.append(number)
            if len(buffer) == 5:
                yield buffer.pop(drawn(self.source, 5))
        while buffer:
            yield buffer.pop(drawn(self.source, len(buffer)))


def seeded(loader: DataLoader) -> DataLoader:
    """`loader`, whose sampler gets the generator that `prepare` gives it on several processes."""
    sampler = (
        loader.sampler
        if loader.batch_sampler is None
        else getattr(loader.batch_sampler, "sampler", None)
    )
    if getattr(sampler, "generator", False) is None:
        number = torch.empty((), dtype=torch.int64).random_().item()
        sampler.generator = torch.Generator().manual_seed(number)
    return loader


def ids(batch: Any) -> list[int]:
    """The sample numbers of a batch of any of these datasets."""
    found = batch["id"] if isinstance(batch, dict) else batch
    return found.tolist() if isinstance(found, torch.Tensor) else list(found)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def states() -> tuple[Any, ...]:
    """All global generators, comparable with ==."""
    kind, keys, *rest = np.random.get_state()
    return (random.getstate(), kind, keys.tolist(), *rest, torch.get_rng_state().tolist())


def keep_states() -> Callable[[], None]:
    """What puts all global generators back to where they are now, as loading a checkpoint does."""
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)

    return put_back


def epoch(loader: DataLoader, draws: bool = False) -> list[Any]:
    """The batches of a pass as plain data; with `draws` the loop draws between them, as dropout would."""
    found = []
    for batch in loader:
        values = (
            {key: value.tolist() for key, value in batch.items()}
            if isinstance(batch, dict)
            else ids(batch)
        )
        found.append((values, torch.rand(1).item()) if draws else values)
    return found
