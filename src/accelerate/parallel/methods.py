# SPDX-License-Identifier: Apache-2.0
"""Methods other than `forward` that compute with a model: `generate`, `encode` (`prepare(forward_methods=...)`)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..core import trees
from ..core.errors import PrepareError, suggestion
from ..core.modules import class_name
from .unwrap import is_peft_model

_MIXED = "mixed torch.Tensor and DTensor"  # in torch's error about a parameter that is not gathered
# Models with FSDP2 units of which such a method runs: its forwards leave the outermost unit gathered.
running: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_names(models: Iterable[nn.Module], names: Iterable[str]) -> None:
    """Raise PrepareError for a name in `forward_methods` that is a method of none of the models."""
    models = list(models)
    for name in names:
        attributes = [getattr(model, name, None) for model in models]
        if any(
            callable(attribute) and not isinstance(attribute, nn.Module) for attribute in attributes
        ):
            continue
        if not models:
            raise PrepareError("forward_methods is given, and no model to prepare")
        known = {method for model in models for method in _public_methods(type(model))}
        raise PrepareError(
            f"forward_methods has {name!r}, and {' and '.join(map(class_name, models))} has no such method"
            f"{suggestion(name, known)}"
        )


def is_generator(model: nn.Module) -> bool:
    """Whether a model has the `generate` of transformers, also inside of an adapter of peft."""
    library: Any = sys.modules.get("transformers.generation.utils")
    is_of_library = library is not None and isinstance(model, library.GenerationMixin)
    return is_of_library or (is_peft_model(model) and hasattr(model, "generate"))


def keep_in_step(model: Any) -> None:
    """Have `generate` of a sharded model take equally many steps on every rank: each step gathers parameters."""
    generate = getattr(model.generate, "__func__", model.generate)

    @functools.wraps(generate)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **{"synced_gpus": True, **kwargs})

    model.generate = MethodType(call, model)


def run_as_forward(wrapper: nn.Module, model: nn.Module, name: str) -> None:
    """Give a wrapper the method of the model inside, which runs as the wrapper's forward.

    So DDP reduces the gradients of its backward, and FSDP1 gathers the outermost unit.
    """

    @functools.wraps(getattr(model, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        former = vars(model).get("forward")

        def restore() -> None:
            vars(model).pop("forward", None)
            if former is not None:
                model.forward = former

        def method(*inputs: Any, **options: Any) -> Any:
            # It may call the model.
            restore()
            return getattr(model, name)(*inputs, **options)

        model.forward = method
        try:
            return wrapper(*args, **kwargs)
        finally:
            restore()

    setattr(wrapper, name, call)


def gather_for(model: nn.Module, name: str) -> None:
    """Gather the outermost FSDP2 unit of a model before one of its methods runs, as before its forward."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, name)
    gathered = getattr(model, name).__func__

    @functools.wraps(gathered)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in running:
            return gathered(self, *args, **kwargs)
        running.add(self)
        output = None
        try:
            output = gathered(self, *args, **kwargs)
            return output
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise PrepareError(
                f"{class_name(self)}.{name} computes with parameters of a module inside that FSDP2 shards by itself. "
                "Call that module, or have the fsdp_plugin's auto_wrap_policy leave it to the outermost unit"
            ) from error
        finally:
            running.discard(self)
            if not any(tensor.requires_grad for tensor in trees.leaves(output)):
                # No backward will do it.
                self.reshard()

    setattr(model, name, MethodType(call, model))


def explain_others(model: nn.Module, registered: Iterable[str]) -> None:
    """Have the public methods that are not registered name themselves where they compute with shards."""
    for name in _public_methods(type(model)) - set(registered):
        if name not in vars(model):
            setattr(model, name, MethodType(_explaining(name, getattr(type(model), name)), model))


def _explaining(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise PrepareError(
                f"{class_name(self)}.{name} computes with parameters of which this process has a shard: FSDP2 gathers "
                f"them for forward alone. Register it: accelerator.prepare(..., forward_methods=[{name!r}])"
            ) from error

    return call


def _public_methods(kind: type) -> set[str]:
    """The methods that the classes of a model add to those of torch, and of every model of transformers."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    bases = [nn.Module, *([] if library is None else [library.PreTrainedModel])]
    return {
        name
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if isinstance(value, FunctionType)
        and not name.startswith("_")
        and not any(hasattr(b, name) for b in bases)
    }
