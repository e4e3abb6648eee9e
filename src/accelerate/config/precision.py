# SPDX-License-Identifier: Apache-2.0
"""Options of mixed precision: autocast, gradient scaling, and the recipes of torchao, TransformerEngine, MS-AMP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from ..core.messages import warn
from . import checks

if TYPE_CHECKING:
    import torch

# Fields of Transformer Engine's recipe that have a variable, each with its default and what it may hold.
_DELAYED_SCALING: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "use_autocast_during_eval": (False, checks.truth),
    "use_mxfp8_block_scaling": (False, checks.truth),
    "margin": (0, functools.partial(checks.integer, least=0)),
    "interval": (1, checks.integer),
    "amax_history_len": (1024, checks.integer),
    "fp8_format": ("HYBRID", functools.partial(checks.word, choices=("HYBRID", "E4M3", "E5M2"))),
    "amax_compute_algo": (
        "most_recent",
        functools.partial(checks.word, choices=("max", "most_recent")),
    ),
}


class _Recipe(checks.KwargsHandler):
    """A recipe's defaults come from variables: it is compared with a recipe of nothing but those."""

    def to_kwargs(self) -> dict[str, Any]:
        plain = type(self)()
        values = self.to_dict()
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: values[name] for name in names if values[name] != getattr(plain, name)}


@dataclass
class AORecipeKwargs(_Recipe):
    """How torchao converts linear layers to float8. A field that is None takes its ACCELERATE_FP8_* variable.

    Fields:
        config: a `torchao.float8.Float8LinearConfig`; by default, created from the two fields below.
        module_filter_func: (module, name) -> whether to convert it; None converts all except the first and last
            linear layers.
        pad_inner_dim: pad matrices to the multiples of 16 that float8 kernels need.
        enable_fsdp_float8_all_gather: FSDP2 gathers parameters in float8.

    Raises ImportError if torchao is not installed.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        _require("torchao", "AORecipeKwargs")
        from torchao.float8 import Float8LinearConfig

        if self.config is not None:
            names = [
                n
                for n in ("pad_inner_dim", "enable_fsdp_float8_all_gather")
                if getattr(self, n) is not None
            ]
            if names:
                raise ConfigurationError(
                    f"{', '.join(names)} and `config` were both passed: set the value only in "
                    "`config`"
                )
            return
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            variable = f"ACCELERATE_FP8_{name.upper()}"
            setattr(self, name, checks.truth_or(name, getattr(self, name), variable, True))
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim,
            enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
        )


@dataclass
class TERecipeKwargs(_Recipe):
    """How TransformerEngine scales its float8 layers. A field that is None takes its ACCELERATE_FP8_* variable.

    Fields:
        use_autocast_during_eval: also run evaluation in float8.
        margin, interval, fp8_format (HYBRID, E4M3, E5M2), amax_history_len, amax_compute_algo (max, most_recent),
        override_linear_precision (forward, input gradient, weight gradient): TransformerEngine's DelayedScaling.
        use_mxfp8_block_scaling: its MXFP8BlockScaling recipe instead.

    Raises ImportError if TransformerEngine is not installed, and ValueError for an unknown word.
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
        for name, (default, check) in _DELAYED_SCALING.items():
            variable = f"ACCELERATE_FP8_{name.removeprefix('fp8_').upper()}"
            setattr(
                self, name, check(name, checks.value_or(getattr(self, name), variable, default))
            )
        if self.override_linear_precision is None:
            forward, inputs, weights = (
                env.get_flag(f"ACCELERATE_FP8_OVERRIDE_{name}")
                for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = (forward, inputs, weights)


@dataclass
class MSAMPRecipeKwargs(_Recipe):
    """The optimization level of MS-AMP: `opt_level` O1 (gradients and weights) or O2 (also optimizer states)."""

    opt_level: str | None = None

    def __post_init__(self) -> None:
        level = checks.value_or(self.opt_level, "ACCELERATE_FP8_OPT_LEVEL", "O2")
        self.opt_level = checks.word("opt_level", level, ("O1", "O2"))


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The API's older options object for either of two backends.

    Use `TERecipeKwargs` or `MSAMPRecipeKwargs` in new code.
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        warn(
            "FP8RecipeKwargs stands for two backends; use TERecipeKwargs or MSAMPRecipeKwargs "
            "instead.",
            FutureWarning,
        )
        default = "MSAMP" if is_available("msamp") else "TE"
        requested = checks.value_or(self.backend, "ACCELERATE_FP8_BACKEND", default)
        self.backend = str(requested).upper()
        if self.backend not in ("MSAMP", "TE"):
            raise ConfigurationError(
                f"backend={requested!r}: `backend` must be 'MSAMP' or 'TE' (TransformerEngine) for `FP8RecipeKwargs`."
            )
        if self.backend == "MSAMP":
            MSAMPRecipeKwargs.__post_init__(self)
            self._read_variables()
        else:
            TERecipeKwargs.__post_init__(self)


def _require(package: str, what: str) -> None:
    if not is_available(package):
        raise ImportError(f"{what} needs the package {package}, which is not installed")


@dataclass
class AutocastKwargs(checks.KwargsHandler):
    """Options of `torch.autocast`, which applies to the forward pass of prepared models.

    Fields:
        enabled: whether autocast is on.
        cache_enabled: whether weights are cast once in each forward pass and then reused. None keeps torch's default.

    Example:
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            loss = criterion(output.float(), targets)
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        checks.fields_of(self)


@dataclass
class GradScalerKwargs(checks.KwargsHandler):
    """Options of `torch.amp.GradScaler`, which scales the loss with `mixed_precision="fp16"`.

    Fields:
        init_scale: the first scale.
        growth_factor: factor by which the scale grows after `growth_interval` steps without overflow. Above 1.
        backoff_factor: factor by which it shrinks at an overflow. Between 0 and 1.
        growth_interval: number of optimizer steps.
        enabled: whether the loss is scaled at all.

    Example:
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        checks.fields_of(self)


@dataclass
class MasterWeightsKwargs(checks.KwargsHandler):
    """Train bf16 parameters and gradients with an fp32 master copy of each parameter, which the optimizers step.

    Needs `mixed_precision="bf16"`. Updates that bf16 would round away are kept, and gradients take half the bytes.
    The fp32 weights are saved. Example:

        accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[MasterWeightsKwargs()])
    """
