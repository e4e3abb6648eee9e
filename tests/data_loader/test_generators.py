# SPDX-License-Identifier: Apache-2.0
"""The states of generators: what is captured is what NumPy itself gives, whatever was drawn in between."""

import numpy as np
import pytest

from accelerate.data_loader.generators import Generators

DRAWS = {
    "nothing": lambda: None,
    "uniform": np.random.rand,
    "normal, whose second number is kept": np.random.randn,
    "three normals": lambda: np.random.standard_normal(3),
    "integers": lambda: np.random.randint(10),
    "seeded anew": lambda: np.random.seed(3),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_numpys_state_is_taken_whenever_it_has_changed(first, second):
    np.random.seed(0)
    generators = Generators()
    for draw in (DRAWS[first], DRAWS[second], DRAWS[first]):
        draw()
        for _ in range(2):
            found, expected = generators.capture()["numpy"], np.random.get_state()
            assert found[0] == expected[0] and found[2:] == expected[2:]
            assert (found[1] == expected[1]).all()
