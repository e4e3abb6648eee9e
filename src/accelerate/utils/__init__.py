# SPDX-License-Identifier: Apache-2.0
"""The names of the modules of `accelerate.utils`, in one place. No other package of accelerate imports them."""

import importlib

from ..core.lazy import attach
from . import megatron_lm

_MODULES = (
    "ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils", "imports", "launch", "memory",
    "modeling", "offload", "operations", "other", "random", "torch_xla", "transformer_engine", "versions", "tqdm",
)  # fmt: skip

EXPORTS: dict[str, list[str]] = {
    "collectives.tensors": ["avg_losses_across_data_parallel_group"],
    "commands.config.default": ["write_basic_config"],
    "parallel.placeholders": list(megatron_lm.SHARED),
}
for _module in _MODULES:
    for _home, _names in importlib.import_module(f"{__name__}.{_module}").EXPORTS.items():
        EXPORTS.setdefault(_home, []).extend(_names)

del EXPORTS["placement"]  # the logger of `utils.modeling` alone
# `accelerate.utils.tqdm` is the function, not the module with the same name.
del globals()["tqdm"]
__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, ["megatron_lm", "rich"])
