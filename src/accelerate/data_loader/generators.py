# SPDX-License-Identifier: Apache-2.0
"""The states of random generators, global ones and those of samplers: capture, compare, restore, pack."""

from __future__ import annotations

import _random
import array
import ctypes
import functools
import hashlib
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

States = dict[str, Any]

# Every process has these; the others belong to a sampler or a loader.
GLOBAL = ("torch", "python", "numpy")
# 624 words of four bytes, and the place among them.
_MT19937_BYTES = 625 * 4
# The seed lies within so many bytes of torch's C++ object, which is larger than that.
_TORCH_HEADER = 256


class Generators:
    """The generators that an order may be drawn from.

    Args:
        torchs: the torch generators of a loader and its samplers.
        others: generators of `random` or NumPy that its samplers have as attributes.
        every: follow the global generators of Python and NumPy too, not only torch's.
    """

    def __init__(self, torchs: Iterable[torch.Generator] = (), others: Iterable[Any] = (), every: bool = True) -> None:
        self.torchs: list[Any] = _distinct(torchs)
        self.others: list[Any] = _distinct(others)
        self.every = every
        self._last: States = {}

    def capture(self) -> States:
        """The present states, one entry for each kind of generator. Not to be changed: it may be returned again."""
        watched = _watched()
        if not self.every:
            return {"torch": watched[0].state(), **self.capture_private()}
        torchs, python, numpy = watched[0].state(), watched[1].state(), watched[2].state()
        last = self._last
        if last and last["torch"] is torchs and last["python"] is python and last["numpy"] is numpy:
            # The usual case, at every batch.
            return {**last, **self.capture_private()} if self.torchs or self.others else last
        self._last = {"torch": torchs, "python": python, "numpy": numpy}
        return {**self._last, **self.capture_private()}

    def capture_private(self) -> States:
        """The present states of the generators that are not global."""
        states: States = {}
        if self.torchs:
            states["generators"] = [generator.get_state() for generator in self.torchs]
        if self.others:
            states["private"] = [_state_of(generator) for generator in self.others]
        return states

    def restore(self, states: States) -> None:
        """Set the generators to `states`, which are captured, packed or saved ones."""
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        if "python" in states:
            random.setstate(_python(states["python"]))
        if "numpy" in states:
            np.random.set_state(_numpy(states["numpy"]))
        for generator, state in zip(self.torchs, states.get("generators", ()), strict=False):
            generator.set_state(state)
        for generator, state in zip(self.others, states.get("private", ()), strict=False):
            _set_state(generator, state)


class _Watched:
    """A global generator. Its state is copied only after the memory that holds it has changed.

    NumPy takes 30 us for a copy, Python 7 us and torch 1 us, which is too much for every batch. Comparing the memory
    takes 0.3 us.

    Args:
        copy: returns the state.
        memory: returns the bytes that hold it, or None where they are not known: then every call copies the state.
    """

    def __init__(self, copy: Callable[[], Any], memory: Callable[[], bytes | None]) -> None:
        self._copy = copy
        self._memory = memory
        self._seen: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """The present state: the same object as long as it has not changed."""
        memory = self._memory()
        if memory is None or memory != self._seen:
            self._state = self._copy()
            self._seen = memory
        return self._state


@functools.cache
def _watched() -> tuple[_Watched, _Watched, _Watched]:
    """The global generators of torch, Python and NumPy."""
    python: Any = random.getstate
    numpy: Any = np.random.get_state
    seed_at = _offset_of_torch_seed()
    return (
        _Watched(
            torch.get_rng_state,
            _copy_of_torch if seed_at is None else _memory_of_torch(torch.default_generator, seed_at),
        ),
        _Watched(python, _memory_of_python(python.__self__) if _python_is_readable() else _unknown),
        _Watched(numpy, _memory_of_numpy(numpy.__self__) if _numpy_is_readable() else _unknown),
    )


def _unknown() -> None:
    """What `_Watched` takes where no memory can be compared."""


