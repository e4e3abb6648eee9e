# SPDX-License-Identifier: Apache-2.0
"""Hooks for saved tensors cannot pass on what they leave alone: the hooks around them are not public."""

import torch
from torch.autograd.graph import saved_tensors_hooks

packed = []


def pack(tensor):
    packed.append(tensor)
    return tensor


def unchanged(tensor):
    return tensor


with saved_tensors_hooks(pack, unchanged), saved_tensors_hooks(unchanged, unchanged):
    torch.ones(2, requires_grad=True).square()
if not packed:
    raise SystemExit("only the innermost hooks for saved tensors are called")
