# SPDX-License-Identifier: Apache-2.0
"""The names a value may take: kinds of run, precisions, backends, trackers, schedules of pipelines. No torch."""

from __future__ import annotations

import enum
from typing import NamedTuple


class EnumWithContains(enum.EnumMeta):
    """`"bf16" in PrecisionType` is true for a value, as in the API."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """An enum that prints its value, and supports `value in Enum`."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members."""
        return [str(member.value) for member in cls]


class DistributedType(str, enum.Enum):
    """How the processes of a run work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class SageMakerDistributedType(str, enum.Enum):
    """How the processes of an Amazon SageMaker job work together."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(str, enum.Enum):
    """Where a launch runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class FP8BackendType(str, BaseEnum):
    """Backends of fp8 training: torchao, Transformer Engine and MS-AMP."""

    NO = "NO"
    AO = "AO"
    TE = "TE"
    MSAMP = "MSAMP"


class PrecisionType(str, BaseEnum):
    """Values of `mixed_precision`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class DynamoBackend(str, BaseEnum):
    """Backends of `torch.compile`; NO leaves the model uncompiled."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(BaseEnum):
    """The experiment trackers, one row for each.

    A row holds the name that `log_with` takes; the tracker's module in `accelerate.tracking` and its class there; and
    the packages of which one must be installed (the name itself by default).
    """

    _value_: str
    module: str
    class_name: str
    packages: tuple[str, ...]

    ALL = "all"
    AIM = "aim", "clients", "AimTracker"
    TENSORBOARD = "tensorboard", "tensorboard", "TensorBoardTracker", "tensorboard", "tensorboardX"
    WANDB = "wandb", "clients", "WandBTracker"
    TRACKIO = "trackio", "clients", "TrackioTracker"
    COMETML = "comet_ml", "clients", "CometMLTracker"
    MLFLOW = "mlflow", "mlflow", "MLflowTracker"
    CLEARML = "clearml", "clearml", "ClearMLTracker"
    DVCLIVE = "dvclive", "clients", "DVCLiveTracker"
    SWANLAB = "swanlab", "clients", "SwanLabTracker"

    def __new__(
        cls, name: str, module: str = "", class_name: str = "", *packages: str
    ) -> LoggerType:
        """Create a member from its row."""
        member = object.__new__(cls)
        member._value_ = name
        member.module = module
        member.class_name = class_name
        member.packages = packages or (name,)
        return member


class RNGType(BaseEnum):
    """Random number generators that can be synchronized between processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


# Short names of torch's dtypes.
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class CustomDtype(enum.Enum):
    """Storage types without a torch dtype, used to compute sizes."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(BaseEnum):
    """Communication hooks of DistributedDataParallel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class PipelineSchedule(NamedTuple):
    """One schedule of pipeline parallelism.

    Fields:
        implementation: the schedule class, as "module:class". None: GPipe's order, which `parallel.pipeline` runs
            itself, with any loss.
        stages_per_rank: how many stages each rank must have; None: any number, two by default.
        v_shaped: the last stages run back from the last rank to the first; otherwise ranks take stages in turns.
        splits_backward: computes the gradients of inputs and of weights separately.
        minimum_torch: the oldest torch version whose class computes correct gradients.
    """

    implementation: str | None
    stages_per_rank: int | None = None
    v_shaped: bool = False
    splits_backward: bool = False
    minimum_torch: str = "2.11"


# Before 2.13, torch's schedules that split the backward compute wrong gradients where weights meet the inputs in
# several places (an LSTM).
_TORCH = "torch.distributed.pipelining.schedules"
PIPELINE_SCHEDULES = {
    "gpipe": PipelineSchedule(None, stages_per_rank=1),
    "1f1b": PipelineSchedule(f"{_TORCH}:Schedule1F1B", stages_per_rank=1),
    "looped_bfs": PipelineSchedule(f"{_TORCH}:ScheduleLoopedBFS"),
    "interleaved": PipelineSchedule(f"{_TORCH}:ScheduleInterleaved1F1B"),
    "zero_bubble": PipelineSchedule(
        f"{_TORCH}:ScheduleInterleavedZeroBubble", splits_backward=True, minimum_torch="2.13"
    ),
    "zbv": PipelineSchedule(
        f"{_TORCH}:ScheduleZBVZeroBubble",
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
        minimum_torch="2.13",
    ),
}
