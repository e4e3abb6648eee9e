# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.dataclasses. Change the table, then run the script.

from ..collectives.tensors import TensorInformation as TensorInformation
from ..config.checks import KwargsHandler as KwargsHandler
from ..config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from ..config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from ..config.megatron import MegatronLMPlugin as MegatronLMPlugin
from ..config.parallel import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from ..config.parallel import PipelineParallelConfig as PipelineParallelConfig
from ..config.parallel import TorchContextParallelConfig as TorchContextParallelConfig
from ..config.parallel import TorchTensorParallelConfig as TorchTensorParallelConfig
from ..config.parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from ..config.precision import AORecipeKwargs as AORecipeKwargs
from ..config.precision import AutocastKwargs as AutocastKwargs
from ..config.precision import FP8RecipeKwargs as FP8RecipeKwargs
from ..config.precision import GradScalerKwargs as GradScalerKwargs
from ..config.precision import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from ..config.precision import MasterWeightsKwargs as MasterWeightsKwargs
from ..config.precision import TERecipeKwargs as TERecipeKwargs
from ..config.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from ..config.training import DataLoaderConfiguration as DataLoaderConfiguration
from ..config.training import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from ..config.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from ..config.training import InitProcessGroupKwargs as InitProcessGroupKwargs
from ..config.training import OptimizerOffloadKwargs as OptimizerOffloadKwargs
from ..config.training import ProfileKwargs as ProfileKwargs
from ..config.training import ProjectConfiguration as ProjectConfiguration
from ..config.training import TorchDynamoPlugin as TorchDynamoPlugin
from ..core.enums import BaseEnum as BaseEnum
from ..core.enums import ComputeEnvironment as ComputeEnvironment
from ..core.enums import CustomDtype as CustomDtype
from ..core.enums import DDPCommunicationHookType as DDPCommunicationHookType
from ..core.enums import DistributedType as DistributedType
from ..core.enums import DynamoBackend as DynamoBackend
from ..core.enums import EnumWithContains as EnumWithContains
from ..core.enums import FP8BackendType as FP8BackendType
from ..core.enums import LoggerType as LoggerType
from ..core.enums import PrecisionType as PrecisionType
from ..core.enums import RNGType as RNGType
from ..core.enums import SageMakerDistributedType as SageMakerDistributedType
from ..core.modules import get_module_class_from_name as get_module_class_from_name
from ..parallelism_config import ParallelismConfig as ParallelismConfig

EXPORTS: dict[str, list[str]]
