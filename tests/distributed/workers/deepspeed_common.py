# SPDX-License-Identifier: Apache-2.0
"""What the workers of DeepSpeed's tests share: the configuration of an engine, and a fresh Accelerator."""

import deepspeed

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

# DeepSpeed would compile its own messages through shared memory first: a minute that says nothing about us.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}}


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


def fresh(plugin=None, **options):
    """An Accelerator as if it were the first of its process."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **options)
