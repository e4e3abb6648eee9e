# SPDX-License-Identifier: Apache-2.0
"""What a state dict may hold comes back equal in value and type, or is refused with its place when it is saved."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import random
import uuid
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from accelerate.checkpointing import load_run, save_run
from accelerate.checkpointing.codec import TensorSink, decode, encode
from accelerate.core.errors import CheckpointError


@dataclasses.dataclass
class Settings:
    rate: float
    sizes: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        raise AssertionError("a load must not run this")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str


@dataclasses.dataclass
class MappingToo(dict):
    name: str = "x"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


Pair = collections.namedtuple("Pair", "left right")


def through_json(value, inline=64):
    sink = TensorSink(inline)
    text = json.dumps(encode(value, sink, "root"), allow_nan=False)
    tensors = {name: tensor.clone() for name, tensor in sink.tensors.items()}
    return decode(json.loads(text), tensors, "a file")


def same(a, b):
    """Equal in type and value, NaN equal to NaN, to any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flags = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return flags and raw_bytes(a) == raw_bytes(b)
    if isinstance(a, np.ma.MaskedArray) and a is not np.ma.masked:
        parts = same(np.asarray(a.data), np.asarray(b.data)) and same(np.asarray(a.mask), np.asarray(b.mask))
        return parts and a.hardmask == b.hardmask and same(a.fill_value, b.fill_value)
    if isinstance(a, np.ndarray):
        return same_dtype(a.dtype, b.dtype) and a.shape == b.shape and equal_elements(a, b)
    if isinstance(a, (np.str_, np.bytes_)):
        return list(a) == list(b)  # numpy's own comparison leaves out zeros at the end
    if isinstance(a, np.generic):
        return same_dtype(a.dtype, b.dtype) and (a == b or a.tobytes() == b.tobytes())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return a == b


def same_dtype(a, b):
    return a == b and a.type is b.type and a.isalignedstruct == b.isalignedstruct and a.fields == b.fields


def equal_elements(a, b):
    if a.dtype.names:
        return all(equal_elements(np.asarray(a[name]), np.asarray(b[name])) for name in a.dtype.names)
    if a.dtype.kind in "fcmM":
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.array_equal(a, b))


def raw_bytes(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


POINT = np.dtype([("x", "<f4"), ("n", ">i8"), ("tag", "S3"), ("when", "M8[25s]"), ("grid", "<f8", (2, 3))])
NESTED = np.dtype([("inner", POINT), ("flag", "?")])
ALIGNED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2")], align=True)
TITLED = np.dtype([(("the long name", "short"), "i4"), ("other", "u2")])
SPARSE = np.dtype({"names": ["b", "a"], "formats": ["<i4", "<f2"], "offsets": [8, 0], "itemsize": 24})


def filled(dtype, shape):
    chance = np.random.default_rng(3)
    array = np.zeros(shape, dtype)
    for name in dtype.names:
        field = dtype.fields[name][0]
        if field.names:
            array[name] = filled(field, shape)
        else:
            array[name] = chance.integers(0, 5, array[name].shape).astype(field.base)
    return array


ARRAYS = {
    **{
        f"{name}-{shape}": filled(dtype, shape)
        for name, dtype in {
            "fields": POINT, "nested": NESTED, "aligned": ALIGNED, "titled": TITLED, "offsets": SPARSE,
        }.items()
        for shape in ((), (0,), (2, 3), (40,))
    },
    "record": filled(POINT, (7,)).view(np.recarray),
    "record dtype": filled(POINT, (2,)).view(np.dtype((np.record, POINT))),
    "matrix": np.matrix([[1.0, 2.0]]),
    "masked": np.ma.MaskedArray(np.arange(30.0), mask=np.arange(30) % 3 == 0, fill_value=-9, hard_mask=True),
    "not masked": np.ma.MaskedArray([1, 2]),
    "masked fields": np.ma.MaskedArray(filled(ALIGNED, (3,)), mask=[(0, 1, 0), (1, 0, 0), (0, 0, 0)]),
    "units": np.array(["2024-01-02", "NaT"], "M8[D]"),
    "durations": np.arange(30).astype(">m8[7us]"),
    "text": np.array(["", "a\0b", "\U0001f600"]),
    "bytes": np.array([b"a\0b", b""]),
    "big endian": np.arange(50, dtype=">f8").reshape(5, 10),
    "fortran": np.asfortranarray(np.random.default_rng(0).random((20, 3))),
    "strided": np.arange(100)[::7],
    "read only": np.broadcast_to(np.float32(2.5), (40,)),
    "0-d": np.array(3, "u2"),
    "half": np.linspace(0, 1, 50).astype(np.float16),
    "long double": np.array([np.longdouble(1) / 3] * 9),
    "long complex": np.array([1 + 2j] * 9, np.clongdouble),
    "complex": np.array([1 + 2j, complex("nan")] * 9),
    "long long": np.arange(40, dtype=np.longlong),
    "empty": np.zeros((3, 0, 2), ">c8"),
    "bool": np.arange(90) % 2 == 0,
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_arrays_keep_their_dtype_with_all_its_fields(name, inline):
    array = ARRAYS[name]
    found = through_json({"array": array}, inline)["array"]
    assert same(found, array)
    assert found.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    assert found.flags.writeable or not found.size


def test_a_registered_structured_array_comes_back_from_a_checkpoint(tmp_path, process, small_run):
    table = filled(NESTED, (100,))
    run = small_run(custom={"table": table, "row": table[3]})
    save_run(run.bundle(), tmp_path / "saved", process=process)
    other = small_run(custom=None)
    load_run(other.bundle(), tmp_path / "saved", process=process)
    found = other.registered.state
    assert found["table"].dtype == NESTED and same(found["table"], table)
    assert type(found["row"]) is np.void and found["row"]["inner"]["n"] == table[3]["inner"]["n"]


class _Text(str):
    pass


VALUES = {
    "numpy scalars": [
        np.float16(0.1), np.longdouble(1) / 3, np.clongdouble(1j), np.bool_(False), np.longlong(7), np.uint64(2**63),
        np.datetime64("NaT", "ns"), np.datetime64("2024-01", "M"), np.timedelta64(5, "W"), np.str_(""), np.str_("a\0"),
        np.bytes_(b"a\0"), np.void(b"ab\0"), np.float64("nan"), np.ma.masked, filled(POINT, (1,)).view(np.recarray)[0],
    ],
    "dtypes": [POINT, ALIGNED, TITLED, SPARSE, np.dtype("M8[25s]"), np.dtype(">f8"), np.dtype(("<f4", (2,)))],
    "numbers": [
        decimal.Decimal("1.10"), decimal.Decimal("NaN"), decimal.Decimal("-Infinity"), fractions.Fraction(1, 3),
        fractions.Fraction(10**5000, 3), 10**5000, -(2**4001), complex("nan+infj"), complex(-0.0, -0.0), float("nan"),
    ],
    "times": [
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC), datetime.time(1, 2, fold=1),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.timezone(datetime.timedelta(hours=-3), "here"), datetime.timedelta(-1, 2, 3),
        zoneinfo.ZoneInfo("UTC"),
    ],
    "kinds": [
        Access.READ | Access.WRITE, Level.LOW, Pair(1, (2,)), Frozen("a"), uuid.UUID(int=7), slice(1, None, (2,)), ...,
        pathlib.PureWindowsPath("c:/a"), pathlib.PurePosixPath("a"), pathlib.Path("/b"), range(0, 2**70, 3),
        torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1"), "\ud800", b"", bytearray(b"\0"),
    ],
    "containers": [
        {True: 1, None: 2, 1.5: 3},
        {(1, "a"): 4, b"k": 5, float("inf"): 6, Level.LOW: 7, frozenset({1}): 8, np.int64(3): 9},
        {"$": 1, "a": {"$": {"$": ()}}}, collections.OrderedDict([("b", 1), (2, [])]), collections.Counter("aab"),
        collections.defaultdict(collections.OrderedDict, a=collections.OrderedDict()),
        collections.defaultdict(None, {1: 2}), collections.deque([[1], {2}], maxlen=2), {1, (2, 3), "x"}, frozenset(),
        [[], (), {}, set(), [()]],
    ],
    "generators": [
        random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state(),
        *(np.random.Generator(kind(5)).bit_generator.state
          for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("group", VALUES)
def test_values_of_every_kind(group):
    for value in VALUES[group]:
        found = through_json({"v": value})["v"]
        if isinstance(value, decimal.Decimal):
            assert type(found) is decimal.Decimal and str(found) == str(value)
        else:
            assert same(found, value), f"{value!r} came back as {found!r}"
            if isinstance(value, collections.defaultdict):
                assert found.default_factory is value.default_factory
            if isinstance(value, (datetime.datetime, datetime.time)):
                assert found.fold == value.fold and found.tzinfo == value.tzinfo


def test_a_dataclass_is_filled_without_its_constructor():
    value = object.__new__(Settings)
    value.rate, value.sizes = 0.5, [1, 2]
    found = through_json(value)
    assert type(found) is Settings and found.rate == 0.5 and found.sizes == [1, 2]


DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


@pytest.mark.parametrize("dtype", list(dict.fromkeys(DTYPES)), ids=str)
@pytest.mark.parametrize("count", [0, 4, 400])
def test_tensors_of_every_dtype_come_back_or_are_refused(dtype, count):
    try:
        if dtype in (torch.bool, torch.complex32, torch.complex64, torch.complex128):
            value = torch.arange(count).to(dtype)
        else:
            value = (torch.arange(count * 16, dtype=torch.int64) % 120).to(torch.uint8)[: count * dtype.itemsize]
            value = value.view(dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        pytest.skip("torch makes no such tensor")
    try:
        found = through_json({"t": value})["t"]
    except CheckpointError as error:
        assert "root.t: a tensor of dtype" in str(error)
        assert dtype not in (torch.uint16, torch.float8_e5m2, torch.bfloat16, torch.complex32, torch.bool)
        return
    assert same(found, value)


def test_tensors_keep_views_ties_and_gradients():
    base = torch.arange(400.0).reshape(20, 20)
    wave = torch.randn(60, dtype=torch.complex64)
    small = torch.tensor([1.0, 2.0])
    weight = torch.nn.Parameter(torch.randn(30))
    tiny = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    state = {
        "transposed": base.t(), "strided": base[::3, 1:9:2], "expanded": torch.ones(1).expand(50),
        "conjugate": wave.conj(), "wave": wave, "negative": wave.conj().imag, "positive": wave.imag,
        "small": small, "small again": small, "weight": weight, "weight again": weight, "values": weight.detach(),
        "tiny": tiny, "tiny again": tiny, "leaf": torch.ones(40, requires_grad=True),
        "buffer": torch.nn.Buffer(torch.ones(3), persistent=False),
    }  # fmt: skip
    found = through_json(state)
    for name, value in state.items():
        assert same(found[name], value), name
    assert found["small"] is found["small again"] and found["tiny"] is found["tiny again"]
    assert found["weight"] is found["weight again"]
    assert found["values"].data_ptr() == found["weight"].data_ptr() and not found["values"].requires_grad
    assert isinstance(found["buffer"], torch.nn.Buffer) and found["buffer"].persistent is False


def test_the_versions_in_a_modules_state_stay():
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict()
    found = through_json(state)
    assert found._metadata == state._metadata and found._metadata["0"]["version"] == 2


def nested_list(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


class _Array(np.ndarray):
    pass


class _Tensor(torch.Tensor):
    pass


def test_what_has_no_plain_form_is_refused_with_its_place():
    @dataclasses.dataclass
    class Local:
        a: int = 1

    class Colour(enum.Enum):
        RED = 1

    extra = Frozen("a")
    attributes = object.__new__(Settings)
    attributes.rate, attributes.sizes, attributes.cache = 1.0, [], {}
    refused = {
        "text": _Text("a"),
        "local": Local(),
        "colour": Colour.RED,
        "mapping": MappingToo(),
        "attributes": attributes,
        "objects": np.array([extra]),
        "fields": np.zeros(2, [("o", object)]),
        "own_array": np.ones(2).view(_Array),
        "texts": np.array(["a"], np.dtypes.StringDType()),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "own": torch.ones(2).as_subclass(_Tensor),
        "deep": nested_list(3000),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "generator": torch.Generator(),
        "random": random.Random(),
        "numpy_random": np.random.default_rng(),
        "type": int,
        "module": torch.nn.Linear(1, 1),
        "lambda": collections.defaultdict(lambda: 0),
        "view": memoryview(b"a"),
        "iterator": iter([1]),
        "dtype": np.dtype(object),
        "zone": datetime.datetime(2024, 1, 1, tzinfo=_Zone()),
    }
    for name, value in refused.items():
        with pytest.raises(CheckpointError, match=rf"^root\.{name}|below root\.{name}"):
            encode({name: value}, TensorSink(), "root")


class _Zone(datetime.tzinfo):
    def utcoffset(self, moment):
        return datetime.timedelta(0)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Access, *Level]),
    st.builds(Frozen, st.text()),
    st.builds(slice, st.integers()),
    st.builds(range, st.integers(0, 9)),
)
dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.nested_dtypes(max_itemsize=200),
    hnp.array_dtypes(max_size=4, allow_subarrays=True),
)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
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


@pytest.mark.thorough
@settings(max_examples=3000, deadline=None)
@given(states, st.sampled_from([0, 64, 1 << 14]))
def test_any_state_comes_back_at_length(state, inline):
    assert same(through_json(state, inline), state)


def test_shapes_are_compared_with_the_bytes_before_memory_is_taken():
    for document in (
        {"$": "tensor", "dtype": "float32", "shape": [2_000_000_000], "b64": ""},
        {"$": "tensor", "dtype": "float32", "shape": [-1, 4], "b64": ""},
        {"$": "ndarray", "dtype": "<f8", "shape": [2_000_000_000, 10], "b64": "AAAA"},
        {"$": "ndarray", "dtype": "<U0", "shape": [2**61, 4], "b64": ""},
        {"$": "npscalar", "dtype": "V2000000000", "b64": ""},
        {"$": "ndarray", "dtype": "O", "shape": [1], "b64": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": {"names": ["a"], "formats": ["O"], "offsets": [0], "titles": [None],
                                   "itemsize": 8, "aligned": False, "record": False}, "shape": [1], "b64": ""},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="a file: an entry of type"):
            decode(document, {}, "a file")
