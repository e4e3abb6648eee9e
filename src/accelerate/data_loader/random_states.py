# SPDX-License-Identifier: Apache-2.0
"""States of random generators as plain values, which compare with == and which other processes can load."""

from __future__ import annotations

import array
import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

States = dict[str, Any]

# The generators that every process has.
GLOBAL = ("torch", "python", "numpy")


def capture(kinds: Iterable[str] = GLOBAL) -> States:
    """The present states of global generators."""
    states: States = {}
    for kind in kinds:
        if kind == "torch":
            states[kind] = torch.get_rng_state().numpy().tobytes()
        elif kind == "python":
            version, words, gauss = random.getstate()
            states[kind] = [version, array.array("I", words).tobytes(), gauss]
        else:
            name, keys, *others = np.random.get_state()
            states[kind] = [name, np.asarray(keys).tobytes(), *others]
    return states


def restore(states: States) -> None:
    """Set the global generators whose states are among `states`."""
    if "torch" in states:
        torch.set_rng_state(torch_state(states["torch"]))
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(_words(words)), gauss))
    if "numpy" in states:
        name, keys, *others = states["numpy"]
        np.random.set_state((name, _words(keys), *others))


def torch_state(state: Any) -> torch.Tensor:
    """The state of a torch generator, as `set_state` takes it."""
    return (
        torch.frombuffer(bytearray(state), dtype=torch.uint8) if isinstance(state, bytes) else state
    )


def _words(words: Any) -> list[int]:
    # Positions of earlier versions have lists or byte tensors.
    if isinstance(words, list):
        return words
    return array.array("I", words if isinstance(words, bytes) else words.numpy().tobytes()).tolist()


@contextlib.contextmanager
def preserved(kinds: Iterable[str] = GLOBAL) -> Iterator[None]:
    """A context that restores the global generators at its end."""
    states = capture(kinds)
    try:
        yield
    finally:
        restore(states)
