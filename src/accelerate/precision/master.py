# SPDX-License-Identifier: Apache-2.0
"""bf16 parameters with fp32 master weights: the model computes with the former, optimizers step the latter."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import PrepareError
from ..core.modules import direct_parameters
from ..torch_internals import foreach
from ..torch_internals.optimizer_step import replace_step
from ..torch_internals.tensor_memory import version_of
from .amp import MixedPrecision

_CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class MasterPrecision(MixedPrecision):
    """bf16 autocast over bf16 parameters. Each parameter that trains has an fp32 master weight, in the same layout.

    During its step an optimizer's groups and state have the master weights (`MasterStep`), otherwise the
    model's parameters. Under `swap_in_master_weights` both model and optimizer have the master weights: a
    checkpoint is that of an fp32 run.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # parameter -> its master weight; None for one that has been frozen so far.
        self._master_of: Any = WeakTensorKeyDictionary()
        self._is_swapped_in = False
        self.changes: int = 0  # the number of entries so far

    @torch.no_grad()
    def cast_parameters(self, model: nn.Module) -> bool:
        """Cast parameters to bf16, and keep fp32 master weights of the trainable ones."""
        _refuse_sparse(model)
        before = self.changes
        for parameter, owners in _places(model):
            if parameter in self._master_of or not _can_be_cast(parameter):
                continue
            # Not detach(): that would share the version counter with the parameter.
            full = parameter.data
            cast = full.to(self.dtype)
            if hasattr(parameter, "device_mesh"):
                # A DTensor's dtype cannot be changed; the layout reads the parameter again before the first forward.
                present = nn.Parameter(cast, requires_grad=parameter.requires_grad)
                present.__dict__.update(parameter.__dict__)
                for module, name in owners:
                    setattr(module, name, present)
                parameter = present
            else:
                parameter.data = cast
            self._note(parameter, full if parameter.requires_grad else None)
        return self.changes != before

    def _note(self, parameter: nn.Parameter, full: torch.Tensor | None) -> None:
        if full is None:
            self._master_of[parameter] = None
        else:
            self._master_of[parameter] = nn.Parameter(full.to(torch.float32))
        self.changes += 1

    def master_weights(self, model: nn.Module) -> list[torch.Tensor]:
        """The master weights of a model."""
        masters: list[torch.Tensor] = []
        for parameter in model.parameters():
            master = self._master_of.get(parameter)
            if master is not None:
                masters.append(master)
        return masters

    def find(self, parameter: nn.Parameter) -> tuple[bool, nn.Parameter | None]:
        """(whether a parameter was cast, its master weight or None if it has been frozen so far)."""
        return parameter in self._master_of, self._master_of.get(parameter)

    @torch.no_grad()
    def add_master(self, parameter: nn.Parameter) -> None:
        """Add the master weight of a parameter that was frozen and trains from now on."""
        self._note(parameter, parameter.data)

    def attach_master_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer step master weights, once."""
        if master_step_of(optimizer) is None:
            attach(optimizer, self)

    @contextlib.contextmanager
    def swap_in_master_weights(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        contexts: Iterable[contextlib.AbstractContextManager[None]],
    ) -> Iterator[None]:
        """A context in which models and optimizers have master weights; nested ones do nothing."""
        if self._is_swapped_in:
            yield
            return
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            stack.enter_context(self._in_place(models, optimizers))
            self._is_swapped_in = True
            stack.callback(setattr, self, "_is_swapped_in", False)
            yield

    @contextlib.contextmanager
    def _in_place(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[None]:
        # The modules and names that refer to a parameter, with it and its master weight.
        places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for model in models:
            for parameter, owners in _places(model):
                master = self._master_of.get(parameter)
                if master is None:
                    continue
                masters[parameter] = master
                for module, name in owners:
                    places.append((module, name, parameter, master))
        pairs = list(masters.items())
        refresh(pairs)
        attached = []
        for optimizer in optimizers:
            master_step = master_step_of(optimizer)
            if master_step is not None:
                attached.append((master_step, optimizer))
                master_step.enter(optimizer)
        for module, name, _, master in places:
            setattr(module, name, master)
        try:
            yield
        finally:
            for module, name, parameter, _ in places:
                setattr(module, name, parameter)
            copy_back(pairs)
            for master_step, optimizer in attached:
                master_step.leave(optimizer)


# A module that refers to a parameter, and by which name.
Owner = tuple[nn.Module, str]


def _places(model: nn.Module) -> list[tuple[nn.Parameter, list[Owner]]]:
    """Each parameter of a model, with the modules and names that refer to it."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in direct_parameters(module).items():
            owners.setdefault(parameter, []).append((module, name))
    return list(owners.items())


