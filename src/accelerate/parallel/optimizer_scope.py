# SPDX-License-Identifier: Apache-2.0
"""What the step of one element depends on, which decides whether an optimizer may be given shards of tensors."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.errors import PrepareError

# By their exact class, since a subclass may do anything. Adafactor, Muon and LBFGS use entire tensors.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
# An optimizer that supports shards itself sets this attribute, on its class or on the object.
OPT_OUT = "supports_sharded_parameters"

# The trial's matrix: a multiple of the blocks of 8-bit states, and larger than what most optimizers leave unfactored.
_SHAPES = {2: (128, 144), 3: (32, 24, 24), 4: (32, 16, 6, 6)}
_NUMEL = 128 * 144
_STEPS = 3


class Scope(enum.Enum):
    """What the step of one element depends on, apart from hyperparameters and counters."""

    ELEMENT = "its own gradient and state"
    PARAMETER = "the entire parameter"
    MODEL = "all parameters of the optimizer"
    UNKNOWN = "unknown"


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is one of torch's optimizers whose step of an element needs no other element."""
    return type(optimizer) in ELEMENTWISE


def find_scope(optimizer: torch.optim.Optimizer) -> Scope:
    """The scope of an optimizer's step: known for torch's own classes, declared, or found by a trial.

    The trial steps copies of the optimizer on small matrices: once on entire ones, then on their
    halves. Neither the optimizer nor the random state is touched.
    """
    kind = type(optimizer)
    if is_elementwise(optimizer) or getattr(optimizer, OPT_OUT, False):
        return Scope.ELEMENT
    if kind in (torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam):
        return Scope.PARAMETER
    if isinstance(optimizer, torch.optim.LBFGS):
        return Scope.MODEL
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    # Without a list of them every device of the machine would be initialised.
    devices = [] if device.type == "cpu" else [device]
    kind_of_device = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices, device_type=kind_of_device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _try_out(optimizer, device)
        except Exception:
            return Scope.UNKNOWN


def refuse_flat_shards(optimizer: torch.optim.Optimizer, layout: str, remedy: str) -> None:
    """Raise PrepareError for an optimizer that needs entire tensors, where `layout` gives it flat shards."""
    scope, name = find_scope(optimizer), type(optimizer).__name__
    if scope is Scope.UNKNOWN:
        warnings.warn(
            f"{name}: a trial step did not show whether it updates each element independently. {layout} gives it "
            f"flat shards of the parameters; if it uses shapes or norms of entire tensors, {remedy}"
        )
    elif scope is not Scope.ELEMENT:
        raise PrepareError(
            f"{name} needs entire tensors (the step of an element depends on {scope.value}), and {layout} gives it "
            "flat shards of the parameters: its results would differ from those of a single process. "
            f"{remedy[0].upper()}{remedy[1:]}, or use an optimizer that updates each element independently (AdamW, "
            f"SGD, ...). An optimizer that supports such shards declares {OPT_OUT} = True"
        )


def refuse_model_scope(optimizer: torch.optim.Optimizer, layout: str, remedy: str) -> None:
    """Raise PrepareError for an optimizer that needs all parameters at once, where each rank has only some."""
    if find_scope(optimizer) is Scope.MODEL:
        raise PrepareError(
            f"{type(optimizer).__name__} combines values of all its parameters in each step, and with {layout} a rank "
            f"has only some of them: {remedy}"
        )


def _try_out(optimizer: torch.optim.Optimizer, device: torch.device) -> Scope:
    groups = len(optimizer.param_groups)
    dimensions = [max([2, *(p.ndim for p in group["params"])]) for group in optimizer.param_groups]
    values = [_values(2 * number).to(device) for number in range(2 * groups)]
    gradients = [
        [_values(101 + 2 * groups * step + n).to(device) for n in range(2 * groups)] for step in range(_STEPS)
    ]
    shapes = [_SHAPES.get(dimensions[n % groups], _SHAPES[2]) for n in range(2 * groups)]

    def stepped(chosen: list[int], view: Callable[[torch.Tensor, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """The parameters of these numbers after some steps, `view` of each value being what the optimizer has."""
        parameters = {n: nn.Parameter(view(values[n], n).clone()) for n in chosen}
        trial = _copy(optimizer, [[parameters[n] for n in chosen if n % groups == g] for g in range(groups)])
        for given in gradients:
            for n, parameter in parameters.items():
                parameter.grad = view(given[n], n).clone()
            _step(trial)
        return {n: parameter.detach().reshape(-1) for n, parameter in parameters.items()}

    every = list(range(2 * groups))
    expected = stepped(every, lambda value, n: value.view(shapes[n]))
    try:
        first = stepped(every, lambda value, n: value[: _NUMEL // 2])
        second = stepped(every, lambda value, n: value[_NUMEL // 2 :])
        halves = {n: torch.cat([first[n], second[n]]) for n in every}
        if all(_is_close(expected[n], halves[n], values[n]) for n in every):
            return Scope.ELEMENT
    except Exception:
        # One that refuses parameters of one dimension.
        pass
    for chosen in (every[:groups], every[groups:]):
        alone = stepped(chosen, lambda value, n: value.view(shapes[n]))
        if not all(_is_close(expected[n], alone[n], values[n]) for n in chosen):
            return Scope.MODEL
    return Scope.PARAMETER


def _values(number: int) -> torch.Tensor:
    """Numbers without structure, the same on each rank and in each run."""
    generator = torch.Generator().manual_seed(number)
    # Rows and columns of different scale, so that factored statistics and norms of halves differ.
    return torch.randn(_NUMEL, generator=generator) * torch.linspace(0.5, 2.0, _NUMEL)


def _is_close(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> bool:
    """Whether two results differ by much less than the parameter moved."""
    moved = (one - start).abs().max()
    return bool(torch.isfinite(one).all()) and bool((one - other).abs().max() <= 1e-3 * moved)


def _copy(optimizer: torch.optim.Optimizer, parameters: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """A fresh optimizer of the same class and settings, without state and hooks, for other parameters."""
    kind = type(optimizer)
    made = kind.__new__(kind)
    memo: dict[int, object] = {id(optimizer): made}
    for group, present in zip(optimizer.param_groups, parameters, strict=True):
        memo |= {id(former): present[0] for former in group["params"]}
    memo |= {id(value): value for value in vars(optimizer).values() if isinstance(value, nn.Module)}
    left_out = ("state", "param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
    kept = {name: value for name, value in vars(optimizer).items() if name not in left_out and "_hooks" not in name}
    made.__dict__.update(copy.deepcopy(kept, memo))
    hooks = {name: type(value)() for name, value in vars(optimizer).items() if "_hooks" in name}
    made.__dict__.update(hooks)
    made.state = type(optimizer.state)(dict) if isinstance(optimizer.state, dict) else {}
    made.param_groups = [
        {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo), "params": present}
        for group, present in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return made


def _step(optimizer: torch.optim.Optimizer) -> None:
    """One step of the class's own, past hooks that watch all optimizers."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    with torch.no_grad():
        try:
            function(optimizer)
        except (TypeError, RuntimeError):
            # One that needs a closure.
            function(optimizer, lambda: torch.ones(()))
