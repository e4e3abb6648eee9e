# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's optimizers: which parameters have fp32 weights, and which entries of the state belong to them."""

from __future__ import annotations

from typing import Any

from . import Internal

DEEPSPEED_STATE = Internal(
    name="deepspeed_state",
    what="_lazy_init_hp_params_optimizer_state of DeepSpeed's ZeRO 1 and 2, which it calls once",
    versions="DeepSpeed 0.18 to 0.19",
    upstream="not reported",
    needed_by="save_state and load_state of a DeepSpeed run with ZeRO 1 or 2",
    without="the state of an optimizer cannot be loaded before its first step",
    test="tests/torch_internals/test_deepspeed.py::test_parameters_are_connected_again",
)

DEEPSPEED_PARAMETERS = Internal(
    name="deepspeed_parameters",
    what="the attributes _hp_mapping and _z3_optimizer that ZeRO gives to parameters",
    versions="DeepSpeed 0.18 to 0.19",
    upstream="not reported",
    needed_by="save_state and load_state of a DeepSpeed run with fp32 weights",
    without="a checkpoint has no state of optimizers under ZeRO 1 and 2, and no fp32 weights under ZeRO 3",
    test="tests/torch_internals/test_deepspeed.py::test_parameters_with_fp32_weights",
)


def has_fp32_fragment(parameter: object) -> bool:
    """Whether ZeRO 1 or 2, or the engine's bf16 optimizer, keeps fp32 weights of a parameter."""
    return DEEPSPEED_PARAMETERS.is_on and hasattr(parameter, "_hp_mapping")


def is_trained_by_zero3(parameter: object) -> bool:
    """Whether an optimizer of ZeRO 3 keeps fp32 weights of a parameter."""
    return DEEPSPEED_PARAMETERS.is_on and hasattr(parameter, "_z3_optimizer")


def link_optimizer_state(zero: Any) -> None:
    """Connect the parameters of a ZeRO optimizer to the entries of their state that exist now.

    ZeRO does so once, after the first group has stepped, when the other groups have no entries yet.
    """
    if DEEPSPEED_STATE.is_on and hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
