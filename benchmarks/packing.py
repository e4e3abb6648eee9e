# SPDX-License-Identifier: Apache-2.0
"""Packing of 100,000 documents of log-normal lengths into rows, and batches of them with equally many tokens.

The raw figures are those of a plain loop that fills rows, or shuffled batches, in the order of the documents.
"""

from __future__ import annotations

import random

import numpy as np
from timing import alternate, emit

DOCUMENTS, LENGTH, RANKS = 100_000, 8192, 8


def filled(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Rows that are filled one after the other."""
    rows: list[list[int]] = [[]]
    room = LENGTH
    for document in order:
        if lengths[document] > room:
            rows.append([])
            room = LENGTH
        rows[-1].append(document)
        room -= lengths[document]
    return rows


def shuffled(lengths: list[int]) -> list[list[int]]:
    order = list(range(DOCUMENTS))
    random.shuffle(order)
    return filled(order, lengths)


def sizes_of_steps(batches: list[list[int]], lengths: list[int]) -> tuple[float, float]:
    """The tokens of the mean batch and of the largest batch of a step: means over the steps."""
    steps = len(batches) // RANKS
    sizes = [sum(lengths[document] for document in batch) for batch in batches[: steps * RANKS]]
    by_step = np.array(sizes).reshape(steps, RANKS)
    return float(by_step.mean()), float(by_step.max(1).mean())


def main() -> None:
    try:
        from accelerate.utils import TokenBatchSampler, pack
    except ImportError:
        return  # the peer has none

    generator = np.random.default_rng(0)
    lengths = generator.lognormal(6, 1, DOCUMENTS).clip(1, LENGTH).astype(int).tolist()
    # Never read: their lengths are known.
    documents = [{"input_ids": [0] * lengths[0]}] * DOCUMENTS
    order = list(range(DOCUMENTS))
    seconds = alternate(
        {
            "raw": lambda: filled(order, lengths),
            "own": lambda: pack(documents, LENGTH, lengths=lengths),
        },
        rounds=7,
        warmup=1,
    )
    emit("packing", "ms", seconds["raw"], seconds["own"])
    needed = sum(lengths) / LENGTH
    emit("packing: rows", "", needed, len(pack(documents, LENGTH, lengths=lengths)))
    emit("packing: rows of the loop", "", needed, len(filled(order, lengths)))
    sampler = TokenBatchSampler(lengths, LENGTH)
    seconds = alternate(
        {"raw": lambda: shuffled(lengths), "own": lambda: list(sampler)}, rounds=7, warmup=1
    )
    emit("token batches", "us", seconds["raw"] / len(sampler), seconds["own"] / len(sampler))
    emit("token batches: balance", "", *sizes_of_steps(list(sampler), lengths))
    emit("token batches: balance of the loop", "", *sizes_of_steps(shuffled(lengths), lengths))


if __name__ == "__main__":
    main()
