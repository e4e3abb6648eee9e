# SPDX-License-Identifier: Apache-2.0
"""A forward whose fp16 and bf16 outputs are handed out in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.trees import convert_to_fp32


class ConvertOutputsToFp32:
    """A callable around a forward. It refuses to be pickled: take the model out of its wrapper first."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        import pickle

        raise pickle.PicklingError(
            "A prepared model with an fp32 output conversion cannot be pickled: call "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)` first"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`model_forward` with every half-precision tensor of its (nested) output converted to fp32."""
    converter = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    # `unwrap_model` walks `__wrapped__` back to the original forward.
    forward.__wrapped__ = converter  # type: ignore[attr-defined]
    functools.update_wrapper(forward, model_forward, updated=())
    forward.__wrapped__ = converter  # type: ignore[attr-defined]
    return forward
