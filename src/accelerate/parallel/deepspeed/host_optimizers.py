# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's optimizers for states in host memory, in place of those that the user gave."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import PrepareError

_KEEP = 'Set "zero_force_ds_cpu_optimizer": false in the DeepSpeed config to keep the optimizer that you give.'
# Options of a parameter group that DeepSpeed's optimizers do not have, with the values that change nothing.
_WITHOUT = {"amsgrad": False, "maximize": False, "lr_decay": 0, "initial_accumulator_value": 0}


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's implementation of an optimizer whose states are in host memory.

    Adam, AdamW and Adagrad of torch and of bitsandbytes, and Lion of any package, have one. It has the optimizer's own
    parameter groups, so that schedulers of the optimizer set its learning rates.

    Args:
        optimizer: one that has not stepped yet.

    Returns:
        The optimizer that takes its place. Others are returned as they are, and DeepSpeed refuses to offload them
        unless its configuration has `zero_force_ds_cpu_optimizer` set to false.

    Raises:
        PrepareError: an option of the optimizer has no counterpart (`amsgrad`, `maximize`, `lr_decay`).
    """
    kind, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if kind != "Lion" and (kind not in ("Adam", "AdamW", "Adagrad") or package not in ("torch", "bitsandbytes")):
        return optimizer
    for group in optimizer.param_groups:
        for name, neutral in _WITHOUT.items():
            if group.get(name, neutral) != neutral:
                raise PrepareError(f"DeepSpeed's {kind} for the CPU has no {name} (here {group[name]!r}). {_KEEP}")
        # It takes numbers only.
        group["lr"] = float(group["lr"])
    groups: Any = optimizer.param_groups
    found: torch.optim.Optimizer
    if kind == "Lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        found = DeepSpeedCPULion(groups)
    elif kind == "Adagrad":
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        found = DeepSpeedCPUAdagrad(groups)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        decoupled = kind == "AdamW" or bool(optimizer.defaults.get("decoupled_weight_decay"))
        found = DeepSpeedCPUAdam(groups, adamw_mode=decoupled)
    # A scheduler of the optimizer would warn that it never steps.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return found
