# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.dataclasses`: options objects and enums. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "core.enums": [
        "BaseEnum",
        "ComputeEnvironment",
        "CustomDtype",
        "DDPCommunicationHookType",
        "DistributedType",
        "DynamoBackend",
        "EnumWithContains",
        "FP8BackendType",
        "LoggerType",
        "PrecisionType",
        "RNGType",
        "SageMakerDistributedType",
    ],
    "config.base": [
        "KwargsHandler",
    ],
    "config.precision": [
        "AutocastKwargs",
        "GradScalerKwargs",
    ],
    "config.fp8": [
        "AORecipeKwargs",
        "FP8RecipeKwargs",
        "MSAMPRecipeKwargs",
        "TERecipeKwargs",
    ],
    "config.training": [
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
    ],
    "config.fsdp": [
        "FullyShardedDataParallelPlugin",
    ],
    "config.deepspeed": [
        "DeepSpeedPlugin",
    ],
    "config.megatron": [
        "MegatronLMPlugin",
    ],
    "config.parallel": [
        "DeepSpeedSequenceParallelConfig",
        "TorchContextParallelConfig",
        "TorchTensorParallelConfig",
        "TorchTensorParallelPlugin",
    ],
    "config.quantization": [
        "BnbQuantizationConfig",
    ],
    "parallelism_config": [
        "ParallelismConfig",
    ],
    "collectives": [
        "TensorInformation",
    ],
    "core.modules": [
        "get_module_class_from_name",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
