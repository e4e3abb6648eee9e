# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.config.config_utils`: single questions for other packages' own `config` commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.enums import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    SageMakerDistributedType,
)
from ..menu import BulletMenu

DYNAMO_BACKENDS = [
    "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT",
    "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM",
]  # fmt: skip
_KINDS = (
    "NO", "MULTI_CPU", "MULTI_XPU", "MULTI_HPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_NEURON", "XLA",
)  # fmt: skip


def _ask_field(
    input_text: str,
    convert_value: Callable[[str], Any] | None = None,
    default: Any = None,
    error_message: str | None = None,
) -> Any:
    """Ask until `convert_value` accepts the answer. An empty one is `default`, if there is one."""
    while True:
        answer = input(input_text)
        if not answer and default is not None:
            return default
        if convert_value is None:
            return answer
        try:
            return convert_value(answer)
        except Exception:  # whatever `convert_value` raises
            if error_message is not None:
                print(error_message)


def _ask_options(
    input_text: str,
    options: Sequence[str] = (),
    convert_value: Callable[[int], Any] | None = None,
    default: int = 0,
) -> Any:
    """Let the user choose one of `options`; return its index, or what `convert_value` makes of it."""
    index = BulletMenu(input_text, options).run(default_choice=default)
    if convert_value is None:
        return index
    return convert_value(index)


def _convert_compute_environment(value: int | str) -> ComputeEnvironment:
    return ComputeEnvironment(("LOCAL_MACHINE", "AMAZON_SAGEMAKER")[int(value)])


def _convert_distributed_mode(value: int | str) -> DistributedType:
    return DistributedType(_KINDS[int(value)])


def _convert_dynamo_backend(value: int | str) -> str:
    return DynamoBackend(DYNAMO_BACKENDS[int(value)]).value


def _convert_fp8_backend(value: int | str) -> FP8BackendType:
    return FP8BackendType(("AO", "TE", "MSAMP")[int(value)])


def _convert_mixed_precision(value: int | str) -> PrecisionType:
    return PrecisionType(("no", "fp16", "bf16", "fp8")[int(value)])


def _convert_sagemaker_distributed_mode(value: int | str) -> SageMakerDistributedType:
    return SageMakerDistributedType(("NO", "DATA_PARALLEL", "MODEL_PARALLEL")[int(value)])


def _convert_yes_no_to_bool(value: str) -> bool:
    return {"yes": True, "no": False}[value.lower()]
