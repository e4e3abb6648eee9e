# SPDX-License-Identifier: Apache-2.0
"""The strategies by name."""

from __future__ import annotations

import importlib
from typing import Any

from ..core import extensions

# name -> (module, class). A strategy's module is imported when it is chosen.
STRATEGIES: dict[str, tuple[str, str]] = {
    "single": ("accelerate.parallel.base", "Strategy"),
    "ddp": ("accelerate.parallel.ddp.strategy", "DataParallel"),
    "xla": ("accelerate.parallel.ddp.xla", "XlaDataParallel"),
    "fsdp1": ("accelerate.parallel.fsdp.fsdp1", "FullyShardedDataParallel1"),
    "fsdp2": ("accelerate.parallel.fsdp.fsdp2", "FullyShardedDataParallel"),
    "pipeline": ("accelerate.parallel.pipeline.strategy", "PipelineParallel"),
    "deepspeed": ("accelerate.parallel.deepspeed.strategy", "DeepSpeedZero"),
    "tensor": ("accelerate.parallel.tensor.strategy", "TensorParallel"),
}


def strategy_class(name: str) -> Any:
    """The class of one of ours, or of one that an installed package registers (`accelerate.strategies`)."""
    if name not in STRATEGIES:
        return extensions.load("strategy", name)
    module, attribute = STRATEGIES[name]
    return getattr(importlib.import_module(module), attribute)
