# SPDX-License-Identifier: Apache-2.0
"""Options of mixed precision: autocast and gradient scaling."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks
from .base import KwargsHandler


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`, in which the forward of a prepared model runs.

    Fields:
        enabled: whether autocast is on.
        cache_enabled: whether weights are cast once in a forward and then reused. None keeps torch's default.

    Example:
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            loss = criterion(output.float(), targets)
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        checks.fields_of(self)


@dataclass
class GradScalerKwargs(KwargsHandler):
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
class MasterWeightsKwargs(KwargsHandler):
    """bf16 parameters and gradients, and an fp32 master of each parameter, which the optimizers step.

    Needs `mixed_precision="bf16"`. An update that bf16 would round away counts; gradients travel in half the bytes.
    Saved weights are the fp32 ones. Example:

        accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[MasterWeightsKwargs()])
    """
