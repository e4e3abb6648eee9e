# SPDX-License-Identifier: Apache-2.0
"""Optimizers of entire matrices, whose work is shared: each matrix has one owner among the ranks that have it.

In a step, gradients travel to the owners in one message, each owner runs the user's optimizer on its matrices, and the
results travel back in another message. The state of a matrix stays with its owner. To be saved and loaded, it is laid
out as the parameters are (`laid_out`).
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import CheckpointError, PrepareError
from ..optimizer import parameters_of
from ..runtime.agreement import Agreement
from ..runtime.passing import others_went_on
from ..state import PartialState
from ..torch_internals.optimizer_step import replace_step_below_hooks

Shapes = Callable[[torch.Tensor, dict[str, Any]], Sequence[int] | None]
# By dimension: the (first, one behind the last) indices of a rank's shard. Packed shards have several such ranges.
Place = tuple[tuple[tuple[int, int], ...], ...]

_REGISTERED: dict[Any, Shapes | None] = {torch.optim.Muon: None}
# Classes whose state replicas give to owners. Without this, each replica has all of it, and one may save it alone.
_BY_REPLICAS: set[Any] = set()
_SHARED = "shared_step"
# Seconds for which a rank waits for the others in `state_dict`.
STATE_TIMEOUT = 600


def register_matrix_optimizer(cls: type, shapes: Shapes | None = None) -> None:
    """Share the work of an optimizer of entire matrices between ranks.

    If parameters are sharded, the work of `torch.optim.Muon` is shared without this call. Under DDP it is shared
    after `register_matrix_optimizer(torch.optim.Muon)`: each process then has a part of the state, so all processes
    must call `optimizer.state_dict()`.

    Call it before `prepare`. The update of a matrix must not depend on another matrix, and a closure has to be called
    once, before anything else.

    Args:
        cls: the class of the optimizer. Subclasses with the same step are included.
        shapes: how a parameter is viewed as matrices, with one process too. It is called with a parameter and its
            group, and returns a shape of two dimensions, or of three for several matrices that are updated one by one;
            None for a parameter that is updated element by element. By default the optimizer gets each parameter
            unchanged.

    Raises:
        TypeError: `cls` is not a class with a step, or `shapes` is not a function.

    Example:
        register_matrix_optimizer(MuonWithAdam, shapes=lambda p, group: p.shape if group["use_muon"] else None)
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
        raise TypeError(
            f"register_matrix_optimizer takes an optimizer class with a step method, not {cls!r}"
        )
    if shapes is not None and not callable(shapes):
        raise TypeError(
            f"register_matrix_optimizer({cls.__name__}): shapes={shapes!r} is not a function of a parameter and its "
            "group"
        )
    _REGISTERED[cls] = shapes
    _BY_REPLICAS.add(cls)


def _registered_class(optimizer: Any) -> Any:
    """The registered class whose step an optimizer has."""
    kind = type(optimizer)
    bases: tuple[Any, ...] = kind.__mro__
    for base in bases:
        if base in _REGISTERED and inspect.unwrap(base.step) is inspect.unwrap(kind.step):
            return base
    return None


def has_views(optimizer: Any) -> bool:
    """Whether an optimizer was registered with shapes, which it sees with one process too."""
    kind = _registered_class(optimizer)
    return kind is not None and _REGISTERED[kind] is not None


def check_matrices(optimizers: Iterable[Any], models: Iterable[nn.Module] = ()) -> None:
    """Raise PrepareError for a parameter that a registered optimizer cannot update as matrices."""
    names: dict[int, str] = {}
    for model in models:
        names.update((id(parameter), name) for name, parameter in model.named_parameters())
    for optimizer in optimizers:
        if _registered_class(optimizer) is None:
            continue
        for number, (group, parameter) in enumerate(_grouped(optimizer)):
            _shape_of(optimizer, group, parameter, names.get(id(parameter), f"parameter {number}"))