def _can_be_cast(parameter: nn.Parameter) -> bool:
    """Whether a parameter has plain values: it is neither another stage's placeholder nor quantized."""
    is_plain = type(parameter.data) is torch.Tensor or hasattr(parameter, "device_mesh")
    return is_plain and not parameter.is_meta and parameter.dtype in _CAST_FROM


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise PrepareError(
                f"MasterWeightsKwargs: {name} ({type(module).__name__}) has sparse gradients, "
                "which fp32 master weights do not support. Build it with sparse=False, or remove "
                "MasterWeightsKwargs"
            )


Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]

# The entry of an optimizer's `state_dict()` with the master weights, by the numbers of their parameters.
STATE_KEY = "master_weights"


class MasterStep:
    """Swaps the parameters and the master weights of one optimizer, without a reference to it."""

    def __init__(self, precision: MasterPrecision) -> None:
        self.precision = precision
        self.inside: bool = False
        self._changes = -1
        self._is_proven = False  # that this optimizer steps the parameters in its groups
        # By group: the parameters, and what is stepped instead of them.
        self._visible: list[list[nn.Parameter]] = []
        self._stepped: list[list[nn.Parameter]] = []
        self._frozen: list[nn.Parameter] = []
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._to_master: dict[int, nn.Parameter] = {}
        self._to_parameter: dict[int, nn.Parameter] = {}
        self._versions: list[int] = []

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the master weights of the groups if groups or master weights have changed."""
        groups = [group["params"] for group in optimizer.param_groups]
        if self._changes == self.precision.changes and _is_same(groups, self._visible):
            return
        self._changes = self.precision.changes
        self._visible = [list(group) for group in groups]
        self._pairs = []
        self._frozen = []
        self._to_master = {}
        self._to_parameter = {}
        self._stepped = []
        for group in groups:
            stepped = []
            for parameter in group:
                was_cast, master = self.precision.find(parameter)
                if master is not None:
                    self._to_master[id(parameter)] = master
                    self._to_parameter[id(master)] = parameter
                    self._pairs.append((parameter, master))
                elif was_cast:
                    self._frozen.append(parameter)
                stepped.append(self._to_master.get(id(parameter), parameter))
            self._stepped.append(stepped)
        refresh(self._pairs)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [version_of(parameter) for parameter, _ in self._pairs]

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the master weights into groups and state."""
        self.look(optimizer)
        for parameter in self._frozen:
            if parameter.grad is not None:
                self.precision.add_master(parameter)
        if self._changes != self.precision.changes:
            self.look(optimizer)
        if self._versions_now() != self._versions:
            # The parameters were written since the last step, by a loaded state for example.
            refresh(self._pairs)
        for group, stepped in zip(optimizer.param_groups, self._stepped, strict=True):
            group["params"][:] = stepped
        optimizer.state = _keyed(optimizer.state, self._to_master)
        self.inside = True

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the master weights into the parameters, and put these back into groups and state."""
        copy_back(self._pairs)
        for _, master in self._pairs:
            master.grad = None
        for group, visible in zip(optimizer.param_groups, self._visible, strict=False):
            group["params"][:] = visible
        optimizer.state = _keyed(optimizer.state, self._to_parameter)
        self._versions = self._versions_now()
        self.inside = False

    def step(
        self, optimizer: torch.optim.Optimizer, call: Callable[..., Any], closure: Any = None
    ) -> Any:
        """Step the master weights by `call`; the closure is evaluated with the present parameters."""

        def evaluate() -> Any:
            self.leave(optimizer)
            try:
                return closure()
            finally:
                self.enter(optimizer)
                hand_over(self._pairs)

        self.enter(optimizer)
        try:
            hand_over(self._pairs)
            if closure is not None:
                return call(evaluate)
            before = None if self._is_proven else self._versions_now()
            result = call()
            if before is not None:
                self._prove(before, optimizer)
            return result
        finally:
            self.leave(optimizer)

    def _prove(self, before: list[int], optimizer: torch.optim.Optimizer) -> None:
        if self._versions_now() != before:
            raise PrepareError(
                f"MasterWeightsKwargs: {type(optimizer).__name__} steps the bf16 parameters "
                "themselves, because it refers to them outside its param_groups. Use another "
                "optimizer, or remove MasterWeightsKwargs"
            )
        self._is_proven = True

    def widen(self, optimizer: torch.optim.Optimizer) -> None:
        """Convert state that an optimizer has made from bf16 parameters to fp32."""
        for parameter, _ in self._pairs:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype == parameter.dtype:
                    state[name] = value.to(torch.float32)

    def saved(self) -> dict[int, torch.Tensor]:
        """The master weights by the numbers of their parameters in a state dict of the optimizer."""
        masters = {}
        for number, parameter in enumerate(itertools.chain.from_iterable(self._visible)):
            master = self._to_master.get(id(parameter))
            if master is not None:
                masters[number] = master.detach()
        return masters

    @torch.no_grad()
    def take(self, saved: Mapping[int, torch.Tensor]) -> None:
        """Load the master weights that `saved` returned."""
        for number, master in self.saved().items():
            if number in saved:
                master.copy_(saved[number])


def master_step_of(optimizer: torch.optim.Optimizer) -> MasterStep | None:
    """The master-weight step that was attached to an optimizer; None where there is none."""
    master_step: MasterStep | None = optimizer.__dict__.get("_master_step")
    return master_step


def attach(optimizer: torch.optim.Optimizer, precision: MasterPrecision) -> None:
    """Make an optimizer step master weights, and save and load them with its state.

    Not by torch's hooks, none of which runs after a step that raised.
    Raises PrepareError for an optimizer that steps in the backward.
    """
    kind: Any = type(optimizer)
    reference = weakref.ref(optimizer)
    # Those of an optimizer whose step is shared.
    save = optimizer.__dict__.get("state_dict", lambda: kind.state_dict(reference()))
    load = optimizer.__dict__.get(
        "load_state_dict", lambda state: kind.load_state_dict(reference(), state)
    )
    if hasattr(optimizer, "fused_backward"):
        raise PrepareError(
            f"MasterWeightsKwargs: {kind.__name__} updates the parameters in the backward pass, "
            "which master weights do not support. Use another optimizer, or remove "
            "MasterWeightsKwargs"
        )
    master_step = MasterStep(precision)
    master_step.look(optimizer)
    master_step.widen(optimizer)

    def step(own: Any, former: Callable[..., Any], closure: Any) -> Any:
        if not master_step.inside:
            return master_step.step(own, former, closure)
        if closure is None:
            return former()
        return former(closure)

    def state_dict() -> dict[str, Any]:
        own: Any = reference()
        state: dict[str, Any] = save()
        if not master_step.inside:
            master_step.look(own)
            state[STATE_KEY] = master_step.saved()
        return state

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        own: Any = reference()
        rest = dict(state_dict)
        saved = rest.pop(STATE_KEY, {})
        if master_step.inside:
            load(rest)
            return
        master_step.enter(own)
        try:
            load(rest)
            master_step.take(saved)
        finally:
            master_step.leave(own)

    replace_step(optimizer, step)
    optimizer.__dict__.update(
        _master_step=master_step, state_dict=state_dict, load_state_dict=load_state_dict
    )
    _around_modes(optimizer, master_step, kind)


def _around_modes(optimizer: torch.optim.Optimizer, master_step: MasterStep, kind: type) -> None:
    """Schedule-free optimizers change the weights when they switch between training and evaluation."""
    reference = weakref.ref(optimizer)

    def around(name: str) -> Callable[[], Any]:
        def change() -> Any:
            own: Any = reference()
            master_step.enter(own)
            try:
                return getattr(kind, name)(own)
            finally:
                master_step.leave(own)

        return change

    for name in ("train", "eval"):
        if callable(getattr(kind, name, None)):
            optimizer.__dict__[name] = around(name)


@torch.no_grad()
def refresh(pairs: Pairs) -> None:
    """Copy each parameter that is not its rounded master weight, and so was written by other code, to the master."""
    for parameter, master in pairs:
        rounded = _local(parameter)
        full = _local(master)
        is_unchanged = full.to(rounded.dtype) == rounded
        full.copy_(torch.where(is_unchanged, full, rounded.to(full.dtype)))


@torch.no_grad()
def hand_over(pairs: Pairs) -> None:
    """Give the master weights the parameters' gradients, in fp32."""
    masters = []
    gradients = []
    wide = []
    for parameter, master in pairs:
        if parameter.grad is not None:
            gradient = _local(_placed_as(parameter.grad, master))
            masters.append(master)
            gradients.append(gradient)
            wide.append(torch.empty_like(gradient, dtype=torch.float32))
    foreach.copy_(wide, gradients)
    for master, gradient in zip(masters, wide, strict=True):
        master.grad = _laid_out(gradient, master)


