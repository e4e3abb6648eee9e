# SPDX-License-Identifier: Apache-2.0
"""Accelerate: five lines make a PyTorch script run on any device and any layout.

Importing the package imports neither torch nor any room of it: each name is fetched from its home at its first use.
"""

from typing import TYPE_CHECKING

from .core.lazy import attach
from .core.version import __version__

# Where each public name lives. The imports below say the same to static tools; a test holds the two together.
EXPORTS = {
    "accelerator": ["Accelerator"],
    "big_modeling": [
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
    ],
    "collectives.batch_size": ["find_executable_batch_size"],
    "collectives.rng": ["synchronize_rng_states"],
    "config.deepspeed": ["DeepSpeedPlugin"],
    "config.fsdp": ["FullyShardedDataParallelPlugin"],
    "config.precision": ["AutocastKwargs", "GradScalerKwargs"],
    "config.training": [
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
    ],
    "core.availability": ["is_rich_available"],
    "core.enums": ["DDPCommunicationHookType", "DistributedType"],
    "data_loader.prepare": ["skip_first_batches"],
    "inference": ["prepare_pippy"],
    "launchers.notebook": ["debug_launcher", "notebook_launcher"],
    "local_sgd": ["LocalSGD"],
    "parallelism_config": ["ParallelismConfig"],
    "placement.device_map": ["infer_auto_device_map"],
    "placement.load": ["load_checkpoint_in_model"],
    "state": ["PartialState"],
}

# Modules of the package that may be reached as its attributes.
SUBMODULES = [
    "big_modeling",
    "checkpointing",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "test_utils",
    "tracking",
    "utils",
]

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .big_modeling import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
    )
    from .collectives.batch_size import find_executable_batch_size
    from .collectives.rng import synchronize_rng_states
    from .config.deepspeed import DeepSpeedPlugin
    from .config.fsdp import FullyShardedDataParallelPlugin
    from .config.precision import AutocastKwargs, GradScalerKwargs
    from .config.training import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from .core.availability import is_rich_available
    from .core.enums import DDPCommunicationHookType, DistributedType
    from .data_loader.prepare import skip_first_batches
    from .inference import prepare_pippy
    from .launchers.notebook import debug_launcher, notebook_launcher
    from .local_sgd import LocalSGD
    from .parallelism_config import ParallelismConfig
    from .placement.device_map import infer_auto_device_map
    from .placement.load import load_checkpoint_in_model
    from .state import PartialState

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, SUBMODULES)
