# SPDX-License-Identifier: Apache-2.0
"""The states of random generators: global ones and those that samplers own; captured, compared, restored, packed."""

from __future__ import annotations

import array
import hashlib
import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Sampler

States = dict[str, Any]

# Every process has these; the others belong to a sampler or a loader.
GLOBAL = ("torch", "python", "numpy")


class Generators:
    """What an order may be drawn from.

    Args:
        torchs: the torch generators of a loader and its samplers.
        others: generators of `random` or NumPy that its samplers have as attributes.
        every: follow the global generators of Python and NumPy too, not only torch's.
    """

    def __init__(self, torchs: Iterable[torch.Generator] = (), others: Iterable[Any] = (), every: bool = True) -> None:
        self.torchs = _distinct(torchs)
        self.others = _distinct(others)
        self.every = every

    def capture(self) -> States:
        """The present states, one entry for each kind of generator."""
        states: States = {"torch": torch.get_rng_state()}
        if self.every:
            states["python"] = random.getstate()
            if "numpy" in sys.modules:
                states["numpy"] = sys.modules["numpy"].random.get_state()
        return {**states, **self.capture_private()}

    def capture_private(self) -> States:
        """The present states of the generators that are not global."""
        states: States = {}
        if self.torchs:
            states["generators"] = [generator.get_state() for generator in self.torchs]
        if self.others:
            states["private"] = [_state_of(generator) for generator in self.others]
        return states

    def restore(self, states: States) -> None:
        """Set the generators that `states` tells of. Takes captured, packed and saved states."""
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        if "python" in states:
            random.setstate(_python(states["python"]))
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(_numpy(states["numpy"]))
        for generator, state in zip(self.torchs, states.get("generators", ()), strict=False):
            generator.set_state(state)
        for generator, state in zip(self.others, states.get("private", ()), strict=False):
            _set_state(generator, state)


def own_generators(*roots: Any) -> tuple[list[torch.Generator], list[Any]]:
    """The generators that samplers have as attributes, also in samplers inside them: torch's, and all others."""
    torchs: list[torch.Generator] = []
    others: list[Any] = []
    waiting: list[Any] = [vars(root) for root in roots if hasattr(root, "__dict__")]
    seen: set[int] = set()
    while waiting:
        thing = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Generator):
            torchs.append(thing)
        elif _is_other(thing):
            others.append(thing)
        elif isinstance(thing, dict) and len(thing) <= 64:
            waiting += thing.values()
        elif isinstance(thing, (list, tuple)) and len(thing) <= 64:
            waiting += thing
        elif isinstance(thing, Sampler):
            waiting.append(vars(thing))
    return torchs, others


def equal(left: Any, right: Any) -> bool:
    """Whether two captured states are the same."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        # Python's own state is a tuple of plain numbers, which compares fastest as it is.
        if left and isinstance(left[0], int):
            return bool(left == right)
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    if hasattr(left, "tobytes"):
        return bool(left.tobytes() == right.tobytes())
    return bool(left == right)


def differing(left: States, right: States) -> list[str]:
    """The kinds of generators whose states are not the same."""
    return [kind for kind in left if not equal(left[kind], right[kind])]


def derived(states: States) -> States:
    """States of the global generators that follow from `states` and have nothing else in common with them."""
    seed = hashlib.sha256(pickle.dumps(_plain({kind: states[kind] for kind in GLOBAL if kind in states}))).digest()
    found: States = {"torch": torch.Generator().manual_seed(int.from_bytes(seed[:7], "little")).get_state()}
    if "python" in states:
        found["python"] = random.Random(seed).getstate()
    if "numpy" in states:
        found["numpy"] = sys.modules["numpy"].random.RandomState(list(seed)).get_state()
    return found


def packed(states: States) -> States:
    """The same with the words of Python's and NumPy's generators as byte tensors, a tenth of their size."""
    found = dict(states)
    if "python" in found:
        version, words, gauss = found["python"]
        found["python"] = [version, _bytes(array.array("I", words).tobytes()), gauss]
    if "numpy" in found:
        kind, words, *rest = found["numpy"]
        found["numpy"] = [kind, _bytes(words.tobytes()), *rest]
    return found


def listed(value: Any) -> Any:
    """Tuples and arrays as lists, which can be written as JSON and compared."""
    if isinstance(value, (tuple, list)):
        return [listed(part) for part in value]
    if isinstance(value, dict):
        return {name: listed(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _words(words: Any) -> list[int]:
    if isinstance(words, torch.Tensor):
        return array.array("I", words.numpy().tobytes()).tolist()
    return list(words)


def _python(state: Any) -> Any:
    version, words, gauss = state
    return version, tuple(_words(words)), gauss


def _numpy(state: Any) -> Any:
    kind, words, *rest = state
    return (kind, _words(words) if isinstance(words, torch.Tensor) else words, *rest)


def _plain(states: Any) -> Any:
    if isinstance(states, torch.Tensor):
        return states.numpy().tobytes()
    if isinstance(states, dict):
        return [(name, _plain(states[name])) for name in sorted(states)]
    if isinstance(states, (list, tuple)):
        return [_plain(part) for part in states]
    return states.tobytes() if hasattr(states, "tobytes") else states


def _is_other(thing: Any) -> bool:
    if isinstance(thing, random.Random):
        # One that asks the system for every number has no state.
        return not isinstance(thing, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, (numpy.random.Generator, numpy.random.RandomState))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(_python(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(_numpy(state))


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())
