# SPDX-License-Identifier: Apache-2.0
"""Arguments and attributes that the API does not have: errors that name what replaced them, or the nearest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .errors import suggestion
from .version import implemented

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_LOADER = "dataloader_config=DataLoaderConfiguration({}=...)"

# Arguments of `Accelerator` and what to pass instead.
ACCELERATOR_ARGUMENTS = {
    "fp16": 'mixed_precision="fp16"',
    "logging_dir": "project_dir=..., or project_config=ProjectConfiguration(logging_dir=...)",
    "dispatch_batches": _LOADER.format("dispatch_batches"),
    "even_batches": _LOADER.format("even_batches"),
    "use_seedable_sampler": _LOADER.format("use_seedable_sampler"),
    "use_stateful_dataloader": _LOADER.format("use_stateful_dataloader"),
    "non_blocking": _LOADER.format("non_blocking"),
    "data_seed": _LOADER.format("data_seed"),
    "find_unused_parameters": "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]",
    "downcast_bf16": "the launcher's option --downcast_bf16",
    "use_fsdp": "fsdp_plugin=FullyShardedDataParallelPlugin(...)",
    "use_deepspeed": "deepspeed_plugin=DeepSpeedPlugin(...)",
    "sync_with_dataloader": "gradient_accumulation_plugin=GradientAccumulationPlugin(sync_with_dataloader=...)",
}

# Attributes of `AcceleratorState`, and what to read instead.
STATE_ATTRIBUTES = {
    "use_fp16": 'mixed_precision == "fp16"',
    "downcast_bfloat": 'mixed_precision == "bf16"',
    "logging_dir": "project_configuration.logging_dir of the Accelerator",
}


def explain_arguments(retired: Mapping[str, str]) -> Callable[[F], F]:
    """Decorate a function so that the TypeError for an unknown argument names the present or the nearest spelling.

    Args:
        retired: the names of arguments, and what to write instead.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # Notebooks leave this frame out of a traceback, pytest too.
            __tracebackhide__ = True
            try:
                return function(*args, **kwargs)
            except TypeError:
                _refuse_unknown(function, kwargs, retired)
                raise

        return wrapper  # type: ignore[return-value]

    return decorate


def _refuse_unknown(
    function: Callable[..., Any], arguments: Iterable[str], retired: Mapping[str, str]
) -> None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    owner = function.__qualname__.removesuffix(".__init__")
    for name in arguments:
        if name in retired:
            raise TypeError(f"{owner} no longer takes {name}=: use {retired[name]}") from None
        if name not in parameters:
            meant = suggestion(
                name, [known for known in parameters if known != "self"], "; did you mean {}=?"
            )
            message = (
                f"{owner} got an unexpected keyword argument {name!r} ({implemented()}{meant})"
            )
            raise TypeError(message) from None


def explained(target: T) -> T:
    """Decorate a function, or the constructor of a class, as `explain_arguments` does."""
    decorate = explain_arguments({})
    if isinstance(target, type):
        constructor: Any = target.__init__  # type: ignore[misc]
        target.__init__ = decorate(constructor)  # type: ignore[misc]
        return target
    return decorate(target)  # type: ignore[type-var]
