# SPDX-License-Identifier: Apache-2.0
"""Options of 8-bit floating point training: torchao, TransformerEngine, MS-AMP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from .base import KwargsHandler

if TYPE_CHECKING:
    import torch


class _Recipe(KwargsHandler):
    """A recipe's defaults come from variables, so what differs is told against a recipe made of nothing but those."""

    def to_kwargs(self) -> dict[str, Any]:
        plain = type(self)()
        values = self.to_dict()
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: values[name] for name in names if values[name] != getattr(plain, name)}


@dataclass
class AORecipeKwargs(_Recipe):
    """How torchao converts linear layers to float8. A field that is None takes its ACCELERATE_FP8_* variable.

    Fields:
        config: a `torchao.float8.Float8LinearConfig`; made from the two fields below where it is not given.
        module_filter_func: (module, name) -> whether to convert it; None converts all but the first and last linear.
        pad_inner_dim: pad matrices to the multiples of 16 that float8 kernels want.
        enable_fsdp_float8_all_gather: FSDP2 gathers parameters in float8.

    Raises ImportError where torchao is not installed.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        _require("torchao", "AORecipeKwargs")
        if self.config is not None:
            given = [n for n in ("pad_inner_dim", "enable_fsdp_float8_all_gather") if getattr(self, n) is not None]
            if given:
                raise ConfigurationError(f"{', '.join(given)} and `config` are both given: set it in the config alone")
            return
        if self.pad_inner_dim is None:
            self.pad_inner_dim = env.get_flag("ACCELERATE_FP8_PAD_INNER_DIM", True)
        if self.enable_fsdp_float8_all_gather is None:
            self.enable_fsdp_float8_all_gather = env.get_flag("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", True)
        from torchao.float8 import Float8LinearConfig

        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@dataclass
class TERecipeKwargs(_Recipe):
    """How TransformerEngine scales its float8 layers. A field that is None takes its ACCELERATE_FP8_* variable.

    Fields:
        use_autocast_during_eval: run evaluation in float8 too.
        margin, interval, fp8_format (HYBRID, E4M3, E5M2), amax_history_len, amax_compute_algo (max, most_recent),
        override_linear_precision (forward, input gradient, weight gradient): TransformerEngine's DelayedScaling.
        use_mxfp8_block_scaling: its MXFP8BlockScaling recipe instead.

    Raises ImportError where TransformerEngine is not installed, ValueError for an unknown word.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        _require("transformer_engine", "TERecipeKwargs")
        self._read_variables()

    def _read_variables(self) -> None:
        if self.use_autocast_during_eval is None:
            self.use_autocast_during_eval = env.get_flag("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL")
        self.margin = _int(self.margin, "ACCELERATE_FP8_MARGIN", 0)
        self.interval = _int(self.interval, "ACCELERATE_FP8_INTERVAL", 1)
        self.amax_history_len = _int(self.amax_history_len, "ACCELERATE_FP8_AMAX_HISTORY_LEN", 1024)
        self.fp8_format = (self.fp8_format or env.get("ACCELERATE_FP8_FORMAT") or "HYBRID").upper()
        if self.fp8_format not in ("HYBRID", "E4M3", "E5M2"):
            raise ConfigurationError(f"fp8_format={self.fp8_format!r}: use HYBRID, E4M3 or E5M2")
        algo = self.amax_compute_algo or env.get("ACCELERATE_FP8_AMAX_COMPUTE_ALGO") or "most_recent"
        self.amax_compute_algo = algo.lower()
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigurationError(f"amax_compute_algo={algo!r}: use max or most_recent")
        if self.override_linear_precision is None:
            forward, inputs, weights = (
                env.get_flag(f"ACCELERATE_FP8_OVERRIDE_{name}") for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = (forward, inputs, weights)
        if self.use_mxfp8_block_scaling is None:
            self.use_mxfp8_block_scaling = env.get_flag("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING")


@dataclass
class MSAMPRecipeKwargs(_Recipe):
    """How far MS-AMP goes: `opt_level` O1 (gradients and weights) or O2 (optimizer state too)."""

    opt_level: str | None = None

    def __post_init__(self) -> None:
        self.opt_level = self.opt_level or env.get("ACCELERATE_FP8_OPT_LEVEL", "O2")
        if self.opt_level not in ("O1", "O2"):
            raise ConfigurationError(f"`opt_level` must be one of O1 or O2, got {self.opt_level!r}")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The API's older object for either of two backends. Use `TERecipeKwargs` or `MSAMPRecipeKwargs` in new code."""

    backend: str | None = None

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs stands for two backends; use TERecipeKwargs or MSAMPRecipeKwargs, which say which one.",
            FutureWarning,
        )
        default = "MSAMP" if is_available("msamp") else "TE"
        self.backend = (self.backend or env.get("ACCELERATE_FP8_BACKEND") or default).upper()
        if self.backend not in ("MSAMP", "TE"):
            raise ConfigurationError("`backend` must be 'MSAMP' or 'TE' (TransformerEngine) to use `FP8RecipeKwargs`.")
        if self.backend == "MSAMP":
            MSAMPRecipeKwargs.__post_init__(self)
            self._read_variables()
        else:
            TERecipeKwargs.__post_init__(self)


def _require(package: str, what: str) -> None:
    if not is_available(package):
        raise ImportError(f"{what} needs the package {package}, which is not installed here")


def _int(given: int | None, variable: str, default: int) -> int:
    found = given if given is not None else env.get_int(variable)
    return default if found is None else int(found)
