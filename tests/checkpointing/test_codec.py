# SPDX-License-Identifier: Apache-2.0
"""Plain state through JSON and back, type by type."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate.checkpointing.codec import TensorSink, decode, encode
from accelerate.core.errors import CheckpointError


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


Point = collections.namedtuple("Point", "x y")


def round_trip(value, unshare=False):
    sink = TensorSink()
    text = json.dumps(encode(value, sink, "root"), allow_nan=False)
    return decode(json.loads(text), sink.tensors, "a file", unshare)


VALUES = [
    None, True, 0, -(2**70), 1.5, -0.0, float("inf"), float("-inf"), "text", "", b"\x00\xff", bytearray(b"ab"), 1 + 2j,
    (1, (2, [3])), [], {}, {"a": {"b": ()}}, {1: "one", (2, 3): "pair", None: 0}, {"$": "not a tag", "v": 1},
    {1, 2}, frozenset({"x"}), deque([1, 2], maxlen=3), OrderedDict(b=1, a=2), Counter("aab"), range(1, 9, 2),
    Colour.RED, Colour.PAIR, Point(1, [2]), torch.Size([2, 3]), torch.float16, torch.device("cpu"),
    pathlib.Path("a/b"), datetime.datetime(2024, 1, 2, 3, 4, 5), datetime.date(2024, 1, 2),
    datetime.timedelta(1, 2, 3),
    np.float32(0.1), np.int64(7), np.bool_(True), np.dtype("float16"), np.str_("s"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{value!r}"[:40])
def test_values_come_back_in_their_type(value):
    found = round_trip(value)
    assert type(found) is type(value) and found == value
    if isinstance(value, float):
        assert math.copysign(1, found) == math.copysign(1, value)


def test_nan_and_default_dicts_and_maxlen():
    assert math.isnan(round_trip(float("nan")))
    found = round_trip(defaultdict(list, {"a": [1]}))
    assert found == {"a": [1]} and found.default_factory is list
    assert round_trip(deque([1], maxlen=5)).maxlen == 5


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (40, 3)], ids=str)
def test_tensors_of_each_dtype_and_shape(dtype, shape):
    value = (torch.rand(shape) * 4).to(dtype)
    found = round_trip({"t": value})["t"]
    assert found.dtype == dtype and found.shape == value.shape
    raw = [
        (torch.view_as_real(t) if t.is_complex() else t).contiguous().reshape(-1).view(torch.uint8)
        for t in (found, value)
    ]
    assert torch.equal(*raw)


@pytest.mark.parametrize(
    "array",
    [np.arange(3), np.random.rand(30, 4),
     np.asfortranarray(np.random.rand(9, 9)), np.array(2.5), np.array(["a", "bc"]),
     np.zeros((0, 2)), np.arange(40, dtype=">i4"), np.array([1, 2], dtype="datetime64[s]")],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)  # fmt: skip
def test_numpy_arrays(array):
    found = round_trip(array)
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
    assert found.flags.writeable


def test_one_memory_is_stored_once_and_shared_again_unless_asked():
    tensor = torch.arange(100)
    sink = TensorSink()
    text = encode({"a": tensor, "b": tensor, "c": tensor[:50]}, sink, "root")
    assert len(sink.tensors) == 2
    shared = decode(text, sink.tensors, "a file")
    assert shared["a"] is shared["b"]
    apart = decode(text, sink.tensors, "a file", unshare=True)
    assert apart["a"].data_ptr() != apart["b"].data_ptr() and torch.equal(apart["a"], apart["b"])


def test_a_parameter_stays_one():
    found = round_trip(torch.nn.Parameter(torch.ones(30), requires_grad=False))
    assert isinstance(found, torch.nn.Parameter) and not found.requires_grad


def test_unknown_types_are_named_with_their_place():
    with pytest.raises(CheckpointError, match=r"session\.custom\[0\]\.history\[1\]: a .*function.* cannot be saved"):
        encode({"custom": [{"history": [1, lambda: 0]}]}, TensorSink(), "session")
    with pytest.raises(CheckpointError, match="contains itself"):
        loop: list = []
        loop.append(loop)
        encode(loop, TensorSink(), "root")
    with pytest.raises(CheckpointError, match=r"root\.w: .*sparse"):
        encode({"w": torch.eye(3).to_sparse()}, TensorSink(), "root")
    with pytest.raises(CheckpointError, match="Python objects"):
        encode(np.array([object()]), TensorSink(), "root")


def test_decoding_imports_nothing_and_calls_nothing(tmp_path, monkeypatch):
    marker = tmp_path / "imported"
    (tmp_path / "trap_module.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("trap_module:Thing", "os:system", "subprocess:Popen", "builtins:eval"):
        for tag in ("enum", "namedtuple"):
            with pytest.raises(CheckpointError, match="Import the module"):
                decode({"$": tag, "type": name, "v": ["true"]}, {}, "a file")
    assert not marker.exists()
    with pytest.raises(CheckpointError, match="'reduce'"):
        decode({"$": "reduce", "v": 1}, {}, "a file")
    with pytest.raises(CheckpointError, match="dtype"):
        decode({"$": "dtype", "v": "nn"}, {}, "a file")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(plain)
def test_any_plain_nesting(value):
    assert round_trip(value) == value


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_schedulers(name):
    def build():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*((1.0,) if name == "plateau" else ()))
        return optimizer.param_groups[0]["lr"]

    optimizer, scheduler = build()
    advance(optimizer, scheduler, 3)
    saved = round_trip(scheduler.state_dict()), round_trip(optimizer.state_dict(), unshare=True)
    other_optimizer, other = build()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    assert advance(other_optimizer, other, 4) == advance(optimizer, scheduler, 4)