def _grouped(optimizer: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _shape_of(
    optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, name: str
) -> tuple[int, ...] | None:
    """How an optimizer sees a parameter; None where it updates it element by element."""
    kind = _registered_class(optimizer)
    shapes = _REGISTERED[kind]
    shape = tuple(parameter.shape)
    if shapes is not None:
        viewed = shapes(parameter, group)
        if viewed is None:
            return None
        shape = tuple(viewed)
    about = (
        f"{type(optimizer).__name__} updates matrices, but {name} has the shape "
        f"{list(parameter.shape)}"
    )
    if len(shape) < 2:
        raise PrepareError(
            f"{about}. Pass it to another optimizer, such as AdamW. If this optimizer updates it "
            "element by element, return None for it in the shapes of register_matrix_optimizer"
        )
    if shapes is None:
        return shape
    rows = parameter.shape[0]
    if len(shape) == 3:
        rows %= shape[0]
    else:
        rows = 0
    if len(shape) > 3 or rows or math.prod(shape) != parameter.numel():
        raise PrepareError(
            f"{about}. The shapes of register_matrix_optimizer view it as {list(shape)}: return a shape of two "
            "dimensions with as many elements, or of three whose first one divides the rows of the parameter"
        )
    return shape


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has the least work."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, owners[number] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[number], owners[number]))
    return owners


class Matrix:
    """What an owner updates at once: rows of a parameter.

    Args:
        position: of the parameter among those of the optimizer.
        number: of the matrix in its parameter.
        rows: of the parameter's first dimension: the first one, and the one behind the last.
        shape: as the optimizer sees it.
        parameter: the parameter.
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
        # By rank: its part of the matrix. Other ranks than the owner keep their own alone.
        self.parts: dict[int, Place] = {}
        # The rows of this rank's shard that belong to it.
        self.local_rows: slice = slice(0)
        # The ranks whose parts are together the matrix.
        self.sources: list[int] = []
        # What the optimizer of the owner steps. Between steps it has no memory.
        # An offloaded shard is not where messages about it are sent from.
        device = parameter.device
        if hasattr(parameter, "device_mesh"):
            device = torch.device(parameter.device_mesh.device_type)
        self.stepped: nn.Parameter = nn.Parameter(
            torch.empty(0, dtype=parameter.dtype, device=device)
        )
        self.state: dict[Any, Any] = {}

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements, on the device of the matrix."""
        return self.stepped.data.new_empty(0, dtype=dtype)

    def place(self, owner: int, places: Sequence[Place], rank: int) -> None:
        """Set the owner; `places` are the shards of the parameter by rank, `rank` is this one."""
        self.owner = owner
        seen = set()
        for distance in range(len(places)):
            other = (owner + distance) % len(places)
            part, local_rows = _within(places[other], self.rows)
            if other == rank:
                self.local_rows = local_rows
            if rank in (other, owner):
                self.parts[other] = part
            if part not in seen and _numel(part):
                seen.add(part)
                self.sources.append(other)


def _within(place: Place, rows: tuple[int, int]) -> tuple[Place, slice]:
    """(the part of a shard within some rows, counted from these, and its rows in the shard)."""
    first, last = rows
    ranges = []
    before = count = 0
    for start, stop in place[0]:
        before += max(0, min(stop, first) - start)
        start, stop = max(start, first), min(stop, last)
        if start < stop:
            ranges.append((start - first, stop - first))
            count += stop - start
    return (tuple(ranges), *place[1:]), slice(before, before + count)


def _numel(place: Place) -> int:
    return math.prod(sum(stop - start for start, stop in ranges) for ranges in place)


def _index(place: Place, device: torch.device) -> tuple[Any, ...]:
    """What indexes a part of a matrix."""
    if all(len(ranges) <= 1 for ranges in place):
        return tuple(slice(*ranges[0]) if ranges else slice(0) for ranges in place)
    axes = []
    for ranges in place:
        axes.append(torch.cat([torch.arange(*pair, device=device) for pair in ranges]))
    return tuple(torch.meshgrid(*axes, indexing="ij"))


def _place_of(parameter: Any) -> Place:
    """Where this rank's shard of a parameter lies in it."""
    if not hasattr(parameter, "device_mesh"):
        return tuple(((0, size),) for size in parameter.shape)
    # Imports DTensor.
    from .materialize import local_shard

    place: list[tuple[tuple[int, int], ...]] = []
    for dimension, size in enumerate(parameter.shape):
        numbers = torch.arange(size, device=parameter.device_mesh.device_type)
        sizes = [1] * parameter.ndim
        sizes[dimension] = size
        shard = local_shard(numbers.view(sizes).expand(parameter.shape), parameter)
        if not shard.numel():
            return tuple(() for _ in parameter.shape)
        indices = shard.transpose(0, dimension).reshape(shard.shape[dimension], -1)[:, 0]
        gaps = (indices.diff() != 1).nonzero().flatten() + 1
        runs = indices.tensor_split(gaps.cpu())
        place.append(tuple((int(run[0]), int(run[-1]) + 1) for run in runs))
    return tuple(place)


def _local(value: Any, parameter: Any) -> torch.Tensor:
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


class Owners:
    """Matrices of one dtype that the same ranks have.

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
        places = {position: _place_of(parameters[position]) for position in self.counts}
        places_of_ranks = [places] * self.size
        if any(hasattr(parameters[position], "device_mesh") for position in places):
            places_of_ranks = self._from_all(places)
        owners = assign([matrix.cost for matrix in matrices], self.size)
        for matrix, owner in zip(matrices, owners, strict=True):
            places_of_matrix = [row[matrix.position] for row in places_of_ranks]
            matrix.place(owner, places_of_matrix, self.rank)
        # Whether an owner needs what it does not have.
        self.gathers: bool = any(matrix.sources != [matrix.owner] for matrix in matrices)

    def _from_all(self, value: Any) -> list[Any]:
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _exchange(
        self,
        transfers: Sequence[tuple[int, int, Any, int]],
        empty: torch.Tensor,
    ) -> list[Iterator[torch.Tensor]]:
        """Send pieces in one message; returns those that came from each rank.

        Args:
            transfers: (sender, receiver, piece on the sender, its number of elements), of this rank's at least.
            empty: of the dtype of the pieces, on the device that sends.
        """
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        expected: list[list[int]] = [[] for _ in range(self.size)]
        for sender, receiver, piece, size in transfers:
            if sender == self.rank:
                outgoing[receiver].append(piece.reshape(-1).to(empty.device))
            if receiver == self.rank:
                expected[sender].append(size)
        sent = torch.cat([empty, *itertools.chain.from_iterable(outgoing)])
        sent_sizes = [sum(map(torch.numel, row)) for row in outgoing]
        received_sizes = list(map(sum, expected))
        received = sent
        if self.group is not None:
            received = sent.new_empty(sum(received_sizes))
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)
        arrived = []
        for row, sizes in zip(received.split(received_sizes), expected, strict=True):
            arrived.append(iter(row.split(sizes)))
        return arrived

    def to_owners(
        self,
        pieces: Sequence[tuple[Matrix, torch.Tensor]],
    ) -> list[tuple[Matrix, torch.Tensor]]:
        """(matrix, its value) of the matrices that this rank owns.

        Args:
            pieces: matrices, with this rank's shards of their parameters, all of one dtype.
        """
        if not self.gathers:
            values = []
            for matrix, shard in pieces:
                if self.rank == matrix.owner:
                    values.append((matrix, shard[matrix.local_rows].reshape(matrix.shape)))
            return values
        if not pieces:
            return []
        transfers = []
        for matrix, shard in pieces:
            for sender in matrix.sources:
                if self.rank in (sender, matrix.owner):
                    size = _numel(matrix.parts[sender])
                    transfers.append((sender, matrix.owner, shard[matrix.local_rows], size))
        matrix, shard = pieces[0]
        arrived = self._exchange(transfers, matrix.empty(shard.dtype))
        values = []
        for matrix, shard in pieces:
            if self.rank != matrix.owner:
                continue
            block = matrix.empty(shard.dtype).new_empty(matrix.block)
            for sender in matrix.sources:
                index = _index(matrix.parts[sender], block.device)
                block[index] = next(arrived[sender]).view(block[index].shape)
            values.append((matrix, block.view(matrix.shape)))
        return values

    def from_owners(
        self,
        pieces: Sequence[tuple[Matrix, Any, torch.Tensor]],
    ) -> None:
        """Write values of matrices to each rank's shards.

        Args:
            pieces: matrices, with their values on the owners, and this rank's shards of their parameters, which all
                have one dtype.
        """
        if not pieces:
            return
        transfers = []
        for matrix, value, _ in pieces:
            for receiver, part in matrix.parts.items():
                piece = None
                if self.rank == matrix.owner:
                    block = value.reshape(matrix.block)
                    piece = block[_index(part, block.device)]
                transfers.append((matrix.owner, receiver, piece, _numel(part)))
        matrix, _, shard = pieces[0]
        arrived = self._exchange(transfers, matrix.empty(shard.dtype))
        for matrix, _, shard in pieces:
            rows = shard[matrix.local_rows]
            rows.copy_(next(arrived[matrix.owner]).view(rows.shape))

    # -- state

    def take_over(self, optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
        """Move state that an optimizer has of the parameters, since it was loaded, to the owners."""
        loaded: dict[int, dict[Any, Any]] = {}
        for position in self.counts:
            entry = optimizer.state.pop(parameters[position], None)
            if entry:
                loaded[position] = entry
        moved: dict[tuple[Any, torch.dtype], list[tuple[Matrix, torch.Tensor]]] = {}
        for matrix in self.matrices:
            if matrix.position not in loaded:
                continue
            parameter = parameters[matrix.position]
            matrix.state = {}
            for key, value in loaded[matrix.position].items():
                has_elements = isinstance(value, torch.Tensor) and value.ndim > 0
                if has_elements and value.shape == parameter.shape:
                    pieces = moved.setdefault((key, value.dtype), [])
                    pieces.append((matrix, _local(value, parameter)))
                elif self.rank == matrix.owner:
                    if has_elements and self.counts[matrix.position] > 1:
                        value = value[matrix.number]
                    if isinstance(value, torch.Tensor):
                        value = value.clone()
                    matrix.state[key] = value
        for kind in sorted(moved, key=str):
            for matrix, value in self.to_owners(moved[kind]):
                matrix.state[kind[0]] = value.clone()

    def lay_out(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[Any, Any]]:
        """{position of a parameter: its state}, as a rank has it that steps all of its shards. All ranks call it."""
        described: dict[int, dict[Any, Any]] = {}
        for number, matrix in enumerate(self.matrices):
            for key, value in matrix.state.items():
                if isinstance(value, torch.Tensor):
                    if value.ndim and value.shape == matrix.shape:
                        value = value.dtype
                    else:
                        value = value.cpu()
                described.setdefault(number, {})[key] = value
        for row in self._from_all(described):
            described.update(row)
        states: dict[int, dict[Any, Any]] = {}
        moved: dict[tuple[Any, torch.dtype], list[tuple[Matrix, Any, torch.Tensor]]] = {}
        for number, matrix in enumerate(self.matrices):
            parameter = parameters[matrix.position]
            for key, value in described.get(number, {}).items():
                state = states.setdefault(matrix.position, {})
                if not isinstance(value, torch.dtype):
                    state.setdefault(key, []).append(value)
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(_local(parameter, parameter), dtype=value)
                piece = matrix, matrix.state.get(key), state[key]
                moved.setdefault((key, value), []).append(piece)
        for kind in sorted(moved, key=str):
            self.from_owners(moved[kind])
        for position, state in states.items():
            for key, value in state.items():
                state[key] = _joined(value, parameters[position])
        return states


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


class SharedStep:
    """The step of one optimizer, shared between ranks.

    Args:
        replicas: the ranks that have the same plain parameters and gradients; None for this process alone.
        are_equal: whether their gradients are equal at present. If not, each rank steps all of its plain parameters.
        local_tensors: a block in which an optimizer has the shards of DTensors that it updates element by element.
    """

    def __init__(
        self,
        replicas: dist.ProcessGroup | None,
        are_equal: Callable[[], bool],
        local_tensors: Callable[[Any], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.replicas = replicas
        self.are_equal = are_equal
        self.local_tensors = local_tensors
        self.owners: list[Owners] = []
        self.is_laid_out: bool = False
        self._planned_for: list[int] = []
        self._groups: dict[Any, dist.ProcessGroup] = {}
        self._laid_out_states: dict[torch.Tensor, dict[Any, Any]] = {}

    def run(self, optimizer: Any, step: Callable[..., Any], closure: Any) -> Any:
        """A step of the optimizer, which its owners make."""
        arguments: tuple[Any, ...] = ()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            arguments = (lambda: loss,)
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        with torch.no_grad():
            self.plan(optimizer)
            parameters = parameters_of(optimizer)
            stepped = self._enter(parameters)
        numbers = itertools.count()
        try:
            for group, listed in groups:
                group["params"] = []
                for parameter in listed:
                    group["params"] += stepped.get(next(numbers), [parameter])
            for matrix in self.matrices():
                if matrix.state:
                    optimizer.state[matrix.stepped] = matrix.state
            with self.local_tensors(optimizer):
                result = step(*arguments)
        finally:
            for group, listed in groups:
                group["params"] = listed
            for matrix in self.matrices():
                matrix.state = optimizer.state.pop(matrix.stepped, {})
        with torch.no_grad():
            self._leave(parameters)
        if self.is_laid_out:
            self.lay_out(optimizer)
        return result

    def matrices(self) -> Iterator[Matrix]:
        """All matrices of the optimizer."""
        for owners in self.owners:
            yield from owners.matrices

    def plan(self, optimizer: Any) -> None:
        """Give each matrix its owner, if the parameters are others than before, and the owners their state."""
        parameters = parameters_of(optimizer)
        are_equal = self.are_equal()
        planned_for = [are_equal, *map(id, parameters)]
        if planned_for != self._planned_for:
            self.lay_out(optimizer)
            self._planned_for = planned_for
            kinds: dict[tuple[Any, torch.dtype], list[Matrix]] = {}
            for position, (group, parameter) in enumerate(_grouped(optimizer)):
                shape = _shape_of(optimizer, group, parameter, f"parameter {position}")
                if shape is None:
                    continue
                kind = self._ranks_of(parameter, are_equal), parameter.dtype
                kinds.setdefault(kind, []).extend(
                    _matrices_of(position, parameter, shape, has_views(optimizer))
                )
            self.owners = []
            for (ranks, _), matrices in kinds.items():
                self.owners.append(Owners(ranks, matrices, parameters))
        for owners in self.owners:
            owners.take_over(optimizer, parameters)

    def _ranks_of(self, parameter: Any, are_equal: bool) -> dist.ProcessGroup | None:
        """The ranks that share the work on a parameter; None for this one alone."""
        mesh = getattr(parameter, "device_mesh", None)
        ranks = None
        if mesh is None:
            if are_equal:
                ranks = self.replicas
        elif mesh.ndim == 1:
            ranks = mesh.get_group()
        elif mesh.size() == dist.get_world_size():
            ranks = dist.group.WORLD
        else:
            if mesh not in self._groups:
                members = mesh.mesh.flatten().tolist()
                self._groups[mesh] = dist.new_group(members, use_local_synchronization=True)
            ranks = self._groups[mesh]
        if ranks is not None and ranks.size() == 1:
            return None
        return ranks

    def _enter(self, parameters: Sequence[Any]) -> dict[int, list[nn.Parameter]]:
        """Bring values and gradients to the owners; returns what this rank steps instead of each parameter."""
        stepped: dict[int, list[nn.Parameter]] = {}
        for owners in self.owners:
            values: list[tuple[Matrix, torch.Tensor]] = []
            gradients: list[tuple[Matrix, torch.Tensor]] = []
            for matrix in owners.matrices:
                stepped.setdefault(matrix.position, [])
                parameter = parameters[matrix.position]
                if parameter.grad is not None:
                    values.append((matrix, _local(parameter.detach(), parameter)))
                    gradients.append((matrix, _local(parameter.grad, parameter)))
            arrived = owners.to_owners(values + gradients)
            half = len(arrived) // 2
            for (matrix, value), (_, gradient) in zip(arrived[:half], arrived[half:], strict=True):
                matrix.stepped.data = value
                matrix.stepped.grad = gradient
                stepped[matrix.position].append(matrix.stepped)
        return stepped

    def _leave(self, parameters: Sequence[Any]) -> None:
        """Bring the results to all ranks."""
        for owners in self.owners:
            pieces = []
            for matrix in owners.matrices:
                parameter = parameters[matrix.position]
                if parameter.grad is not None:
                    shard = _local(parameter.detach(), parameter)
                    pieces.append((matrix, matrix.stepped.data, shard))
            owners.from_owners(pieces)
            for matrix in owners.matrices:
                matrix.stepped.grad = None
                matrix.stepped.data = matrix.empty(matrix.stepped.dtype)

    @torch.no_grad()
    def lay_out(self, optimizer: Any) -> None:
        """Give the optimizer the state of all matrices, laid out as the parameters are. All ranks call it."""
        parameters = parameters_of(optimizer)
        for owners in self.owners:
            for position, state in owners.lay_out(parameters).items():
                optimizer.state[parameters[position]] = state
                self._laid_out_states[parameters[position]] = state

    def withdraw(self, optimizer: Any) -> None:
        """Take back what `lay_out` gave the optimizer, apart from what was loaded since."""
        for parameter, state in self._laid_out_states.items():
            if optimizer.state.get(parameter) is state:
                del optimizer.state[parameter]
        self._laid_out_states = {}


def _matrices_of(
    position: int, parameter: torch.Tensor, shape: tuple[int, ...], has_views: bool
) -> list[Matrix]:
    count = 1
    if has_views and len(shape) == 3:
        count, shape = shape[0], shape[1:]
    rows = parameter.shape[0] // count
    matrices = []
    for number in range(count):
        first = number * rows
        matrices.append(Matrix(position, number, (first, first + rows), shape, parameter))
    return matrices


def share_step(
    optimizer: Any,
    replicas: dist.ProcessGroup | None = None,
    are_equal: Callable[[], bool] = lambda: True,
    local_tensors: Callable[
        [Any], contextlib.AbstractContextManager[None]
    ] = contextlib.nullcontext,
) -> bool:
    """Share the step of a registered optimizer from now on. Returns False for one that is left as it is.

    The arguments are those of `SharedStep`.
    """
    if _SHARED in optimizer.__dict__:
        return True
    # A process group that sends nothing has nobody to share with.
    if _registered_class(optimizer) is None or (
        dist.is_initialized() and dist.get_backend() == "fake"
    ):
        return False
    check_matrices([optimizer])
    if replicas is not None and _registered_class(optimizer) not in _BY_REPLICAS:
        replicas = None
        if not any(hasattr(parameter, "device_mesh") for parameter in parameters_of(optimizer)):
            return False
    kind, reference = type(optimizer), weakref.ref(optimizer)
    shared = SharedStep(replicas, are_equal, local_tensors)

    def state_dict() -> dict[str, Any]:
        present: Any = reference()
        if not shared.is_laid_out and any(owners.group for owners in shared.owners):
            _meet(kind.__name__)
        with laid_out(present):
            state: dict[str, Any] = kind.state_dict(present)
        return state

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        for matrix in shared.matrices():
            matrix.state = {}
        kind.load_state_dict(reference(), state_dict)

    replace_step_below_hooks(optimizer, shared.run)
    optimizer.__dict__.update(
        {_SHARED: shared, "state_dict": state_dict, "load_state_dict": load_state_dict}
    )
    return True


def _meet(name: str) -> None:
    """Wait for all ranks before messages that carry state. Raises CheckpointError if some of them went on."""
    agreement = Agreement(PartialState(), "optimizer")
    subject = f"{name}.state_dict"
    absent = (
        "The state is gathered from the ranks that own it: call this on every rank, and "
        "write the result on one"
    )
    if agreement.rank:
        agreement.announce(subject)
    if others_went_on(agreement, subject, STATE_TIMEOUT):
        text = (
            f"rank {agreement.rank}: the other ranks did not reach `{subject}` and went on. "
            f"{absent}"
        )
        agreement.refuse(text)
        raise CheckpointError(text)
    agreement.exchange(subject, None, STATE_TIMEOUT, absent)


def shared_step_of(optimizer: Any) -> SharedStep | None:
    """The shared step of an optimizer; None where its step is not shared."""
    shared: SharedStep | None = optimizer.__dict__.get(_SHARED)
    return shared


@contextlib.contextmanager
def laid_out(optimizer: Any) -> Iterator[None]:
    """A block in which the state of a shared optimizer is laid out as its parameters are. All ranks enter it."""
    shared = shared_step_of(optimizer)
    if shared is None or shared.is_laid_out:
        yield
        return
    shared.lay_out(optimizer)
    shared.is_laid_out = True
    try:
        yield
    finally:
        shared.is_laid_out = False
        shared.withdraw(optimizer)
