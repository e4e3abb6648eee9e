# SPDX-License-Identifier: Apache-2.0
"""The state that all objects of a process share, which each test begins without, and values of all ranks."""

from typing import Any

import torch.distributed as dist

from accelerate.state import AcceleratorState, GradientState, PartialState


def reset_states() -> None:
    """Forget the run before; a process group stays, and the next run uses it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def all_ranks(value: Any) -> list[Any]:
    """This value of each rank, on all of them."""
    values = [None] * PartialState(cpu=True).num_processes
    dist.all_gather_object(values, value)
    return values
