# SPDX-License-Identifier: Apache-2.0
"""The state of DeepSpeed's optimizers."""

from accelerate.torch_internals import deepspeed


class Zero:
    """As ZeRO 1 and 2: parameters are connected to the entries of their state once."""

    def __init__(self):
        self._hp_optimizer_states_linked = True
        self.entries, self.linked = ["exp_avg"], []

    def _lazy_init_hp_params_optimizer_state(self):
        if not self._hp_optimizer_states_linked:
            self.linked = list(self.entries)
            self._hp_optimizer_states_linked = True


def test_parameters_are_connected_again():
    zero = Zero()
    deepspeed.link_optimizer_state(zero)
    assert zero.linked == ["exp_avg"] and zero._hp_optimizer_states_linked
    deepspeed.link_optimizer_state(object())


class Parameter:
    """With the attributes that ZeRO sets."""

    def __init__(self, *names):
        for name in names:
            setattr(self, name, object())


def test_parameters_with_fp32_weights():
    assert deepspeed.has_fp32_fragment(Parameter("_hp_mapping"))
    assert deepspeed.is_trained_by_zero3(Parameter("_z3_optimizer"))
    assert not deepspeed.has_fp32_fragment(Parameter())
    assert not deepspeed.is_trained_by_zero3(Parameter())
