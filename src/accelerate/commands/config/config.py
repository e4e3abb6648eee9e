# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.config.config`: the questions of `accelerate config` as functions, under the API's names."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from ...config import launch_file
from ..parser import command_parser
from . import main as main
from . import questions
from .config_args import ClusterConfig, SageMakerConfig, load_config_from_file


def get_user_input() -> ClusterConfig | SageMakerConfig:
    """Put the questions of `accelerate config`; return the answers without writing them."""
    data = questions.ask("Take these answers?")
    with tempfile.TemporaryDirectory() as folder:
        return load_config_from_file(launch_file.write(Path(folder) / "answers.yaml", data))


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`, or add it to `subparsers`."""
    made = command_parser(
        "config",
        "Answer questions and write a launch configuration.",
        config_command,
        subparsers,
    )
    made.add_argument(
        "--config_file", default=None, help="File to write instead of the default file."
    )
    return made


def config_command(args: argparse.Namespace) -> None:
    """Put the questions with parsed arguments, and write the file."""
    main([] if args.config_file is None else ["--config_file", args.config_file])
