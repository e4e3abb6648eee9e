# SPDX-License-Identifier: Apache-2.0
"""The files of the ledger in the folder of a run, their rows, and the reader. Nothing here imports torch.

Rank 0 writes what all ranks know alike. Other ranks write digests of their parameters only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..core.errors import ConfigurationError
from ..core.files import open_regular
from ..monitor.lines import Tail

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# The folder of the files in the folder of a run.
FOLDER = "ledger"
# Bytes of each row. The first row of a file is the header.
SIZE = 80
HEADER = b"accelerate-ledger 1\n".ljust(SIZE)
SKIPPED = 1  # of a step: the optimizer left it out; of a range: no backward followed its batches
LAST = 2  # the range ends with the last batch of its pass
DROPS = 4  # an incomplete last step is dropped

# A row that is to be written: its fields in their order.
Row: TypeAlias = dict[str, Any]
_COMMON = {"kind": "B", "flags": "B", "index": "H", "epoch": "I", "step": "q"}


class Kind:
    """A kind of row.

    Args:
        number: of the kind.
        fields: {name: type, as a letter of `struct`} behind the fields that all kinds have.
    """

    def __init__(self, number: int, **fields: str) -> None:
        letters = {**_COMMON, **fields}
        layout = "<" + "".join(letters.values())
        self.number = number
        self._struct = struct.Struct(layout)
        self._empty: Row = dict.fromkeys(letters, 0)
        self._empty["kind"] = number
        types = [(name, f"<{letter}") for name, letter in letters.items()]
        unused = SIZE - self._struct.size
        types.append(("unused", f"V{unused}"))
        self.dtype: np.dtype[Any] = np.dtype(types)

    def row(self, step: int) -> Row:
        """A row of a step, whose other fields are 0."""
        return {**self._empty, "step": step}

    def pack(self, row: Row) -> bytes:
        """The bytes of a row."""
        return self._struct.pack(*row.values()).ljust(SIZE, b"\0")


# A process of rank 0 begins.
START = Kind(0)
# A checkpoint of `step` was loaded.
LOADED = Kind(1)
# An optimizer step, followed by `rows` rows of ranges and optimizers. index: the attempt, from 1, as in
# `attempts.jsonl`.
STEP = Kind(
    2,
    rows="I",
    world_size="I",
    backwards="q",
    time="d",
    loss="d",
    gradient_norm="d",
    tokens="d",
)
# What a step has read of loader `index`. A value that is not known is NaN.
RANGE = Kind(
    3,
    first="q",  # of positions in the order of the epoch: samples, or batches of a batch sampler
    last="q",  # the position behind the last one
    total="d",  # the length of the order
    order="Q",  # differs between orders: the seed, or a checksum of the states that it is drawn from
    samples="d",  # of all ranks, without repeated ones
    batches="I",
    repeated="I",  # samples of the start of the epoch that fill the last step
    weight="d",  # of rank 0's last mean loss, relative to an equal share
)
# An optimizer at a step. index: which one.
OPTIMIZER = Kind(4, rate="d", lowest="d", highest="d", steps="Q")
# A digest of the parameters that a rank has of model `index` after a step.
DIGEST = Kind(5, digest="Q", world_size="I", bytes="Q")
KINDS = (START, LOADED, STEP, RANGE, OPTIMIZER, DIGEST)


def rows_file(folder: Path, rank: int) -> Path:
    """The file of a rank; `folder` is that of the run."""
    return folder / FOLDER / f"rank_{rank:05d}.rows"


def attempts_file(folder: Path) -> Path:
    """A JSON object a line for each start of the run: command, layout, versions, environment."""
    return folder / FOLDER / "attempts.jsonl"


@dataclass(frozen=True)
class Ledger:
    """The ledger of a run, without steps that were done again after a checkpoint was loaded.

    Fields:
        attempts: {number: start of the run}.
        steps, ranges: rows of the steps that count, in their order.
        superseded: steps that were done again.
    """

    folder: Path
    attempts: dict[int, dict[str, Any]]
    steps: Array
    ranges: Array
    superseded: Array

    def attempt_of(self, step: int) -> dict[str, Any]:
        """The start of the process that has made a step.

        Raises:
            ConfigurationError: the ledger has no such step.
        """
        numbers = self.steps["step"]
        for index in self.steps["index"][numbers == step].tolist():
            if index in self.attempts:
                return self.attempts[index]
        raise ConfigurationError(
            f"{self.folder} does not have step {step}: its steps are {numbers.min(initial=1)} to "
            f"{numbers.max(initial=0)}"
        )


def read(folder: Path) -> Ledger:
    """Read the ledger of a run.

    Raises:
        ConfigurationError: there is none, or it is damaged.
    """
    path = rows_file(folder, 0)
    data = read_rows(path)
    if data is None:
        hint = "train with --telemetry to write one"
        if not folder.is_dir():
            hint = "the folder does not exist"
        raise ConfigurationError(f"{folder} does not have a ledger, {FOLDER}/{path.name}: {hint}")
    kinds = data["kind"]
    numbers = data["step"]
    steps = data.view(STEP.dtype)
    is_step = kinds == STEP.number
    is_range = kinds == RANGE.number
    is_part = is_range | (kinds == OPTIMIZER.number)
    # Each step with the rows that follow it; a killed process may have left a part of them.
    group = np.cumsum(~is_part)
    parts = np.bincount(group[is_part], minlength=len(data) + 1)
    is_step &= steps["rows"] == parts[group]
    # A step replaces those with its number or a higher one before it, and a load those after its checkpoint.
    is_loaded = kinds == LOADED.number
    limits = np.full(len(data) + 1, np.iinfo("i8").max)
    limits[:-1][is_step] = numbers[is_step] - 1
    limits[:-1][is_loaded] = numbers[is_loaded]
    limits = np.minimum.accumulate(limits[::-1])[::-1]
    counts = is_step & (numbers <= limits[1:])
    is_range &= np.isin(group, group[counts])
    return Ledger(
        folder,
        {attempt["attempt"]: attempt for attempt in read_objects(attempts_file(folder))},
        steps[counts],
        data.view(RANGE.dtype)[is_range],
        steps[is_step & ~counts],
    )


def digests(folder: Path, rank: int) -> dict[tuple[int, int, int], int]:
    """{(ranks of the run, step, model): digest} of a rank; of a step that was done again the newest."""
    data = read_rows(rows_file(folder, rank))
    digests: dict[tuple[int, int, int], int] = {}
    if data is not None:
        is_digest = data["kind"] == DIGEST.number
        fields = data.view(DIGEST.dtype)[["world_size", "step", "index", "digest"]]
        for world_size, step, index, digest in fields[is_digest].tolist():
            digests[world_size, step, index] = digest
    return digests


def read_rows(path: Path) -> Array | None:
    """All rows of a file but one that was not written entirely; None where there is no file."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    header, data = data[:SIZE], data[SIZE:]
    if not HEADER.startswith(header):
        raise ConfigurationError(
            f"{path} is not a ledger, or another version of accelerate wrote it"
        )
    rows = np.frombuffer(data, START.dtype, len(data) // SIZE)
    if (rows["kind"] >= len(KINDS)).any():
        raise ConfigurationError(f"{path} is damaged: it has rows of an unknown kind")
    return rows


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines. A line that a killed process has not written entirely is left out."""
    tail = Tail(path)
    # Each call reads a part of a long file.
    for objects in iter(lambda: tail.read()[0], []):
        yield from objects
