# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.accelerate_cli`: the entry point and the parsers, under the name that the API gives them."""

from __future__ import annotations

from .estimate import estimate_command_parser
from .launch import launch_command_parser
from .main import main

__all__ = ["estimate_command_parser", "launch_command_parser", "main"]
