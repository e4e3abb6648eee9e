# SPDX-License-Identifier: Apache-2.0
"""The recipes, with the engine's fields and refusals: `override_linear_precision` went with version 2."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    E4M3 = 448
    E5M2 = 57344
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self):
        assert self.fp8_format is not Format.E5M2, "Pure E5M2 training is not supported."


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self):
        assert self.fp8_format is not Format.E5M2, "Pure E5M2 training is not supported."
