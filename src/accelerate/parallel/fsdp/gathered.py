# SPDX-License-Identifier: Apache-2.0
"""Parameters that DeepSpeed's ZeRO stage 3 has sharded, gathered for a block of code."""

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
    """A block in which parameters that ZeRO-3 shards are unsharded on every rank. Others are left as they are.

    Args:
        params: one parameter or several.
        modifier_rank: the rank whose changes all ranks get at the end of the block; None if none writes.
        fwd_module: the module whose forward uses the parameters, if it is not their owner.
        enabled: whether to gather at all.
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    # DeepSpeed marks each parameter that it shards.
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in listed):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(listed, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield
