# SPDX-License-Identifier: Apache-2.0
"""The state that all objects of a process share, which each test begins without."""

from accelerate.state import AcceleratorState, GradientState, PartialState


def reset_states() -> None:
    """Forget the run before; a process group stays, and the next run uses it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
