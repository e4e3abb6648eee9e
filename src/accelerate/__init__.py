# SPDX-License-Identifier: Apache-2.0
"""Accelerate: run a PyTorch training script on any device and any layout, with five lines changed.

Importing the package imports neither torch nor any module of the package: each name is imported at its first use.
"""

from .core.lazy import attach
from .core.version import __version__ as __version__

# The module that defines each public name. `tools/stubs.py` writes `__init__.pyi` from it for type checkers.
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
    "checkpointing.export": ["export"],
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

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, SUBMODULES)
