# SPDX-License-Identifier: Apache-2.0
"""Inference on several processes: a model split into stages, and a model applied to a dataset."""

from typing import TYPE_CHECKING

from ..core.lazy import public_names
from .dataset import map_dataset
from .pipeline import prepare_pippy

__all__ = ["map_dataset", "prepare_pippy"]

if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)
