# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of modules, under whose wrapper names in state dicts stay, is in a private module only."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import checkpoint

names = list(nn.Sequential(nn.Linear(2, 2)).state_dict())
wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
assert list(wrapped.state_dict()) == names
if not hasattr(checkpoint, "checkpoint_wrapper"):
    raise SystemExit(
        "torch.utils.checkpoint has functions only: checkpoint_wrapper is still a prototype in "
        "torch.distributed.algorithms._checkpoint"
    )