@torch.no_grad()
def copy_back(pairs: Pairs) -> None:
    """Round the master weights into the parameters."""
    parameters = [_local(parameter) for parameter, _ in pairs]
    masters = [_local(master) for _, master in pairs]
    foreach.copy_(parameters, masters)


def _local(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor; a plain tensor itself. Call it under `no_grad`: it shares memory."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    local: torch.Tensor = tensor
    return local


def _placed_as(gradient: Any, master: Any) -> Any:
    if hasattr(gradient, "placements") and gradient.placements != master.placements:
        return gradient.redistribute(placements=master.placements)
    return gradient


def _laid_out(local: torch.Tensor, master: Any) -> torch.Tensor:
    """The gradient of a master weight, from its local tensor."""
    if not hasattr(master, "device_mesh"):
        return local
    if local.device.type != master.device_mesh.device_type:
        # A shard that is offloaded to host memory: `from_local` would move it to the mesh's device.
        offloaded: torch.Tensor = torch.empty_like(master)
        _local(offloaded).copy_(local)
        return offloaded
    made: torch.Tensor = type(master.data).from_local(
        local,
        master.device_mesh,
        master.placements,
        run_check=False,
        shape=master.shape,
        stride=master.stride(),
    )
    return made


def _is_same(groups: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> bool:
    if list(map(len, groups)) != list(map(len, others)):
        return False
    parameters = itertools.chain.from_iterable(groups)
    return all(map(operator.is_, parameters, itertools.chain.from_iterable(others)))


def _keyed(
    state: Mapping[Any, Any], keys: Mapping[int, nn.Parameter]
) -> collections.defaultdict[Any, Any]:
    """The same entries of an optimizer's state, with its keys replaced."""
    keyed: collections.defaultdict[Any, Any] = collections.defaultdict(dict)
    for key, entry in state.items():
        keyed[keys.get(id(key), key)] = entry
    return keyed
