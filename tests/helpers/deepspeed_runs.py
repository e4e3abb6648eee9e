# SPDX-License-Identifier: Apache-2.0
"""What the tests of DeepSpeed share: when and on which ranks they run, an engine's configuration, an Accelerator."""

import functools
import warnings

import pytest
from rank_pool import on_ranks

from accelerate.core.imports import is_available

needs_deepspeed = pytest.mark.skipif(
    not is_available("deepspeed"), reason="deepspeed is not installed (`make install` does it)"
)
# What an engine imports late.
LATE_IMPORTS = (
    "deepspeed_cpu",
    "torch._inductor.compile_fx",
    "transformers.integrations.deepspeed",
    "accelerate.parallel.deepspeed.strategy",
)
# DeepSpeed chooses its device when it is imported.
on_engine_ranks = functools.partial(on_ranks, env={"DS_ACCELERATOR": "cpu"})

ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
}


def config(stage, clip=None, zero=None, **others):
    """A configuration of a ZeRO stage: what the program decides is "auto"; `zero` and `others` are set as given."""
    clipping = {} if clip is None else {"gradient_clipping": clip}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **clipping,
        **others,
    }


def import_deepspeed():
    """DeepSpeed, on a rank."""
    warnings.simplefilter("ignore")
    from deepspeed_cpu import deepspeed

    return deepspeed


def fresh(plugin=None, **options):
    """An Accelerator as if it were the first of its process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import_deepspeed()
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **options)
