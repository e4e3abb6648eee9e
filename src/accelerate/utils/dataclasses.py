# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.dataclasses`: options objects and enums. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "collectives.tensors": ["TensorInformation"],
    "config.checks": ["KwargsHandler"],
    "config.deepspeed": ["DeepSpeedPlugin"],
    "config.fsdp": ["FullyShardedDataParallelPlugin"],
    "config.megatron": ["MegatronLMPlugin"],
    "config.parallel": [
        "DeepSpeedSequenceParallelConfig",
        "PipelineParallelConfig",
        "TorchContextParallelConfig",
        "TorchTensorParallelConfig",
        "TorchTensorParallelPlugin",
    ],
    "config.precision": [
        "AORecipeKwargs",
        "AutocastKwargs",
        "FP8RecipeKwargs",
        "GradScalerKwargs",
        "MSAMPRecipeKwargs",
        "MasterWeightsKwargs",
        "TERecipeKwargs",
    ],
    "config.quantization": ["BnbQuantizationConfig"],
    "config.training": [
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "OptimizerOffloadKwargs",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
    ],
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
    "core.modules": ["get_module_class_from_name"],
    "parallelism_config": ["ParallelismConfig"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