def _memory_at(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def _fields_of(thing: Any, kind: type) -> Any:
    """The memory of a C object: the fields of its class `kind`, without the reference count before them."""
    header = object.__basicsize__
    return _memory_at(id(thing) + header, kind.__basicsize__ - header)


def _copy_of_torch() -> bytes:
    # Comparing the copies as tensors would take longer.
    return torch.get_rng_state().numpy().tobytes()


def _memory_of_torch(generator: Any, seed_at: int) -> Callable[[], bytes]:
    """What reads the state of a CPU generator: the words and the place among them, and the normal number that is kept.

    Args:
        generator: the generator.
        seed_at: where its C++ object has the seed (8 bytes). After it come the number of words left (4), a flag (4),
            the place (4), 624 words, and after padding an optional `float` and an optional `double`.

    Returns:
        A function that returns the state's bytes.
    """
    words_at = generator._cdata + seed_at + 16
    words = _memory_at(words_at, _MT19937_BYTES)
    kept_at = words_at + _MT19937_BYTES + 4
    single, double = _memory_at(kept_at, 4), _memory_at(kept_at + 8, 8)
    has_single, has_double = (ctypes.c_ubyte.from_address(kept_at + place) for place in (4, 16))

    def read() -> bytes:
        content: bytes = words.raw
        if has_single.value:
            content += b"s" + single.raw
        return content + b"d" + double.raw if has_double.value else content

    return read


def _memory_of_python(generator: random.Random) -> Callable[[], bytes]:
    """What reads the state of a generator: the words and the place among them, and the normal number that is kept."""
    words, attributes = _fields_of(generator, _random.Random), vars(generator)

    def read() -> bytes:
        content: bytes = words.raw
        kept = attributes["gauss_next"]
        return content if kept is None else content + repr(kept).encode()

    return read


def _memory_of_numpy(generator: np.random.RandomState) -> Callable[[], bytes | None]:
    """The same of a `RandomState`. It keeps its normal number itself, and the words are in its bit generator."""
    owner: Any = generator
    bits = owner._bit_generator
    if type(bits) is not np.random.MT19937:
        return _unknown
    own, words = _fields_of(owner, type(owner)), _memory_at(bits.ctypes.state_address, _MT19937_BYTES)
    # `numpy.random.set_bit_generator` replaces `bits`.
    return lambda: words.raw + own.raw if owner._bit_generator is bits else None


def _offset_of_torch_seed() -> int | None:
    """Where torch's generators have their seed; None where `_memory_of_torch` would not show every change."""
    seed = 0x5EED_0F_7E57_AB1E
    probe: Any = torch.Generator().manual_seed(seed)
    try:
        found: int = _memory_at(probe._cdata, _TORCH_HEADER).raw.index(seed.to_bytes(8, "little"))
    except (AttributeError, ValueError):
        return None
    states = [probe.get_state()]
    for draw in (torch.rand, torch.randn, torch.randn, torch.rand, torch.randn):
        draw(1, generator=probe)
        states.append(probe.get_state())
    states.append(torch.Generator().manual_seed(1).get_state())
    return found if _distinguishes(probe.set_state, states, _memory_of_torch(probe, found)) else None


def _python_is_readable() -> bool:
    """Whether `_memory_of_python` shows every change of a state in this version of Python."""
    probe = random.Random(0)
    version, words, _ = probe.getstate()
    read = _memory_of_python(probe)
    states = [(version, words, None), (version, words, 0.5), (version, words, 0.25), random.Random(1).getstate()]
    states.append((version, (*words[:-1], words[-1] - 1), None))
    return _distinguishes(probe.setstate, states, read) and array.array("I", words[:-1]).tobytes() in read()


def _numpy_is_readable() -> bool:
    """Whether `_memory_of_numpy` shows every change of a state in this version of NumPy."""
    probe = np.random.RandomState(0)
    kind, words, place, *_ = _legacy_state(probe)
    states = [(kind, words, place, *kept) for kept in ((0, 0.0), (1, 0.5), (1, 0.25), (1, 0.0))]
    states += [(kind, words, place - 1, 0, 0.0), _legacy_state(np.random.RandomState(1))]
    try:
        read = _memory_of_numpy(probe)
        return _distinguishes(probe.set_state, states, read) and words.tobytes() in (read() or b"")
    except AttributeError:  # another implementation of NumPy
        return False


def _legacy_state(generator: np.random.RandomState) -> Any:
    """Its state as a tuple, as `numpy.random.get_state` returns it."""
    return generator.get_state()


def _distinguishes(set_state: Callable[[Any], None], states: list[Any], read: Callable[[], bytes | None]) -> bool:
    """Whether `read` returns different bytes for different states, and the same bytes for the same state."""
    found = []
    for state in (*states, *states):
        set_state(state)
        found.append(read())
    set_state(states[0])
    return len(set(found)) == len(states) and found[: len(states)] == found[len(states) :]


def own_generators(*roots: Any) -> tuple[list[torch.Generator], list[Any]]:
    """The generators that samplers and the samplers inside them have as attributes: torch's, and others."""
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
    if left is right:
        return True
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
    if left is right:
        return []
    return [kind for kind in left if not equal(left[kind], right[kind])]


def derived(states: States) -> States:
    """States of the global generators that are derived from `states`, but are statistically independent of them."""
    seed = hashlib.sha256(pickle.dumps(_plain({kind: states[kind] for kind in GLOBAL if kind in states}))).digest()
    found: States = {"torch": torch.Generator().manual_seed(int.from_bytes(seed[:7], "little")).get_state()}
    if "python" in states:
        found["python"] = random.Random(seed).getstate()
    if "numpy" in states:
        found["numpy"] = np.random.RandomState(list(seed)).get_state()
    return found


def checksum(state: Any) -> str:
    """A checksum of a captured state."""
    return hashlib.sha256(pickle.dumps(_plain(state))).hexdigest()[:16]


def packed(states: States) -> States:
    """`states` with the words of Python's and NumPy's generators as byte tensors, a tenth of the size."""
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


def as_bytes(value: Any) -> Any:
    """Packed states with their byte tensors as bytes, which processes exchange without shared memory."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: as_bytes(one) for name, one in value.items()}
    return [as_bytes(one) for one in value] if isinstance(value, (tuple, list)) else value


def as_tensors(value: Any) -> Any:
    """The reverse of `as_bytes`. States with tensors stay as they are."""
    if isinstance(value, bytes):
        return _bytes(value)
    if isinstance(value, dict):
        return {name: as_tensors(one) for name, one in value.items()}
    return [as_tensors(one) for one in value] if isinstance(value, (tuple, list)) else value


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
        # `SystemRandom` has no state.
        return not isinstance(thing, random.SystemRandom)
    return isinstance(thing, (np.random.Generator, np.random.RandomState))


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
