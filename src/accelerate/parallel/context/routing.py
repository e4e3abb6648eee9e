# SPDX-License-Identifier: Apache-2.0
"""Another function in the place of `scaled_dot_product_attention`, wherever models look it up, for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention import plain_attention

# Makes a function from the one in whose place it stands.
Around = Callable[[Any], Any]

_NAME = "scaled_dot_product_attention"


def aliases(model: nn.Module) -> set[tuple[str, str]]:
    """(module, name) of each name that the sources of a model's classes have bound to torch's attention."""
    sources = {source.__module__ for part in model.modules() for source in type(part).__mro__}
    return {
        (source, name)
        for source in sources
        if source in sys.modules and not source.startswith("torch.")
        for name, value in vars(sys.modules[source]).items()
        if value is plain_attention
    }


class Route:
    """Puts a function in the place of torch's attention while at least one holder wants it."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self.attend = attend
        self.places: set[tuple[str, str]] = {(F.__name__, _NAME)}
        # Other functions that have to give way meanwhile: (module, name) -> what takes the function that was there.
        self.others: dict[tuple[str, str], Around] = {}
        self._holders = 0
        self._former: list[tuple[Any, str, Any]] = []

    def open(self) -> None:
        self._holders += 1
        if self._holders > 1:
            return
        for source, name in self.places:
            self._put(source, name, self._function())
        for (source, name), around in self.others.items():
            former = getattr(sys.modules.get(source), name, None)
            if former is not None:
                self._put(source, name, around(former))

    def close(self) -> None:
        self._holders -= 1
        if self._holders:
            return
        while self._former:
            module, name, value = self._former.pop()
            setattr(module, name, value)

    def _put(self, source: str, name: str, value: Any) -> None:
        module = sys.modules[source]
        self._former.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def _function(self) -> Callable[..., torch.Tensor]:
        # A compiled model leaves its graph here: collectives inside an autograd function are not traced.
        if "torch._dynamo" in sys.modules and not hasattr(self.attend, "_torchdynamo_disable"):
            self.attend = torch.compiler.disable(self.attend)
        return self.attend
