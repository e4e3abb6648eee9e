# SPDX-License-Identifier: Apache-2.0
"""The owners of matrices: which rank updates which matrix, and how gradients, results and state travel.

`assign` balances the work, a `Matrix` is what an owner updates at once, `Owners` are the ranks that share matrices.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

# The part of a tensor that a shard is. By dimension: (first, one behind the last) index, several times for packed
# shards.
Ranges = tuple[tuple[int, int], ...]
Region = tuple[Ranges, ...]
# What travels in one message: an entry of the state of all matrices, of one dtype.
Kind = tuple[Any, torch.dtype]


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has the least work."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, owner = heapq.heappop(loads)
        owners[number] = owner
        heapq.heappush(loads, (load + costs[number], owner))
    return owners


class Matrix:
    """What an owner updates at once: some rows of a parameter, or all of them.

    Args:
        position: of the parameter among those of the optimizer.
        number: of the matrix in its parameter.
        rows: of the parameter's first dimension: the first one, and the one behind the last.
        shape: as the optimizer sees it.
        parameter: the parameter.

    Attributes:
        block: the shape of these rows in the parameter.
        cost: in proportion to the floating-point operations of its update.
        owner: the rank that updates it.
        parts: by rank, what indexes its part of the block. Other ranks than the owner know their own part alone.
        sources: the ranks whose parts are together the matrix.
        local_rows: the rows of this rank's shard of the parameter that belong to the matrix.
        stepped: what the optimizer of the owner steps. Between steps it is empty.
        state: of the optimizer, on the owner.
    """

    def __init__(
        self,
        position: int,
        number: int,
        rows: tuple[int, int],
        shape: tuple[int, ...],
        parameter: Any,
    ) -> None:
        self.position = position
        self.number = number
        self.rows = rows
        self.shape = shape
        self.block: tuple[int, ...] = (rows[1] - rows[0], *parameter.shape[1:])
        shorter, longer = sorted((shape[0], math.prod(shape[1:])))
        self.cost: float = float(shorter) ** 2 * longer
        self.owner: int = 0
        self.parts: dict[int, Any] = {}
        self.sources: list[int] = []
        self.local_rows: slice = slice(0)
        device = parameter.device
        if hasattr(parameter, "device_mesh"):
            # An offloaded shard is not where messages about it are sent from.
            device = torch.device(parameter.device_mesh.device_type)
        empty = torch.empty(0, dtype=parameter.dtype, device=device)
        self.stepped: nn.Parameter = nn.Parameter(empty)
        self.state: dict[Any, Any] = {}

    def empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Memory on the device of the matrix; without a shape, a tensor without elements."""
        return self.stepped.data.new_empty(shape or 0, dtype=dtype)

    def set_owner(self, owner: int, shards: Sequence[Region], rank: int) -> None:
        """Set the owner. `shards` are those of the parameter by rank, and `rank` is this one."""
        self.owner = owner
        seen = set()
        # What the owner has itself does not travel.
        for distance in range(len(shards)):
            other = (owner + distance) % len(shards)
            region, local_rows = _rows_of_shard(shards[other], self.rows)
            if other == rank:
                self.local_rows = local_rows
            if rank in (other, owner):
                self.parts[other] = _index(region, self.stepped.device)
            if region not in seen and all(region):
                seen.add(region)
                self.sources.append(other)


def _rows_of_shard(shard: Region, rows: tuple[int, int]) -> tuple[Region, slice]:
    """(the part of a shard in these rows, counted from the first of them; the rows of the shard that it has)."""
    first, last = rows
    ranges = []
    skipped = 0
    count = 0
    for start, stop in shard[0]:
        skipped += max(0, min(stop, first) - start)
        start = max(start, first)
        stop = min(stop, last)
        if start < stop:
            ranges.append((start - first, stop - first))
            count += stop - start
    return (tuple(ranges), *shard[1:]), slice(skipped, skipped + count)


def _index(region: Region, device: torch.device) -> tuple[Any, ...]:
    """What indexes a region of a tensor."""
    if not all(region):
        return tuple(slice(0) for _ in region)
    if all(len(ranges) == 1 for ranges in region):
        return tuple(slice(*ranges[0]) for ranges in region)
    axes = []
    for ranges in region:
        pieces = [torch.arange(start, stop, device=device) for start, stop in ranges]
        axes.append(torch.cat(pieces))
    return tuple(torch.meshgrid(*axes, indexing="ij"))


def region_of(parameter: Any, mesh: Any = None) -> Region:
    """The part of a parameter that this rank has, or would have if its place in the mesh were that in `mesh`."""
    if not hasattr(parameter, "device_mesh"):
        return tuple(((0, size),) for size in parameter.shape)
    from torch.distributed.tensor import distribute_tensor

    if mesh is None:
        mesh = parameter.device_mesh
    region: list[Ranges] = []
    for dimension, size in enumerate(parameter.shape):
        sizes = [1] * parameter.ndim
        sizes[dimension] = size
        numbers = torch.arange(size, device=mesh.device_type)
        numbers = numbers.view(sizes).expand(parameter.shape)
        laid_out = distribute_tensor(numbers, mesh, parameter.placements, src_data_rank=None)
        shard = laid_out.to_local()
        if not shard.numel():
            return tuple(() for _ in parameter.shape)
        shard = shard.transpose(0, dimension)
        indices = shard.reshape(len(shard), -1)[:, 0]
        region.append(_as_ranges(indices.tolist()))
    return tuple(region)


