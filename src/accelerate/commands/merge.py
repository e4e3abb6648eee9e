# SPDX-License-Identifier: Apache-2.0
"""`accelerate merge-weights CHECKPOINT OUTPUT`: the shards of a model become one file of weights."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..core.buckets import is_bucket
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import location, user_path
from ..core.objects import size_of
from .parser import command_parser, exit_on


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`, or add it to `subparsers`."""
    description = (
        "Merge the shards of a model that FSDP saved with SHARDED_STATE_DICT into "
        "model.safetensors. Further models of a checkpoint become model_1.safetensors and so on. "
        "Checksums are verified first if the checkpoint has them. 1 GiB of memory is usually "
        "enough."
    )
    made = command_parser("merge-weights", description, merge_command, subparsers)
    made.add_argument(
        "checkpoint_directory", help="A checkpoint or the folder pytorch_model_fsdp_0 in it."
    )
    made.add_argument(
        "output_path", help="Folder for the merged weights; it is created if it does not exist."
    )
    made.add_argument(
        "--unsafe_serialization",
        action="store_true",
        help="Write pytorch_model.bin with torch.save instead. This needs memory for the entire model.",
    )
    made.add_argument(
        "--remove_checkpoint_dir",
        action="store_true",
        help="Remove checkpoint_directory afterward. It is an error if the folder contains more "
        "than the merged shards.",
    )
    return made


# The name that every command has.
parser = merge_command_parser


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 if there is nothing valid to merge."""
    args = merge_command_parser().parse_args(argv)
    with exit_on(CheckpointError, ConfigurationError, OSError):
        merge_command(args)


def merge_command(args: argparse.Namespace) -> None:
    """Run the command with parsed arguments. Raises what `merge` raises."""
    from ..checkpointing.copying import local_models
    from ..checkpointing.merging import merge

    start = time.perf_counter()
    source = location(args.checkpoint_directory, "checkpoint_directory")
    output = user_path(args.output_path, "output_path")
    if args.remove_checkpoint_dir and is_bucket(args.checkpoint_directory):
        raise ConfigurationError(
            f"--remove_checkpoint_dir removes only local folders, not {source}"
        )
    with local_models(source, output) as folder:
        written = merge(folder, output, not args.unsafe_serialization, args.remove_checkpoint_dir)
    for file in written:
        print(f"{file.path}: {file.tensors} tensors, {size_of(file.size)}")
    print(f"merged in {time.perf_counter() - start:.1f} s")
    if args.remove_checkpoint_dir:
        print(f"removed {source}")
