# SPDX-License-Identifier: Apache-2.0
"""The state that all objects of a process share, which each test begins without, and values of all ranks."""

from typing import Any

from accelerate.collectives import gather_object
from accelerate.state import AcceleratorState, GradientState, PartialState


def reset_states() -> None:
    """Forget the run before; a process group stays, and the next run uses it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def all_ranks(value: Any) -> list[Any]:
    """This value of each rank, on all of them."""
    PartialState(cpu=True)
    return gather_object([value])
