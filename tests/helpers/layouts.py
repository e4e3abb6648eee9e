# SPDX-License-Identifier: Apache-2.0
"""Arguments of `Accelerator` that select a layout."""

from accelerate.utils import FullyShardedDataParallelPlugin


def sharded(version, **options):
    """FSDP of this version, whose units are the `Sequential` modules."""
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Sequential"],
            **options,
        )
    }


def sharded_by_size(version, **options):
    """FSDP of this version, whose units are the modules with 10 parameters or more."""
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10, **options
        )
    }
