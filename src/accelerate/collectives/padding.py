# SPDX-License-Identifier: Apache-2.0
"""Pad tensors: to the same size on all ranks, or to a multiple of the number of processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core import trees
from ..core.errors import ConfigurationError
from ..core.messages import warn
from ..runtime.calls import Call
from ..runtime.channel import signature
from ..state import PartialState
from . import flat, transport, verify


class CannotPadNestedTensorWarning(UserWarning):
    """A nested (ragged) tensor cannot be padded and is not changed."""


def pad_across_processes(
    tensor: object,
    dim: int = 0,
    pad_index: int = 0,
    pad_first: bool = False,
) -> Any:
    """Pad nested tensors along a dimension to the largest size of any rank, so that they can be gathered.

    A tensor without that dimension is unchanged. A ragged tensor (`torch.nested`) is also unchanged, with a warning.

    Args:
        tensor: a tensor, or nested lists, tuples and mappings of tensors.
        dim: the dimension.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.

    Returns:
        The same structure with the padded tensors.

    Raises:
        TypeError: a value that is not a tensor.

    Example:
        logits = gather(pad_across_processes(logits, dim=1))
    """
    state = PartialState()
    options = ""
    if state.use_distributed:
        options = f"dim={dim}, pad_index={pad_index}, pad_first={pad_first}"
    if state.use_distributed and state.debug:
        verify.agree("pad_across_processes", tensor, options=options, free_dim=...)
    sizes: list[int] = []
    kinds: list[tuple[int, torch.dtype]] = []

    def record(leaf: Tensor) -> None:
        if leaf.is_nested:
            warn(
                "Cannot pad nested tensors without more information. Leaving unprocessed.",
                CannotPadNestedTensorWarning,
                every_rank=True,
            )
        elif -leaf.dim() <= dim < leaf.dim():
            sizes.append(leaf.shape[dim])
        kind = (leaf.dim(), leaf.dtype)
        kinds.append(kind)

    trees.map_leaves(record, tensor, strict="pad_across_processes")
    if not state.use_distributed:
        return tensor
    call = Call("pad_across_processes", tensor, options, ...)
    keys = flat.keys_of(flat.keys_in(tensor))
    sign = signature(call.operation, call.options, keys, tuple(kinds))
    group = transport.group_of(None)
    everywhere = transport.all_gather_numbers(sizes, group, sign, call)
    greatest = iter([max(sizes_of_ranks) for sizes_of_ranks in zip(*everywhere, strict=True)])

    def pad(leaf: Tensor) -> Tensor:
        if leaf.is_nested or not -leaf.dim() <= dim < leaf.dim():
            return leaf
        size = next(greatest)
        return padded(leaf, dim, size, pad_index, pad_first)

    return trees.map_leaves(pad, tensor)


def padded(
    leaf: Tensor,
    dim: int,
    size: int,
    pad_index: float = 0,
    pad_first: bool = False,
) -> Tensor:
    """`leaf` padded along `dim` to `size`; the tensor itself where it has that size."""
    missing = size - leaf.shape[dim]
    if missing == 0:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = missing
    padding = torch.full(shape, pad_index, dtype=leaf.dtype, device=leaf.device)
    if pad_first:
        return torch.cat([padding, leaf], dim=dim)
    return torch.cat([leaf, padding], dim=dim)


def pad_input_tensors(
    tensor: object,
    batch_size: int,
    num_processes: int,
    dim: int = 0,
) -> Any:
    """Pad nested tensors with zeros along a dimension, so that a batch divides by the number of processes.

    Args:
        tensor: a tensor, or nested lists, tuples and mappings of tensors.
        batch_size: the size of the batch. A shorter tensor is padded to the padded batch as well.
        num_processes: the number of processes.
        dim: the dimension.

    Returns:
        The same structure with the padded tensors.

    Raises:
        TypeError: a value that is not a tensor.
        ConfigurationError: a tensor is longer than the padded batch.
    """
    target = -(-batch_size // num_processes) * num_processes

    def pad(leaf: Tensor) -> Tensor:
        if not -leaf.dim() <= dim < leaf.dim():
            return leaf
        if leaf.shape[dim] > target:
            raise ConfigurationError(
                f"pad_input_tensors: a tensor of shape {list(leaf.shape)} is longer along dimension {dim} than the "
                f"batch of {batch_size} padded to {target}: pass the size of the batch"
            )
        return padded(leaf, dim, target)

    return trees.map_leaves(pad, tensor, strict="pad_input_tensors")
