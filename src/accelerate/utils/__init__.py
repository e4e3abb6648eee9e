# SPDX-License-Identifier: Apache-2.0
"""The compatibility wing: what its modules re-export, in one place. No room inside imports from it."""

from ..core.lazy import attach
from . import (
    ao,
    bnb,
    constants,
    dataclasses,
    deepspeed,
    environment,
    fsdp_utils,
    imports,
    launch,
    memory,
    modeling,
    offload,
    operations,
    other,
    random,
    torch_xla,
    transformer_engine,
    versions,
)
from . import tqdm as _tqdm

_MODULES = (
    ao, bnb, constants, dataclasses, deepspeed, environment, fsdp_utils, imports, launch, memory,
    modeling, offload, operations, other, random, torch_xla, transformer_engine, versions, _tqdm,
)  # fmt: skip

EXPORTS: dict[str, list[str]] = {
    "commands.config.default": ["write_basic_config"],
    "parallelism_config": ["ParallelismConfig"],
}
for _module in _MODULES:
    for _home, _names in _module.EXPORTS.items():
        EXPORTS.setdefault(_home, []).extend(_names)

# `accelerate.utils.tqdm` is the function: the module of that name must not stand in its way.
del globals()["tqdm"]
__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, ["megatron_lm", "rich"])
