# SPDX-License-Identifier: Apache-2.0
"""What a state dict may hold comes back equal in value and type, or is refused with its place when it is saved."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import random
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from accelerate.checkpointing.documents import TensorSink, decode, encode
from accelerate.core.errors import CheckpointError


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    PAIR = (1, 2)


Pair = collections.namedtuple("Pair", "left right")


def through_json(value, inline=64, unshare=False):
    sink = TensorSink(inline)
    text = json.dumps(encode(value, sink, "root"), allow_nan=False)
    tensors = {name: tensor.clone() for name, tensor in sink.tensors.items()}
    return decode(json.loads(text), tensors, "a file", unshare)


def same(a, b):
    """Equal in type and value, NaN equal to NaN, to any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flags = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return flags and raw_bytes(a) == raw_bytes(b)
    if isinstance(a, np.ndarray):
        nan = {"equal_nan": True} if a.dtype.kind in "fcmM" else {}
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b, **nan))
    if isinstance(a, (np.str_, np.bytes_)):
        return list(a) == list(b)  # numpy's own comparison leaves out zeros at the end
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and (a == b or a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        keys = list(map(repr, a)) == list(map(repr, b))
        return keys and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return a == b


def raw_bytes(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


VALUES = {
    "numbers": [
        True, 0, -(2**70), 10**5000, -(2**4001), 1.5, -0.0, math.inf, -math.inf, math.nan,
        1 + 2j, complex("nan+infj"), complex(-0.0, -0.0),
    ],
    "text": ["", "text", "\ud800", b"", b"\x00\xff", bytearray(b"\0")],
    "numpy scalars": [
        np.float16(0.1), np.longdouble(1) / 3, np.bool_(False), np.uint64(2**63), np.float64("nan"), np.int64(7),
        np.datetime64("NaT", "ns"), np.datetime64("2024-01", "M"), np.timedelta64(5, "W"), np.str_(""),
        np.str_("a\0"), np.bytes_(b"a\0"),
    ],
    "times": [
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC), datetime.datetime(2024, 1, 2, 3, 4, 5),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))), datetime.time(1, 2),
        datetime.date(2024, 1, 2), datetime.timedelta(-1, 2, 3),
    ],
    "kinds": [
        Access.READ | Access.WRITE, Level.LOW, Colour.PAIR, Pair(1, (2,)), pathlib.Path("/b"), torch.Size([1, 2]),
        torch.bfloat16, torch.device("cuda:1"), None,
    ],
    "containers": [
        {True: 1, None: 2, 1.5: 3},
        {(1, "a"): 4, b"k": 5, math.inf: 6, Level.LOW: 7, frozenset({1}): 8, np.int64(3): 9},
        {"$": 1, "a": {"$": {"$": ()}}}, collections.OrderedDict([("b", 1), (2, [])]), collections.Counter("aab"),
        collections.defaultdict(collections.OrderedDict, a=collections.OrderedDict()),
        collections.defaultdict(None, {1: 2}), collections.deque([[1], {2}], maxlen=2), {1, (2, 3), "x"}, frozenset(),
        [[], (), {}, set(), [()]],
    ],
    "generators": [
        random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state(),
        *(np.random.Generator(kind(5)).bit_generator.state
          for kind in (np.random.PCG64, np.random.Philox, np.random.MT19937)),
    ],
    "arrays": [
        np.arange(3), np.array(3, "u2"), np.zeros((3, 0, 2), ">c8"), np.arange(90) % 2 == 0,
        np.asfortranarray(np.random.default_rng(0).random((20, 3))), np.arange(100)[::7],
        np.broadcast_to(np.float32(2.5), (40,)), np.linspace(0, 1, 50).astype(np.float16),
        np.array([np.longdouble(1) / 3] * 9), np.array([1 + 2j, complex("nan")] * 9),
        np.arange(50, dtype=">f8").reshape(5, 10), np.array(["2024-01-02", "NaT"], "M8[D]"),
        np.arange(30).astype(">m8[7us]"), np.array(["", "a\0b", "\U0001f600"]), np.array([b"a\0b", b""]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("group", VALUES)
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_values_come_back_in_their_type(group, inline):
    for value in VALUES[group]:
        found = through_json({"v": value}, inline)["v"]
        assert same(found, value), f"{value!r} came back as {found!r}"
        if isinstance(value, collections.defaultdict):
            assert found.default_factory is value.default_factory
        if isinstance(value, collections.deque):
            assert found.maxlen == value.maxlen
        if isinstance(value, np.ndarray):
            assert found.flags.writeable or not found.size


DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 4, 400])
def test_tensors_of_every_dtype_come_back_or_are_refused(dtype, count):
    try:
        if dtype in (torch.bool, torch.complex64, torch.complex128):
            value = torch.arange(count).to(dtype)
        else:
            value = (torch.arange(count * 16, dtype=torch.int64) % 120).to(torch.uint8)[
                : count * dtype.itemsize
            ]
            value = value.view(dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        pytest.skip("torch makes no such tensor")
    try:
        found = through_json({"t": value})["t"]
    except CheckpointError as error:
        assert f"root.t: a tensor of dtype {dtype}" in str(error)
        assert dtype not in (
            torch.uint16,
            torch.float8_e5m2,
            torch.bfloat16,
            torch.complex128,
            torch.bool,
        )
        return
    assert same(found, value)


def test_tensors_keep_views_ties_and_gradients():
    base = torch.arange(400.0).reshape(20, 20)
    wave = torch.randn(60, dtype=torch.complex64)
    weight = torch.nn.Parameter(torch.randn(30), requires_grad=False)
    state = {
        "transposed": base.t(), "strided": base[::3, 1:9:2], "expanded": torch.ones(1).expand(50),
        "conjugate": wave.conj(), "wave": wave, "negative": wave.conj().imag, "positive": wave.imag,
        "weight": weight, "values": weight.detach(), "again": weight.detach(),
        "leaf": torch.ones(40, requires_grad=True), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0),
    }  # fmt: skip
    found = through_json(state)
    for name, value in state.items():
        assert same(found[name], value), name
    assert (
        found["values"] is found["again"]
        and found["values"].data_ptr() == found["weight"].data_ptr()
    )
    apart = through_json(state, unshare=True)
    assert apart["values"].data_ptr() != apart["again"].data_ptr() and torch.equal(
        apart["values"], apart["again"]
    )


