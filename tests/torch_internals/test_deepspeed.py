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
