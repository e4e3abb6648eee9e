# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate. Change the table, then run the script.

from . import big_modeling as big_modeling
from . import checkpointing as checkpointing
from . import data_loader as data_loader
from . import hooks as hooks
from . import inference as inference
from . import launchers as launchers
from . import local_sgd as local_sgd
from . import logging as logging
from . import optimizer as optimizer
from . import parallelism_config as parallelism_config
from . import scheduler as scheduler
from . import state as state
from . import test_utils as test_utils
from . import tracking as tracking
from . import utils as utils
from .accelerator import Accelerator as Accelerator
from .big_modeling import cpu_offload as cpu_offload
from .big_modeling import cpu_offload_with_hook as cpu_offload_with_hook
from .big_modeling import disk_offload as disk_offload
from .big_modeling import dispatch_model as dispatch_model
from .big_modeling import init_empty_weights as init_empty_weights
from .big_modeling import init_on_device as init_on_device
from .big_modeling import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from .checkpointing.export import export as export
from .collectives.batch_size import find_executable_batch_size as find_executable_batch_size
from .collectives.rng import synchronize_rng_states as synchronize_rng_states
from .config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from .config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from .config.precision import AutocastKwargs as AutocastKwargs
from .config.precision import GradScalerKwargs as GradScalerKwargs
from .config.training import DataLoaderConfiguration as DataLoaderConfiguration
from .config.training import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from .config.training import InitProcessGroupKwargs as InitProcessGroupKwargs
from .config.training import ProfileKwargs as ProfileKwargs
from .core.availability import is_rich_available as is_rich_available
from .core.enums import DDPCommunicationHookType as DDPCommunicationHookType
from .core.enums import DistributedType as DistributedType
from .core.version import __version__ as __version__
from .data_loader.prepare import skip_first_batches as skip_first_batches
from .inference import prepare_pippy as prepare_pippy
from .launchers.notebook import debug_launcher as debug_launcher
from .launchers.notebook import notebook_launcher as notebook_launcher
from .local_sgd import LocalSGD as LocalSGD
from .parallelism_config import ParallelismConfig as ParallelismConfig
from .placement.device_map import infer_auto_device_map as infer_auto_device_map
from .placement.load import load_checkpoint_in_model as load_checkpoint_in_model
from .state import PartialState as PartialState

EXPORTS: dict[str, list[str]]
