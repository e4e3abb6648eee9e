# SPDX-License-Identifier: Apache-2.0
"""What the step of one element depends on, which decides whether an optimizer may be given shards of tensors."""

from __future__ import annotations

import enum
import inspect

import torch

from ..core.errors import PrepareError
from ..core.messages import warn

# Adafactor, Muon and LBFGS use entire tensors.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
# Packages whose optimizers take shards themselves, apart from these classes. Their step is not replaced.
_TAKE_SHARDS: dict[str, frozenset[str]] = {
    "bitsandbytes": frozenset(
        {"LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS"}
    ),
    "deepspeed": frozenset({"FusedLamb", "OnebitLamb", "MuonWithAuxAdam"}),
    "lion_pytorch": frozenset(),
    "torchao": frozenset(),
}
# An optimizer that supports shards itself sets this attribute, on its class or on the object.
OPT_OUT = "supports_sharded_parameters"


class Scope(enum.Enum):
    """What the step of one element depends on, apart from hyperparameters and counters."""

    ELEMENT = "its own gradient and state"
    PARAMETER = "the entire parameter"
    MODEL = "all parameters of the optimizer"
    UNKNOWN = "unknown"


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step is that of one of torch's optimizers whose step of an element needs no other element."""
    step = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, kind) and inspect.unwrap(kind.step) is step for kind in ELEMENTWISE
    )


def find_scope(optimizer: torch.optim.Optimizer) -> Scope:
    """The scope of an optimizer's step: known by its class, or declared by `supports_sharded_parameters`."""
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    takes_shards = package in _TAKE_SHARDS and kind.__name__ not in _TAKE_SHARDS[package]
    if getattr(optimizer, OPT_OUT, False) or takes_shards or is_elementwise(optimizer):
        return Scope.ELEMENT
    if isinstance(optimizer, torch.optim.LBFGS):
        return Scope.MODEL
    if package in _TAKE_SHARDS or isinstance(optimizer, torch.optim.Adafactor | torch.optim.Muon):
        return Scope.PARAMETER
    if (package, kind.__name__) == ("transformers", "Adafactor") or isinstance(
        optimizer, torch.optim.SparseAdam
    ):
        return Scope.PARAMETER
    return Scope.UNKNOWN


def refuse_flat_shards(optimizer: torch.optim.Optimizer, layout: str, remedy: str) -> None:
    """Raise PrepareError for an optimizer that needs entire tensors, where `layout` gives it flat shards."""
    scope, name = find_scope(optimizer), type(optimizer).__name__
    if scope is Scope.UNKNOWN:
        warn(
            f"{name} is not known to update each element independently, and {layout} gives it flat shards of the "
            f"parameters. If it uses shapes or norms of entire tensors, {remedy}; if not, set "
            f"{name}.{OPT_OUT} = True"
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
