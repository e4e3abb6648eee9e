# SPDX-License-Identifier: Apache-2.0
"""Placeholders of engines: refused in a run in which nothing takes their place."""

import pytest
import torch

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.utils import (
    DummyOptim,
    DummyScheduler,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
)

OPTIMIZER = DummyOptim([])
ALL = [
    OPTIMIZER,
    DummyScheduler(OPTIMIZER),
    MegatronLMDummyScheduler(OPTIMIZER, 10),
    MegatronLMDummyDataLoader(data_path="corpus"),
]


@pytest.mark.parametrize("placeholder", ALL, ids=lambda obj: type(obj).__name__)
def test_without_the_engine(placeholder):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PrepareError, match=f"{type(placeholder).__name__} has no effect"):
        accelerator.prepare(torch.nn.Linear(2, 2), placeholder)


@pytest.mark.parametrize("scheduler", ALL[1:3], ids=lambda obj: type(obj).__name__)
def test_a_scheduler_alone(scheduler):
    with pytest.raises(PrepareError, match="has no effect in this run"):
        Accelerator(cpu=True).prepare_scheduler(scheduler)
