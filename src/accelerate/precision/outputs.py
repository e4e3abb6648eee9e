# SPDX-License-Identifier: Apache-2.0
"""A forward whose fp16 and bf16 outputs are handed out in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.trees import convert_to_fp32


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`model_forward` with every half-precision tensor of its (nested) output converted to fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
