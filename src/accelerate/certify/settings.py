# SPDX-License-Identifier: Apache-2.0
"""What `accelerate certify` tells the processes of a run that it records."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..core import env, json_text
from ..core.errors import ConfigurationError

# A file with the settings. A run whose environment has it is recorded.
VARIABLE = "ACCELERATE_CERTIFY_FILE"

_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class ProcessSettings:
    """What a command tells the processes that it starts, in a file."""

    def write(self, path: Path) -> str:
        """Write the file that `read_as` reads. Returns its path."""
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return str(path)


@dataclass(frozen=True)
class Settings(ProcessSettings):
    """How a run is recorded.

    Fields:
        folder: of the record.
        steps: optimizer steps to record.
        shards: in a run that is a reference, the data shards of the layout, whose batches its processes join; else 0.
        layout: in any other run, the layout, such as "fsdp:2xtp:2".
        perturb: begin at parameters that are moved by one unit in the last place.
        dropout: keep dropout. Otherwise its probability is 0.
        dtype: of the model, such as "float64"; None leaves it as it is.
        exits: end the process after the last step. Otherwise the run goes on unrecorded.
    """

    folder: str
    steps: int
    shards: int = 0
    layout: str | None = None
    perturb: bool = False
    dropout: bool = False
    dtype: str | None = None
    exits: bool = True


def read() -> Settings | None:
    """The settings of this process; None in a run that is not recorded. Raises as `read_as`."""
    return read_as(Settings, VARIABLE, "accelerate certify")


def read_as(kind: type[_Settings], variable: str, command: str) -> _Settings | None:
    """The settings that a command has written for this process; None where its variable is not set.

    Raises:
        ConfigurationError: the variable names no such file.
    """
    path = env.get(variable)
    if path is None:
        return None
    try:
        return kind(**json_text.read(path, limit=1 << 16))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{variable}={path} is not a file that `{command}` wrote ({error}). Unset the variable"
        ) from None
