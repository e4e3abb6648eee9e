# SPDX-License-Identifier: Apache-2.0
"""The strategies and transforms by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..core.imports import load_extension

if TYPE_CHECKING:
    from .base import Strategy, Transform

# name -> (module, class). A strategy's module is imported when it is chosen.
STRATEGIES: dict[str, tuple[str, str]] = {
    "single": ("accelerate.parallel.base", "Strategy"),
    "ddp": ("accelerate.parallel.ddp.strategy", "DataParallel"),
    "xla": ("accelerate.parallel.ddp.strategy", "XlaDataParallel"),
    "fsdp1": ("accelerate.parallel.fsdp.fsdp1", "FullyShardedDataParallel1"),
    "fsdp2": ("accelerate.parallel.fsdp.strategy", "FullyShardedDataParallel"),
    "pipeline": ("accelerate.parallel.pipeline.strategy", "PipelineParallel"),
    "deepspeed": ("accelerate.parallel.deepspeed.strategy", "DeepSpeedZero"),
    "tensor": ("accelerate.parallel.tensor.strategy", "TensorParallel"),
}

# name -> (module, class) of a transform, which is constructed without arguments.
TRANSFORMS: dict[str, tuple[str, str]] = {
    "activation_offload": ("accelerate.parallel.activation", "ActivationOffload"),
}


def strategy_class(name: str) -> type[Strategy]:
    """The class of one of ours, or of one that an installed package registers (`accelerate.strategies`)."""
    found: type[Strategy] = (
        _imported(STRATEGIES[name]) if name in STRATEGIES else load_extension("strategy", name)
    )
    return found


def strategy_key(strategy: Strategy) -> str:
    """What identifies a strategy in files: its name in `STRATEGIES`, or its class where that is not one of ours."""
    kind = type(strategy)
    for name, location in STRATEGIES.items():
        if location == (kind.__module__, kind.__qualname__):
            return name
    return f"{kind.__module__}:{kind.__qualname__}"


def transform_class(name: str) -> type[Transform]:
    """The class of one of ours, or of one that an installed package registers (`accelerate.transforms`)."""
    if name not in TRANSFORMS:
        loaded: type[Transform] = load_extension("transform", name, TRANSFORMS)
        return loaded
    found: type[Transform] = _imported(TRANSFORMS[name])
    return found


def _imported(place: tuple[str, str]) -> Any:
    module, attribute = place
    return getattr(importlib.import_module(module), attribute)
