# SPDX-License-Identifier: Apache-2.0
"""Optimizers of entire matrices, whose work is shared: each matrix has one owner among the ranks that have it.

A step (`SharedStep.run`):

1. Each matrix has an owner, and the owner has its state (`plan`).
2. Values and gradients travel to the owners, in one message (`_enter`).
3. Each owner runs the user's optimizer on its matrices, in place of the parameters in the optimizer's groups.
4. The results travel to all ranks, in another message (`_leave`). The state of a matrix stays with its owner.

To be saved and loaded, the state is laid out as the parameters are (`laid_out`). `matrix_owners.py` has the messages.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
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
from .matrix_owners import Matrix, Owners, Piece, local_of

Shapes = Callable[[torch.Tensor, dict[str, Any]], Sequence[int] | None]

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
        try:
            shape = tuple(map(operator.index, viewed))
        except TypeError as error:
            raise PrepareError(
                f"the shapes of register_matrix_optimizer returned a {type(viewed).__name__} for {name} of "
                f"{type(optimizer).__name__}, not a shape: return a tuple of integers such as parameter.shape, or None"
            ) from error
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
            values: list[Piece] = []
            gradients: list[Piece] = []
            for matrix in owners.matrices:
                stepped.setdefault(matrix.position, [])
                parameter = parameters[matrix.position]
                if parameter.grad is not None:
                    values.append((matrix, local_of(parameter.detach(), parameter)))
                    gradients.append((matrix, local_of(parameter.grad, parameter)))
            # The owner's values come first, then their gradients.
            arrived = owners.to_owners(values + gradients)
            half = len(arrived) // 2
            for matrix, value in arrived[:half]:
                matrix.stepped.data = value
                stepped[matrix.position].append(matrix.stepped)
            for matrix, gradient in arrived[half:]:
                matrix.stepped.grad = gradient
        return stepped

    def _leave(self, parameters: Sequence[Any]) -> None:
        """Bring the results to all ranks."""
        for owners in self.owners:
            pieces = []
            for matrix in owners.matrices:
                parameter = parameters[matrix.position]
                if parameter.grad is not None:
                    shard = local_of(parameter.detach(), parameter)
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
    if _registered_class(optimizer) is None:
        return False
    if dist.is_initialized() and dist.get_backend() == "fake" and not _is_traced(optimizer):
        # Such a process group sends nothing: there is nobody to share with.
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


def _is_traced(optimizer: Any) -> bool:
    """Whether parameters have no values (`accelerate plan`)."""
    # Imports the fake mode.
    from ..torch_internals.tracing import is_fake

    with torch.no_grad():
        return any(is_fake(local_of(p, p)) for p in parameters_of(optimizer))


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