def _as_ranges(indices: Sequence[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    start = indices[0]
    for index, following in itertools.pairwise([*indices, -1]):
        if following != index + 1:
            ranges.append((start, index + 1))
            start = following
    return tuple(ranges)


def local_of(value: Any, parameter: Any) -> torch.Tensor:
    """This rank's shard of a value, which is laid out as a parameter, or entire."""
    if hasattr(value, "device_mesh"):
        if value.placements != parameter.placements:
            value = value.redistribute(placements=parameter.placements)
        value = value.to_local()
    elif hasattr(parameter, "device_mesh"):
        # Imports DTensor.
        from .materialize import local_shard

        value = local_shard(value, parameter)
    local: torch.Tensor = value
    return local


# A matrix with a value of it, or with the shard that a rank has of its parameter.
Piece = tuple[Matrix, torch.Tensor]


class Transfer(NamedTuple):
    """A part of a tensor on one rank that becomes a part of a tensor on another, or on the same one."""

    sender: int
    receiver: int
    source: Any
    source_part: Any
    target: Any
    target_part: Any


class Owners:
    """Ranks that share matrices of one dtype: they have all of them, or shards of them.

    Args:
        group: these ranks; None for this process alone.
        matrices: on all of them in the same order.
        parameters: those of the optimizer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        matrices: list[Matrix],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.group = group
        self.matrices = matrices
        self.rank: int = 0
        self.size: int = 1
        if group is not None:
            self.rank = group.rank()
            self.size = group.size()
        # The number of matrices of each parameter, by its position.
        self.counts: Mapping[int, int] = collections.Counter(matrix.position for matrix in matrices)
        shards = self._shards_of_ranks([parameters[position] for position in self.counts])
        owners = assign([matrix.cost for matrix in matrices], self.size)
        columns = {position: column for column, position in enumerate(self.counts)}
        for matrix, owner in zip(matrices, owners, strict=True):
            column = columns[matrix.position]
            matrix.set_owner(owner, [row[column] for row in shards], self.rank)
        # Whether an owner needs what it does not have.
        self.gathers: bool = any(matrix.sources != [matrix.owner] for matrix in matrices)

    def _shards_of_ranks(self, parameters: Sequence[Any]) -> list[list[Region]]:
        """By rank: its regions of the parameters."""
        is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        if is_sharded and dist.get_backend(self.group) == "fake":
            return self._traced_shards(parameters)
        regions = [region_of(parameter) for parameter in parameters]
        if is_sharded:
            return self._from_all(regions)
        return [regions] * self.size

    def _traced_shards(self, parameters: Sequence[Any]) -> list[list[Region]]:
        """As `_shards_of_ranks`, where the other ranks do not exist (`accelerate plan`)."""
        # Imports the fake mode.
        from ..torch_internals.tracing import with_values

        own = dist.get_rank()
        shards = []
        with with_values():
            for rank in range(self.size):
                other = own
                if self.group is not None:
                    other = dist.get_global_rank(self.group, rank)
                row = []
                for parameter in parameters:
                    mesh = parameter.device_mesh
                    ranks = mesh.mesh.clone()
                    ranks[mesh.mesh == other] = own
                    ranks[mesh.mesh == own] = other
                    row.append(region_of(parameter, dist.DeviceMesh(mesh.device_type, ranks)))
                shards.append(row)
        return shards

    def _from_all(self, value: Any) -> list[Any]:
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    # -- messages

    def _send(self, transfers: Sequence[Transfer], empty: torch.Tensor) -> None:
        """Make transfers in one message.

        Args:
            transfers: those of this rank, at least.
            empty: of their dtype, on the device that sends.
        """
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        targets: list[list[tuple[torch.Tensor, Any]]] = [[] for _ in range(self.size)]
        for transfer in transfers:
            if transfer.sender == self.rank:
                piece = transfer.source[transfer.source_part]
                pieces[transfer.receiver].append(piece.reshape(-1).to(empty.device))
            if transfer.receiver == self.rank:
                targets[transfer.sender].append((transfer.target, transfer.target_part))
        sent_sizes = []
        received_sizes = []
        for rank in range(self.size):
            sent_size = sum(piece.numel() for piece in pieces[rank])
            received_size = sum(target[part].numel() for target, part in targets[rank])
            sent_sizes.append(sent_size)
            received_sizes.append(received_size)
        all_pieces = itertools.chain.from_iterable(pieces)
        sent = torch.cat([empty, *all_pieces])
        received = sent
        if self.group is not None:
            received = sent.new_empty(sum(received_sizes))
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)
        all_targets = itertools.chain.from_iterable(targets)
        start = 0
        for target, part in all_targets:
            shape = target[part].shape
            stop = start + shape.numel()
            target[part] = received[start:stop].view(shape)
            start = stop

    def to_owners(self, shards: Sequence[Piece]) -> list[Piece]:
        """The values of the matrices that this rank owns.

        Args:
            shards: matrices, with this rank's shards of their parameters, all of one dtype.
        """
        values: list[Piece] = []
        transfers = []
        for matrix, shard in shards:
            rows = shard[matrix.local_rows]
            block = rows
            if self.gathers and self.rank == matrix.owner:
                block = matrix.empty(shard.dtype, *matrix.block)
            for sender in matrix.sources:
                part = matrix.parts.get(sender)
                transfers.append(Transfer(sender, matrix.owner, rows, ..., block, part))
            if self.rank == matrix.owner:
                values.append((matrix, block.reshape(matrix.shape)))
        if self.gathers and shards:
            matrix, shard = shards[0]
            self._send(transfers, matrix.empty(shard.dtype))
        return values

    def from_owners(self, values: Sequence[tuple[Matrix, Any, torch.Tensor]]) -> None:
        """Write values of matrices to each rank's shards.

        Args:
            values: matrices, with their values on the owners, and this rank's shards of their parameters, which all
                have one dtype.
        """
        if not values:
            return
        transfers = []
        for matrix, value, shard in values:
            if self.rank == matrix.owner:
                value = value.reshape(matrix.block)
            rows = shard[matrix.local_rows]
            for receiver, part in matrix.parts.items():
                transfers.append(Transfer(matrix.owner, receiver, value, part, rows, ...))
        matrix, _, shard = values[0]
        self._send(transfers, matrix.empty(shard.dtype))

    # -- state

    def take_over(self, optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
        """Move state that an optimizer has of the parameters, since it was loaded, to the owners."""
        loaded: dict[int, dict[Any, Any]] = {}
        for position in self.counts:
            state = optimizer.state.pop(parameters[position], None)
            if state:
                loaded[position] = state
        shards: dict[Kind, list[Piece]] = collections.defaultdict(list)
        for matrix in self.matrices:
            if matrix.position not in loaded:
                continue
            parameter = parameters[matrix.position]
            matrix.state = {}
            for key, value in loaded[matrix.position].items():
                if _is_shaped(value, parameter.shape):
                    shards[key, value.dtype].append((matrix, local_of(value, parameter)))
                elif self.rank == matrix.owner:
                    matrix.state[key] = self._own_value(matrix, value)
        for key, dtype in sorted(shards, key=str):
            for matrix, value in self.to_owners(shards[key, dtype]):
                matrix.state[key] = value.clone()

    def _own_value(self, matrix: Matrix, value: Any) -> Any:
        """What an entry of a parameter's state, which has not its shape, is for one of its matrices."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim and self.counts[matrix.position] > 1:
            value = value[matrix.number]
        return value.clone()

    def lay_out(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[Any, Any]]:
        """{position of a parameter: its state}, as a rank has it that steps all of its shards. All ranks call it."""
        entries: dict[int, dict[Any, Any]] = {}
        for row in self._from_all(self._entries()):
            entries.update(row)
        states: dict[int, dict[Any, Any]] = collections.defaultdict(dict)
        values: dict[Kind, list[tuple[Matrix, Any, torch.Tensor]]] = collections.defaultdict(list)
        for number in sorted(entries):
            matrix = self.matrices[number]
            parameter = parameters[matrix.position]
            state = states[matrix.position]
            for key, entry in entries[number].items():
                if not isinstance(entry, torch.dtype):
                    state.setdefault(key, []).append(entry)
                    continue
                if key not in state:
                    shard = local_of(parameter, parameter)
                    state[key] = torch.zeros_like(shard, dtype=entry)
                value = matrix.state.get(key)
                values[key, entry].append((matrix, value, state[key]))
        for kind in sorted(values, key=str):
            self.from_owners(values[kind])
        for position, state in states.items():
            for key, value in state.items():
                state[key] = _joined(value, parameters[position])
        return states

    def _entries(self) -> dict[int, dict[Any, Any]]:
        """{number of a matrix: its state} on the owner; for a tensor of the shape of the matrix, its dtype."""
        entries: dict[int, dict[Any, Any]] = {}
        for number, matrix in enumerate(self.matrices):
            for key, value in matrix.state.items():
                if _is_shaped(value, matrix.shape):
                    value = value.dtype
                elif isinstance(value, torch.Tensor):
                    value = value.cpu()
                entries.setdefault(number, {})[key] = value
        return entries


def _is_shaped(value: Any, shape: Sequence[int]) -> bool:
    """Whether an entry of a state has one element for each of a matrix or a parameter."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == shape


def _joined(value: Any, parameter: Any) -> Any:
    """An entry of the state of a parameter: a shard, or the values of its matrices."""
    if isinstance(value, torch.Tensor):
        if not hasattr(parameter, "device_mesh"):
            return value
        # Imports DTensor.
        from ..torch_internals.dtensor import as_dtensor

        return as_dtensor(value, parameter)
    first = value[0]
    if not isinstance(first, torch.Tensor) or not first.ndim:
        return first
    if len(value) > 1:
        first = torch.stack(value)
    return first.to(parameter.device)
