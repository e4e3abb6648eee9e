# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors that do not depend on the layout: each rank computes its shard's part, and parts add up.

The checksum is the sum over all words of 64 bits, times a multiplier for the index in each dimension, modulo 2**64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.tensor_files import dtype_name
from ..placement.subclasses import inner_tensors
from .gathering import local_blocks

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements whose products are in memory at a time


def checksums(
    tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> dict[str, str]:
    """{name: dtype, shape and checksum} of plain tensors and DTensors; a quantized tensor is the tensors inside it.

    Args:
        tensors: the same names on all ranks.
        device: where ranks with shards add up their parts; every rank then calls this. None: this process has all.
    """
    pieces: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for part, inner in inner_tensors(tensor.detach()).items():
            if part:
                pieces[f"{name}.{part}"] = inner
            else:
                pieces[name] = inner
    if not pieces:
        return {}
    has_plain = device is None or dist.get_rank() == 0
    parts = [_sum_of(tensor, has_plain) for tensor in pieces.values()]
    totals = torch.stack([part.to(device or "cpu") for part in parts])
    if device is not None:
        dist.all_reduce(totals)
    texts = {}
    for (name, tensor), total in zip(pieces.items(), totals.tolist(), strict=True):
        unsigned = total & (1 << 64) - 1
        texts[name] = f"{dtype_name(tensor.dtype)} {list(tensor.shape)} {unsigned:016x}"
    return texts


@torch.no_grad()
def _sum_of(tensor: torch.Tensor, has_plain: bool) -> torch.Tensor:
    """The part of this rank's elements; those of a plain tensor are its part if `has_plain`."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if isinstance(tensor, DTensor):
        for block, offsets in local_blocks(tensor):
            total = total + _sum_of_block(block, offsets)
    elif has_plain:
        total = _sum_of_block(tensor, (0,) * tensor.ndim)
    return total


def _sum_of_block(tensor: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    rows = torch.atleast_1d(tensor)
    count = rows.shape[0]
    step = max(1, _BLOCK * count // rows.numel())
    for start in range(0, count, step):
        # The index of the first element in each dimension.
        firsts = [*offsets, *[0] * (rows.ndim - len(offsets))]
        firsts[0] += start
        words, firsts[-1] = _words(rows[start : start + step], firsts[-1])
        for dimension in reversed(range(words.ndim)):
            factors = _multipliers(
                firsts[dimension],
                words.shape[-1],
                dimension,
                words.device,
            )
            words = (words * factors).sum(-1)
        total = total + words
    return total


def _words(block: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
    """The bits of a block as integers of 64 bits, and the index of its first one in the last dimension.

    A word that two ranks share is the sum of both, each with zeros for the other's elements.
    """
    element_size = block.element_size()
    bits = block.contiguous().view(_INTEGERS[element_size])
    size = 8 // element_size
    before = first % size
    after = -(first + bits.shape[-1]) % size
    if before or after:
        bits = nn.functional.pad(bits, (before, after))
    words = bits.view(torch.int64)
    return words, first // size


# Tensors of a model have few shapes. The largest result has 32 MiB.
@functools.lru_cache(maxsize=16)
def _multipliers(first: int, count: int, dimension: int, device: torch.device) -> torch.Tensor:
    """An odd number for each index of a dimension (the finalizer of splitmix64)."""
    indices = torch.arange(first, first + count, dtype=torch.int64, device=device)
    mixed = indices + (dimension << 40)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << 64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1


def differing(saved: Mapping[str, str], present: Mapping[str, str]) -> Iterable[str]:
    """A description of each tensor whose checksum differs, or that only one side has."""
    for name in {**present, **saved}:
        if saved.get(name) != present.get(name):
            yield f"{name} (saved {saved.get(name, 'none')}, here {present.get(name, 'none')})"