def test_the_versions_in_a_modules_state_stay():
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict()
    found = through_json(state)
    assert vars(found) == vars(state) != {}


@dataclasses.dataclass
class Settings:
    rate: float


class _Text(str):
    pass


class _Array(np.ndarray):
    pass


class _Tensor(torch.Tensor):
    pass


def nested_list(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_has_no_plain_form_is_refused_with_its_place():
    class Local(enum.Enum):
        RED = 1

    refused = {
        "text": _Text("a"), "local": Local.RED, "dataclass": Settings(1.0), "decimal": decimal.Decimal("1.1"),
        "slice": slice(1), "objects": np.array([Settings(1.0)]), "fields": np.zeros(2, [("x", "f4")]),
        "masked": np.ma.MaskedArray([1, 2]), "own_array": np.ones(2).view(_Array),
        "sparse": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta"),
        "own": torch.ones(2).as_subclass(_Tensor), "generator": torch.Generator(), "random": random.Random(),
        "numpy_random": np.random.default_rng(), "type": int, "module": torch.nn.Linear(1, 1),
        "factory": collections.defaultdict(lambda: 0), "view": memoryview(b"a"), "function": lambda: 0,
        "zone": datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(CheckpointError, match=rf"^root\.{name}\[0\]: .*cannot be saved"):
            encode({name: [value]}, TensorSink(), "root")
    loop: list = []
    loop.append(loop)
    for value in (loop, nested_list(3000)):
        with pytest.raises(CheckpointError, match=r"root: .*contains itself"):
            encode(value, TensorSink(), "root")


def test_decoding_imports_nothing_and_calls_nothing(tmp_path, monkeypatch):
    marker = tmp_path / "imported"
    (tmp_path / "trap_module.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("trap_module:Thing", "os:system", "subprocess:Popen", "builtins:eval"):
        for tag in ("enum", "namedtuple"):
            with pytest.raises(CheckpointError, match="import the module"):
                decode({"$": tag, "type": name, "v": ["true"]}, {}, "a file")
    assert not marker.exists()
    for document, words in (
        ({"$": "reduce", "v": 1}, "'reduce'"),
        ({"$": "dtype", "v": "nn"}, "dtype"),
    ):
        with pytest.raises(CheckpointError, match=words):
            decode(document, {}, "a file")


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)), st.dates(), st.timedeltas(),
    st.sampled_from([*Access, *Level]),
)  # fmt: skip
dtypes = st.one_of(
    hnp.scalar_dtypes(), hnp.unicode_string_dtypes(min_len=1), hnp.byte_string_dtypes(min_len=1)
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
keys = st.one_of(
    st.text(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(),
    st.tuples(st.integers(), st.text()),
)
states = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict),
        st.lists(inner, max_size=4).map(collections.deque),
        st.frozensets(st.integers() | st.text(), max_size=4),
    ),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(states, st.sampled_from([0, 64, 1 << 14]))
def test_any_state_comes_back(state, inline):
    assert same(through_json(state, inline), state)


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
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
    saved = through_json(scheduler.state_dict()), through_json(optimizer.state_dict(), unshare=True)
    other_optimizer, other = build()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    assert advance(other_optimizer, other, 4) == advance(optimizer, scheduler, 4)
