# SPDX-License-Identifier: Apache-2.0
"""The model of a plan without its weights, and batches of the given shape."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
import traceback
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigurationError
from .layouts import PlannedLayout


@dataclass(frozen=True)
class BatchShape:
    """The shape of a batch: samples x the shape of one; `dtype` None is token ids for one dimension, else float32."""

    samples: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    @property
    def length(self) -> int:
        """Tokens of a sample, or the size of its first dimension."""
        return self.shape[0]

    def __str__(self) -> str:
        return "x".join(map(str, (self.samples, *self.shape)))

    def of_rank(self, layout: PlannedLayout) -> BatchShape:
        """What one rank reads at once. ConfigurationError if the layout cannot divide the batch."""
        share = layout.data_ranks * layout.accumulation
        if self.samples % share:
            raise ConfigurationError(
                f"{self.samples} samples are not divisible by {layout.data_ranks} data-parallel ranks"
                + (
                    f" x {layout.accumulation} accumulated batches"
                    if layout.accumulation > 1
                    else ""
                )
            )
        if layout.sequence_ranks > 1 and self.dtype is not None and self.dtype.is_floating_point:
            raise ConfigurationError(f"a batch of {self} does not have token sequences to split")
        # The balanced split of context parallelism cuts each sequence into two pieces a rank.
        pieces = layout.sequence_ranks * (2 if "cp" in dict(layout.sizes) else 1)
        if layout.sequence_ranks > 1 and self.length % pieces:
            raise ConfigurationError(
                f"sequences of {self.length} tokens are not divisible by {pieces}"
            )
        return replace(self, samples=self.samples // share)


def parse_batch(text: str) -> BatchShape:
    """Read `8x512`, or `8x3x224x224:float32`. ConfigurationError for anything else."""
    match = re.fullmatch(r"(\d+(?:x\d+)+)(?::(\w+))?", text.strip())
    if match:
        numbers = [int(number) for number in match[1].split("x")]
    else:
        numbers = []
    if match and match[2]:
        dtype = getattr(torch, match[2], None)
    else:
        dtype = None
    if (
        not numbers
        or min(numbers) < 1
        or (match and match[2] and not isinstance(dtype, torch.dtype))
    ):
        raise ConfigurationError(
            f"--batch {text!r} is not a batch: use samples x tokens (32x512), or samples x the "
            "shape of a sample and its dtype (32x3x224x224:float32)"
        )
    return BatchShape(numbers[0], tuple(numbers[1:]), dtype)


def from_function(text: str) -> nn.Module:
    """The model that `module:function` returns, on the meta device. ConfigurationError if it returns none."""
    module_name, _, name = text.partition(":")
    module = _imported(module_name, text)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(
            f"{text}: the module {module_name} ({module.__file__}) does not have a function "
            f"{name!r}"
        )
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise ConfigurationError(f"{text}() fails on the meta device: {_where(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{text}() returns {type(model).__name__}: it must return a torch.nn.Module"
        )
    return model


def _imported(name: str, text: str) -> types.ModuleType:
    """The module of `module:function`, from the current folder or the import path."""
    # It stays there for the processes that trace the model.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{text}: the module {name} cannot be imported, from {Path.cwd()} or the import path: {_where(error)}"
        ) from error


def _where(error: BaseException) -> str:
    """An error with the last line of a file before it; an import passes through lines of no file."""
    lines = [
        one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<")
    ]
    file = lines[-1].filename
    line = lines[-1].lineno
    if isinstance(error, SyntaxError) and error.filename:
        file = error.filename
        line = error.lineno
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({file}:{line})"


def fake_batch(model: nn.Module, batch: BatchShape) -> dict[str, Any]:
    """The arguments of the model's forward: its first parameter, and labels if it takes them."""
    inner: Any = getattr(model, "module", model)
    signature = inspect.signature(inner.forward)
    parameters = list(signature.parameters)
    name = getattr(inner, "main_input_name", None) or parameters[0]
    shape = (batch.samples, *batch.shape)
    dtype = batch.dtype
    if dtype is None:
        dtype = torch.float32
        if len(shape) == 2:
            dtype = torch.int64
    inputs = {name: torch.zeros(shape, dtype=dtype)}
    if "labels" in parameters:
        shape_of_labels = shape
        class_name = type(inner).__name__
        if "SequenceClassification" in class_name or "ImageClassification" in class_name:
            shape_of_labels = shape[:1]
        inputs["labels"] = torch.zeros(shape_of_labels, dtype=torch.int64)
    return inputs


def count(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss among a model's outputs; the mean of its first output if there is none."""
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while not isinstance(outputs, torch.Tensor):
        if isinstance(outputs, dict):
            outputs = outputs.values()
        outputs = next(iter(outputs))
    if outputs.dim() == 0:
        return outputs
    return outputs.float().mean()
