# SPDX-License-Identifier: Apache-2.0
"""The files in which each rank records a run: their names, fields and readers. Nothing here imports torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigurationError
from ..core.files import open_regular

# The folder of the records in the folder of a run.
FOLDER = "telemetry"
FORMAT = "accelerate-telemetry"
VERSION = 1
# Bytes before the first record of a file of steps: a JSON object, padded with spaces, that ends with a newline.
HEADER_SIZE = 4096

# One record of a file of steps. A record covers one optimizer step, or, in the older part of a long run, several
# neighbouring ones. Durations are seconds for each of these steps (their mean), samples and tokens those of this rank
# in all of them, and the other values those of the last of them. A value that is not known is NaN.
STEP = np.dtype(
    [
        ("time", "<f8"),  # seconds since 1970 at the end of the step
        ("step", "<u4"),  # optimizer steps that the run has made, this one included
        ("steps", "<u4"),  # steps that this record covers; 0: not written yet
        ("epoch", "<u4"),  # complete passes over the first prepared loader
        ("flags", "<u4"),  # bits of FLAG_*
        ("seconds", "<f4"),  # from the end of the last step to the end of this one
        ("data", "<f4"),  # waiting for the loader
        ("transfer", "<f4"),  # from the host to the device
        ("forward", "<f4"),
        ("backward", "<f4"),
        ("communication", "<f4"),  # in collectives that the backward does not hide
        ("optimizer", "<f4"),
        ("checkpoint", "<f4"),
        ("longest", "<f4"),  # seconds of the longest of these steps
        ("samples", "<f4"),
        ("tokens", "<f4"),
        ("loss", "<f4"),
        ("gradient_norm", "<f4"),
        ("learning_rate", "<f4"),
        ("device_memory", "<f4"),  # bytes allocated, at most since the last step
        ("host_memory", "<f4"),  # bytes resident
    ]
)
# What every version has.
_REQUIRED = ("time", "step", "steps", "flags", "seconds")
# What reading a damaged header raises.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
FLAG_SKIPPED = 1  # the optimizer skipped the step: fp16 gradients overflowed
FLAG_FIRST = 2  # the first step of a process: its durations include warm-up
# The durations of a step that add up to at most `seconds`, in the order in which charts stack them.
PHASES = ("data", "transfer", "forward", "backward", "communication", "optimizer", "checkpoint")


@dataclass(frozen=True)
class StepsHeader:
    """The header of a file of steps: the process that began it."""

    rank: int
    world_size: int
    host: str
    device: str
    started: float
    """Seconds since 1970."""
    version: int
    """Of the format."""
    details: Mapping[str, Any]
    """All fields, also those of newer versions."""


def steps_file(folder: Path, rank: int) -> Path:
    """The file of steps of a rank; `folder` is that of the run."""
    return folder / FOLDER / f"rank_{rank:05d}.steps"


def events_file(folder: Path, rank: int) -> Path:
    """The file of events of a rank: a JSON object a line, each with `time` (seconds since 1970) and `event` (text)."""
    return folder / FOLDER / f"rank_{rank:05d}.events.jsonl"


def header_bytes(rank: int, world_size: int, **details: Any) -> bytes:
    """The header of a file of steps. `details` has at least host, device and started."""
    fields = [[name, STEP[name].str] for name in STEP.names or ()]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "fields": fields,
        "rank": rank,
        "world_size": world_size,
        **details,
    }
    text = json.dumps(header).encode()
    if len(text) >= HEADER_SIZE:
        raise ConfigurationError(
            f"the header of a telemetry file has {len(text)} bytes; the maximum is "
            f"{HEADER_SIZE - 1}"
        )
    return text.ljust(HEADER_SIZE - 1) + b"\n"


def read_header(path: Path) -> tuple[StepsHeader, np.dtype[Any]]:
    """Read the header of a file of steps.

    Returns:
        The header, and the type of the file's records. A file of a newer version has more fields than `STEP`.

    Raises:
        ConfigurationError: the file is not one of telemetry, or its header is incomplete.
    """
    with open(path, "rb", opener=open_regular) as file:
        text = file.read(HEADER_SIZE)
    version: Any = VERSION
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise KeyError("format")
        version = fields.get("version", VERSION)
        record = np.dtype([(str(name), str(kind)) for name, kind in fields["fields"]])
        for name in _REQUIRED:
            record[name]
        for name in record.names or ():
            if name in (STEP.names or ()) and record[name] != STEP[name]:
                raise KeyError(name)
        if record.hasobject or len(text) != HEADER_SIZE:
            raise ValueError(path)
        header = StepsHeader(
            int(fields["rank"]),
            int(fields["world_size"]),
            str(fields.get("host", "")),
            str(fields.get("device", "")),
            float(fields.get("started", math.nan)),
            int(version),
            fields,
        )
    except _DAMAGED as error:
        if isinstance(version, int) and version > VERSION:
            raise ConfigurationError(
                f"{path} was written by a newer version of accelerate (format {version}, this one reads up to "
                f"{VERSION}): update accelerate"
            ) from error
        raise ConfigurationError(
            f"{path} is not a telemetry file of accelerate, or its first block is damaged"
        ) from error
    return header, record
