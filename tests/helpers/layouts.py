# SPDX-License-Identifier: Apache-2.0
"""Arguments of `Accelerator` that select a layout, and the comparison of what was trained in it."""

import torch

from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin


def units_of(*classes, version=2, **options):
    """The plugin for FSDP whose units are the modules of classes with these names."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=list(classes),
        **options,
    )


def sharded(version, **options):
    """FSDP of this version, whose units are the `Sequential` modules."""
    return {"fsdp_plugin": units_of("Sequential", version=version, **options)}


def sharded_by_size(version, **options):
    """FSDP of this version, whose units are the modules with 10 parameters or more."""
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10, **options
        )
    }


def sized(plan=None, **sizes):
    """A layout of these sizes; `plan` has the styles of modules under tensor parallelism."""
    handler = None if plan is None else TorchTensorParallelConfig(plan=plan)
    return {"parallelism_config": ParallelismConfig(**sizes, tp_handler=handler)}


def compare(state, expected, tolerance=1e-8, what="state"):
    """A gathered state, which rank 0 has, is the one of a plain model or optimizer."""
    if PartialState().is_main_process:
        torch.testing.assert_close(
            dict(state), dict(expected), rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
        )


def compare_state(accelerator, model, expected, tolerance=1e-8, what="state"):
    """The unsharded state of a prepared model, which all ranks gather, is that of a plain model."""
    compare(accelerator.get_state_dict(model), expected, tolerance, what)
