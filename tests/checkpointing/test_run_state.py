# SPDX-License-Identifier: Apache-2.0
"""An unfinished accumulation window is continued in the layout that saved it, whatever messages call this layout."""

from __future__ import annotations

import torch

from accelerate import Accelerator
from accelerate.parallel.base import Strategy
from accelerate.parallel.registry import strategy_key
from accelerate.precision.base import Precision


def test_a_window_does_not_depend_on_the_text_in_messages(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def accumulate():
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()

    accumulate()
    accelerator.save_state(tmp_path / "c")
    saved = model.weight.grad.clone()
    accumulate()
    accelerator.strategy.name = "another text"
    report = accelerator.load_state(tmp_path / "c")
    assert report.progress["window_layout"] == {"strategy": "single", "processes": 1}
    assert accelerator._checkpoints.accumulation.step == 1
    assert not report.notes and torch.equal(model.weight.grad, saved)


def test_a_strategy_of_another_package_is_known_by_its_class():
    kind = type("Mine", (Strategy,), {"__module__": "other"})
    assert strategy_key(kind(torch.device("cpu"), Precision())) == "other:Mine"
