# SPDX-License-Identifier: Apache-2.0
"""What `accelerate certify` tells the processes of a run that it records."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from ..core import env, json_text
from ..core.errors import ConfigurationError

# A file with the settings. A run whose environment has it is recorded.
VARIABLE = "ACCELERATE_CERTIFY_FILE"


@dataclass(frozen=True)
class Settings:
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

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self)))


def read() -> Settings | None:
    """The settings of this process; None in a run that is not recorded.

    Raises:
        ConfigurationError: the variable names no such file.
    """
    path = env.get(VARIABLE)
    if path is None:
        return None
    try:
        return Settings(**json_text.read(Path(path), limit=1 << 16, numbers=True))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{VARIABLE}={path}: it is not a file that `accelerate certify` wrote ({error}). Unset the variable"
        ) from None
