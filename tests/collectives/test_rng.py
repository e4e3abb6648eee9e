# SPDX-License-Identifier: Apache-2.0
"""Seeds, and generators' states as plain data."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from accelerate.collectives.rng import (
    capture_rng_states,
    restore_rng_states,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accelerate.core.errors import CheckpointError, ConfigurationError
from accelerate.state import AcceleratorState, PartialState


@pytest.fixture(autouse=True)
def alone():
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def test_set_seed():
    set_seed(5)
    assert random.random() == random.Random(5).random()
    assert np.random.rand() == np.random.RandomState(5).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    PartialState().process_index = 3
    set_seed(5, device_specific=True)
    assert random.random() == random.Random(8).random()
    set_seed(5, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_states_survive_json():
    set_seed(11)
    draw()  # leaves a cached normal number in the generators of Python and numpy
    states = json.loads(json.dumps(capture_rng_states()))
    expected = [draw() for _ in range(3)]
    set_seed(99)
    restore_rng_states(states)
    assert [draw() for _ in range(3)] == expected


def test_broken_states_are_refused():
    states = capture_rng_states()
    with pytest.raises(CheckpointError, match="generators' states cannot be restored"):
        restore_rng_states({**states, "torch": "AAAA"})
    with pytest.raises(CheckpointError, match="'python'"):
        restore_rng_states({})


def test_synchronize_refuses():
    synchronize_rng_states([])
    synchronize_rng_state()
    with pytest.raises(ConfigurationError, match="'foo' is unknown: use some of torch, cuda"):
        synchronize_rng_states(["foo"])
    with pytest.raises(ConfigurationError, match="needs a generator"):
        synchronize_rng_states(["generator"])
    with pytest.raises(ConfigurationError, match="no xpu device here"):
        synchronize_rng_states(["xpu"])
