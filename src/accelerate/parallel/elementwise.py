# SPDX-License-Identifier: Apache-2.0
"""Which optimizers step each element by itself; apart from what uses it, since that imports DTensor."""

from __future__ import annotations

import torch

# By their exact class, since a subclass may do anything. Adafactor, Muon and LBFGS look at whole tensors.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an optimizer of torch's own whose step of an element needs no other element."""
    return type(optimizer) in ELEMENTWISE
