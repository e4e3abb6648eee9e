# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sequence a rank has, and tensors that hold this rank's rows inside of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...core.errors import ConfigurationError


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence is split over `ranks` ranks, and which of them this is.

    Balanced (context parallel): the sequence is cut into 2 x ranks chunks, and a rank has chunk `rank` from the front
    and chunk `rank` from the end. Under a causal mask late rows see many keys and early rows few, so all ranks compute
    the same amount. Not balanced (all-to-all): rank r has the r-th chunk of `ranks`.
    """

    size: str  # the option that requested it: cp_size or sp_size
    ranks: int
    rank: int
    balanced: bool

    def __str__(self) -> str:
        return f"{self.size}={self.ranks}"

    @property
    def multiple(self) -> int:
        """The length of a sequence must be a multiple of this."""
        return self.ranks * (2 if self.balanced else 1)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of the sequence."""
        if self.balanced:
            return (rank, 2 * self.ranks - 1 - rank)
        return (rank,)

    def check(self, length: int, what: str) -> None:
        """Raises ConfigurationError for a length that cannot be split."""
        if length % self.multiple or length == 0:
            padded = (length // self.multiple + 1) * self.multiple
            factor = f"2 x {self.size}" if self.balanced else self.size
            raise ConfigurationError(
                f"{what} has {length} rows along the sequence: with {self} their number must be a "
                f"multiple of {factor} = {self.multiple}. Pad or truncate the sequences, for "
                f"example to {padded}."
            )

    def rows(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The positions in the full sequence of this rank's rows: (length / ranks,)."""
        chunk = length // self.multiple
        pieces = [
            torch.arange(i * chunk, (i + 1) * chunk, device=device) for i in self.chunks(self.rank)
        ]
        return torch.cat(pieces)

    def take(self, full: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's rows of a tensor, in new memory."""
        chunk = full.shape[dimension] // self.multiple
        pieces = [full.narrow(dimension, i * chunk, chunk) for i in self.chunks(self.rank)]
        return torch.cat(pieces, dim=dimension)

    def join(self, shards: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
        """The full tensor from the shards of all ranks, in rank order."""
        if not self.balanced:
            return torch.cat(list(shards), dim=dimension)
        halves = [shard.chunk(2, dim=dimension) for shard in shards]
        return torch.cat(
            [head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim=dimension
        )


def common_length(
    layout: SequenceLayout,
    buffers: Sequence[torch.Tensor],
    dimensions: Sequence[int],
) -> int:
    """The length of the sequence that buffers have along their `dimensions`.

    Raises:
        ConfigurationError: naming the index of a buffer, for buffers that cannot be split together.
    """
    if len(buffers) != len(dimensions):
        raise ConfigurationError(
            f"maybe_context_parallel has {len(buffers)} buffers and {len(dimensions)} "
            "buffer_seq_dims: pass one dimension for each buffer"
        )
    if not buffers:
        raise ConfigurationError(
            f"maybe_context_parallel does not have buffers, and {layout}: nothing would be split. "
            "Pass the tensors of the batch (token ids, labels, position ids) as buffers, with "
            "buffer_seq_dims=[1, ...]."
        )
    lengths = []
    for number, (buffer, dimension) in enumerate(zip(buffers, dimensions, strict=True)):
        if buffer.requires_grad:
            raise ConfigurationError(
                f"buffer {number} of maybe_context_parallel takes part in autograd (parameter or "
                "activation), so it cannot be split in place. Split the tensors from which it is "
                "computed."
            )
        if not -buffer.dim() <= dimension < buffer.dim():
            raise ConfigurationError(
                f"buffer_seq_dims[{number}]={dimension}: buffer {number} has the shape {tuple(buffer.shape)}"
            )
        lengths.append(buffer.shape[dimension])
    for number, length in enumerate(lengths):
        if length != lengths[0]:
            raise ConfigurationError(
                f"buffers of maybe_context_parallel belong to one sequence: buffer 0 has {lengths[0]} rows along "
                f"dimension {dimensions[0]}, buffer {number} has {length} along dimension {dimensions[number]}"
            )
    return lengths[0]


@contextlib.contextmanager
def split_in_place(
    layout: SequenceLayout,
    buffers: Sequence[torch.Tensor],
    dimensions: Sequence[int],
    no_restore: set[torch.Tensor],
) -> Iterator[list[torch.Tensor]]:
    """A block in which `buffers` hold this rank's rows. After it they are restored, except those in `no_restore`.

    Yields the former content of each buffer. Nothing is copied back: the tensor's `data` is replaced and restored. A
    backward that saved a buffer inside the block and runs outside of it (or the reverse) raises torch's error about
    a tensor that was modified in place.
    """
    kept = {id(buffer) for buffer in no_restore}
    # One tensor may be in the list twice (labels that are the token ids); it is split once.
    once = {
        id(buffer): (buffer, dimension)
        for buffer, dimension in zip(buffers, dimensions, strict=True)
    }
    full = {key: buffer.data for key, (buffer, _) in once.items()}
    for buffer, dimension in once.values():
        _set_data(buffer, layout.take(buffer.data, dimension))
    try:
        yield [full[id(buffer)] for buffer in buffers]
    finally:
        for key, (buffer, _) in once.items():
            if key not in kept:
                _set_data(buffer, full[key])


def _set_data(buffer: torch.Tensor, data: torch.Tensor) -> None:
    buffer.data = data
    if not buffer.is_inference():
        torch.autograd.graph.increment_version(buffer)
