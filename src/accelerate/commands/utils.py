# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.utils`: the argument parser, under the name that the API gives it."""

from __future__ import annotations

from .parser import Parser as CustomArgumentParser

__all__ = ["CustomArgumentParser"]
