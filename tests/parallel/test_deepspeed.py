# SPDX-License-Identifier: Apache-2.0
"""What stands for DeepSpeed's objects, and that its absence is said."""

import pytest
import torch

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.core.imports import is_available
from accelerate.parallel.deepspeed.engine import DeepSpeedEngineWrapper, DummyOptim, DummyScheduler, start_engine


class Engine:
    def __init__(self):
        self.calls = []

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.calls.append(is_boundary)

    def backward(self, loss, **kwargs):
        self.calls.append(("backward", kwargs))

    def step(self):
        self.calls.append("step")

    def get_global_grad_norm(self):
        return torch.tensor(2.0)


def test_the_engine_steps_where_a_window_ends():
    engine = Engine()
    driver = DeepSpeedEngineWrapper(engine)
    driver.backward(torch.ones(()), sync_gradients=False)
    driver.backward(torch.ones(()), retain_graph=True)
    assert engine.calls == [False, ("backward", {}), True, ("backward", {"retain_graph": True}), "step"]
    assert driver.get_global_grad_norm() == 2.0


def test_placeholders_keep_what_they_are_given():
    optimizer = DummyOptim([1], lr=0.5, betas=(0, 1))
    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2, power=3)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.5, 0, {"betas": (0, 1)})
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.kwargs) == (optimizer, 10, {"power": 3})


@pytest.mark.skipif(is_available("deepspeed"), reason="deepspeed is installed")
def test_absence_is_said():
    with pytest.raises(ImportError, match="deepspeed"):
        start_engine(
            DeepSpeedPlugin(), torch.nn.Linear(1, 1), micro_batch_size=1, gradient_accumulation_steps=1, world_size=1
        )
