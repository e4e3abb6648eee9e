# SPDX-License-Identifier: Apache-2.0
"""torch's attention function, wherever a model finds it by name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from . import Internal

ATTENTION_NAMES = Internal(
    name="attention_names",
    what="the value of scaled_dot_product_attention in torch.nn.functional and in the modules that import it by name",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="docs/layouts/context.md, for a model of your own. A TorchFunctionMode does not see the calls that "
    "torch makes in its own functions, such as those of nn.TransformerEncoderLayer",
    without="models from outside transformers do not attend to the full sequence: their first forward raises",
    test="tests/torch_internals/test_attention.py::test_names_of_a_models_sources_are_replaced_too",
)

# torch's function, bound before it is replaced.
plain_attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

_NAME = "scaled_dot_product_attention"
# (module, name) of torch's own.
PUBLIC_NAME: tuple[str, str] = (F.__name__, _NAME)


def names_of_attention(model: nn.Module) -> set[tuple[str, str]]:
    """(module, name) of each global of the modules that define a model's classes which is torch's attention."""
    sources = set[str]()
    for module in model.modules():
        sources.update(base.__module__ for base in type(module).__mro__)
    names = set[tuple[str, str]]()
    for source in sources:
        if source not in sys.modules or source.startswith("torch."):
            continue
        for name, value in vars(sys.modules[source]).items():
            if value is plain_attention:
                names.add((source, name))
    return names


@contextlib.contextmanager
def replaced_attention(
    attend: Callable[..., torch.Tensor], names: Iterable[tuple[str, str]]
) -> Iterator[None]:
    """A block in which `names` have the value `attend`; with the row off, they stay."""
    former = {}
    if ATTENTION_NAMES.is_on:
        for source, name in names:
            former[source, name] = getattr(sys.modules[source], name)
            setattr(sys.modules[source], name, attend)
    try:
        yield
    finally:
        for (source, name), function in former.items():
            setattr(sys.modules[source], name, function)


@contextlib.contextmanager
def public_attention() -> Iterator[None]:
    """A block in which torch's function has its name: masks that are a causal bias look for it there."""
    current = getattr(F, _NAME)
    setattr(F, _NAME, plain_attention)
    try:
        yield
    finally:
        setattr(F, _NAME, current)
