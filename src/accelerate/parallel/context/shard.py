# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sequence a rank holds, and tensors that hold this rank's rows for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...core.errors import ConfigurationError


@dataclass(frozen=True)
class SequenceLayout:
    """How `ranks` ranks share a sequence, and which of them this is.

    Balanced (context parallel): the sequence is cut into 2 x ranks chunks, and a rank holds chunk `rank` and, counted
    from the end, chunk `rank` again. Under a causal mask late rows see much and early rows little: so each rank
    computes the same. Not balanced (all-to-all): rank r holds the r-th part in one piece.
    """

    size: str  # the field that asked for it: cp_size or sp_size
    ranks: int
    rank: int
    balanced: bool

    @property
    def multiple(self) -> int:
        """What a sequence's length has to be a multiple of."""
        return self.ranks * (2 if self.balanced else 1)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which it holds them: their rows are in the sequence's order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    def check(self, length: int, what: str) -> None:
        """Raises ConfigurationError for a length that cannot be shared."""
        if length % self.multiple or length == 0:
            padded = (length // self.multiple + 1) * self.multiple
            factor = f"2 x {self.size}" if self.balanced else self.size
            raise ConfigurationError(
                f"{what} has {length} rows along the sequence: with {self.size}={self.ranks} their number must be a "
                f"multiple of {factor} = {self.multiple}. Pad or cut the sequences, to {padded} for example."
            )

    def rows(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The places in the whole sequence of the rows that this rank holds, in its order: (length / ranks,)."""
        chunk = length // self.multiple
        pieces = [torch.arange(i * chunk, (i + 1) * chunk, device=device) for i in self.chunks(self.rank)]
        return torch.cat(pieces)

    def take(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's rows of a tensor, in new memory."""
        chunk = whole.shape[dimension] // self.multiple
        pieces = [whole.narrow(dimension, i * chunk, chunk) for i in self.chunks(self.rank)]
        return torch.cat(pieces, dim=dimension)

    def join(self, parts: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
        """The whole tensor from the parts of all ranks, in rank order."""
        if not self.balanced:
            return torch.cat(list(parts), dim=dimension)
        halves = [part.chunk(2, dim=dimension) for part in parts]
        return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim=dimension)


def common_length(
    layout: SequenceLayout, buffers: Sequence[torch.Tensor], dimensions: Sequence[int], no_restore: set[torch.Tensor]
) -> int:
    """The length of the sequence that buffers share along their `dimensions`.

    Raises ConfigurationError, naming the buffer by its place in the list, for buffers that cannot be split together.
    """
    if len(buffers) != len(dimensions):
        raise ConfigurationError(
            f"maybe_context_parallel has {len(buffers)} buffers and {len(dimensions)} buffer_seq_dims: give one "
            "dimension for each buffer"
        )
    if not buffers:
        raise ConfigurationError(
            f"maybe_context_parallel has no buffers, and {layout.size}={layout.ranks}: nothing would be split. Give "
            "the tensors of the batch (token ids, labels, position ids) as buffers, with buffer_seq_dims=[1, ...]."
        )
    lengths = []
    for number, (buffer, dimension) in enumerate(zip(buffers, dimensions, strict=True)):
        if not isinstance(buffer, torch.Tensor):
            raise ConfigurationError(f"buffer {number} of maybe_context_parallel is a {type(buffer).__name__}")
        if buffer.requires_grad:
            raise ConfigurationError(
                f"buffer {number} of maybe_context_parallel takes part in autograd (parameter or activation): it "
                "cannot be split in place. Split what it is computed from."
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
    if any(all(buffer is not own for own in buffers) for buffer in no_restore):
        raise ConfigurationError("no_restore_buffers of maybe_context_parallel must be some of its buffers")
    return lengths[0]


@contextlib.contextmanager
def split_in_place(
    layout: SequenceLayout, buffers: Sequence[torch.Tensor], dimensions: Sequence[int], no_restore: set[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """In the block, `buffers` hold this rank's rows; after it they are whole, but for those of `no_restore`.

    Gives what each buffer held before. Nothing is copied back: the tensor shows other memory, and then its own again.
    A gradient that was saved for the shape of one side and is taken on the other raises torch's error of a changed
    tensor.
    """
    kept = {id(buffer) for buffer in no_restore}
    # One tensor may stand in the list twice (labels that are the token ids); it is split once.
    once = {id(buffer): (buffer, dimension) for buffer, dimension in zip(buffers, dimensions, strict=True)}
    whole = {key: buffer.data for key, (buffer, _) in once.items()}
    for buffer, dimension in once.values():
        _show(buffer, layout.take(buffer.data, dimension))
    try:
        yield [whole[id(buffer)] for buffer in buffers]
    finally:
        for key, (buffer, _) in once.items():
            if key not in kept:
                _show(buffer, whole[key])


def _show(buffer: torch.Tensor, data: torch.Tensor) -> None:
    buffer.data = data
    if not buffer.is_inference():
        torch.autograd.graph.increment_version(buffer)
