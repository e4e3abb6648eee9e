# SPDX-License-Identifier: Apache-2.0
"""`accelerate export CHECKPOINT FOLDER`: the model of a checkpoint becomes what `from_pretrained`, or peft, reads."""

from __future__ import annotations

import time
import warnings

from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import location, user_path
from .parser import Parser, exit_on


def parser() -> Parser:
    """Return the parser of `accelerate export`."""
    made = Parser(
        prog="accelerate export",
        description="Write the model of a checkpoint, saved in any layout, to a folder that "
        "transformers' from_pretrained reads, or its adapters to a folder that peft "
        "reads. The checksums of the checkpoint are verified first. Only a few "
        "tensors are in memory at a time.",
    )
    made.add_argument(
        "checkpoint",
        help="A checkpoint or, if it has several models, the file or folder of one of them.",
    )
    made.add_argument("folder", help="Folder for the model; it is created if it does not exist.")
    made.add_argument(
        "--base",
        help="Name or folder of the model that the adapters were trained on. For a checkpoint "
        "without the configuration of its model: name or folder of a model with the same "
        "configuration.",
    )
    made.add_argument(
        "--merge_adapters",
        action="store_true",
        help="Merge the adapters into the base, and write the merged model.",
    )
    made.add_argument(
        "--max_shard_size",
        default="5GB",
        help="Maximum size of a weight file. Default: 5GB.",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 if the checkpoint cannot be exported so."""
    args = parser().parse_args(argv)
    # peft calls what transformers has deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    with exit_on(CheckpointError, ConfigurationError, ImportError, OSError):
        source = location(args.checkpoint, "checkpoint")
        folder = user_path(args.folder, "folder")
        if folder.is_file():
            raise ConfigurationError(f"folder={args.folder!r} is a file: pass a folder")
        from ..checkpointing.copying import local_models
        from ..checkpointing.export_checkpoint import export_checkpoint

        start = time.perf_counter()
        with local_models(source, folder) as checkpoint:
            written = export_checkpoint(
                checkpoint, folder, args.base, args.merge_adapters, args.max_shard_size
            )
    print(f"wrote {folder} in {time.perf_counter() - start:.1f} s: {written}")
