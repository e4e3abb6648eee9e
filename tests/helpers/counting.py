# SPDX-License-Identifier: Apache-2.0
"""Counts the collectives of a block of code, and their bytes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Messages(TorchDispatchMode):
    """`counts`: by operation how many, and the bytes of the larger of its sides (whole tensors, or lists of parts)."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0].strip("_")
        if (
            function.namespace in ("c10d", "_c10d_functional")
            and not name.startswith("wait")
            and "wrap" not in name
        ):
            sides = [
                sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
                for arg in args
            ]
            self.note(name, max(sides))
        return function(*args, **(kwargs or {}))

    def note(self, name, size):
        number, sent = self.counts.get(name, (0, 0))
        self.counts[name] = (number + 1, sent + size)
