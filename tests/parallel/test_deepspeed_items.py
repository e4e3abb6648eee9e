# SPDX-License-Identifier: Apache-2.0
"""The number that an engine's gradients are multiplied by: where it goes, and which engines cannot take it."""

from types import SimpleNamespace

import pytest
import torch

from accelerate.core.errors import ConfigurationError
from accelerate.parallel.deepspeed.items import check_multiplies, multiplied


def engine(optimizer, zero=True, **others):
    return SimpleNamespace(optimizer=optimizer, zero_optimization=lambda: zero, **others)


@pytest.mark.parametrize("factor, scale", [(4.0, 2.0), (0.0, 8.0)])
def test_a_step_divides_by_its_own_scale_for_once(factor, scale):
    optimizer = SimpleNamespace(custom_loss_scaler=False, external_loss_scale=None, loss_scale=8.0)
    with pytest.raises(RuntimeError), multiplied(engine(optimizer), torch.tensor(factor)):
        assert optimizer.custom_loss_scaler and optimizer.external_loss_scale == scale
        raise RuntimeError
    assert (optimizer.custom_loss_scaler, optimizer.external_loss_scale) == (False, None)


def test_gradients_that_are_whole_are_multiplied_where_they_lie():
    summed = [torch.ones(3), torch.ones(2)]
    with multiplied(engine(SimpleNamespace(fp32_groups_gradients_flat=summed)), torch.tensor(3.0)):
        assert summed[0].tolist() == [3.0] * 3 and summed[1].tolist() == [3.0] * 2
    module = torch.nn.Linear(2, 1)
    module.weight.grad = torch.ones(1, 2)
    with multiplied(engine(torch.optim.SGD(module.parameters()), zero=False, module=module), torch.tensor(3.0)):
        assert module.weight.grad.tolist() == [[3.0, 3.0]] and module.bias.grad is None


@pytest.mark.parametrize("option", [{"zenflow": True}, {"super_offload": lambda: True}])
def test_an_engine_that_steps_early_is_refused(option):
    check_multiplies(SimpleNamespace(zenflow=False, super_offload=lambda: False))
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))} updates parameters before"):
        check_multiplies(SimpleNamespace(**option))
