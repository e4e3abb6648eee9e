# SPDX-License-Identifier: Apache-2.0
"""Seeds, and what the synchronisation of generators refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from accelerate.collectives.rng import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accelerate.core.errors import ConfigurationError


def test_set_seed(alone):
    set_seed(5)
    assert random.random() == random.Random(5).random()
    assert np.random.rand() == np.random.RandomState(5).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    alone.process_index = 3
    set_seed(5, device_specific=True)
    assert random.random() == random.Random(8).random()
    set_seed(5, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_synchronize_refuses():
    synchronize_rng_states([])
    synchronize_rng_state()
    with pytest.raises(ValueError, match="'foo'"):
        synchronize_rng_states(["foo"])
    with pytest.raises(ConfigurationError, match="needs a generator"):
        synchronize_rng_states(["generator"])
    with pytest.raises(ConfigurationError, match="not have a xpu device"):
        synchronize_rng_states(["xpu"])
