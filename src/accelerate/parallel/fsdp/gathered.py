# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters made whole for a block of code, where DeepSpeed's ZeRO stage 3 has sharded them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside the block, parameters that ZeRO-3 shards are whole on every rank; any others are as they are.

    What rank `modifier_rank` writes into them reaches all ranks at the end of the block; None: nobody writes.
    `fwd_module` is the module whose forward uses them, if that is not the one that owns them.
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    # DeepSpeed marks each parameter that it shards.
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in listed):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(listed, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield
