# SPDX-License-Identifier: Apache-2.0
"""Temporary replacement of `scaled_dot_product_attention`, wherever models look it up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention import plain_attention

# Makes a replacement from the function that it replaces.
Wrapper = Callable[[Any], Any]

_NAME = "scaled_dot_product_attention"


def aliases(model: nn.Module) -> set[tuple[str, str]]:
    """(module, name) of each global of the modules that define a model's classes which is torch's attention."""
    sources = {source.__module__ for part in model.modules() for source in type(part).__mro__}
    return {
        (source, name)
        for source in sources
        if source in sys.modules and not source.startswith("torch.")
        for name, value in vars(sys.modules[source]).items()
        if value is plain_attention
    }


class AttentionPatch:
    """Replaces torch's attention while at least one block is open."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self.attend: Callable[..., torch.Tensor] = attend
        self.places: set[tuple[str, str]] = {(F.__name__, _NAME)}
        # Other functions that are replaced meanwhile: (module, name) -> wrapper.
        self.others: dict[tuple[str, str], Wrapper] = {}
        self._open_blocks = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def open(self) -> None:
        """Replace the functions when the first block opens."""
        self._open_blocks += 1
        if self._open_blocks > 1:
            return
        for source, name in self.places:
            self._replace(source, name, self._function())
        for (source, name), wrapper in self.others.items():
            former = getattr(sys.modules.get(source), name, None)
            if former is not None:
                self._replace(source, name, wrapper(former))

    def close(self) -> None:
        """Restore the functions when the last block closes."""
        self._open_blocks -= 1
        if self._open_blocks:
            return
        while self._replaced:
            module, name, value = self._replaced.pop()
            setattr(module, name, value)

    def _replace(self, source: str, name: str, value: object) -> None:
        module = sys.modules[source]
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def _function(self) -> Callable[..., torch.Tensor]:
        # A graph break in a compiled model: collectives inside an autograd function are not traced.
        if "torch._dynamo" in sys.modules and not hasattr(self.attend, "_torchdynamo_disable"):
            self.attend = torch.compiler.disable(self.attend)
        return self.attend
