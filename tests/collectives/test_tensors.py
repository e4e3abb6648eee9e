# SPDX-License-Identifier: Apache-2.0
"""Collectives among 2 and 4 ranks, with and without debug mode, against plain PyTorch on what every rank holds."""

from __future__ import annotations

import collections
import dataclasses
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks

from accelerate.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    transport,
)
from accelerate.collectives.metrics import gather_counted, gather_objects_counted
from accelerate.collectives.rng import set_seed, synchronize_rng_state, synchronize_rng_states
from accelerate.core.errors import ConfigurationError
from accelerate.runtime.channel import Channel
from accelerate.state import PartialState

everywhere = on_ranks(2, 4)
DEBUG = {"ACCELERATE_DEBUG_MODE": "1"}


def my_rank():
    return PartialState(cpu=True).process_index


def world():
    return PartialState(cpu=True).num_processes


def all_ranks():
    return range(world())


class Messages:
    """Counts the messages of this rank: calls of the functions through which all of them go."""

    total = 0
    counts = False

    def __enter__(self):
        if not Messages.counts:
            Messages.counts = True
            for name, place in (
                ("all_gather_single", 1),
                ("exchange", 1),
                ("broadcast", 0),
                ("all_reduce", 0),
            ):
                Messages.count(transport, name, place)
            Messages.count(Channel, "swap")
        self.begin = Messages.total
        return self

    def __exit__(self, *_):
        self.sent = Messages.total - self.begin

    @classmethod
    def count(cls, owner, name, place=None):
        """`place`: of the argument whose elements are sent; a message without any is none."""
        send = getattr(owner, name)

        def counting(*args, **kwargs):
            cls.total += place is None or bool(args[place].numel())
            return send(*args, **kwargs)

        setattr(owner, name, counting)


def refuses(kind, words, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"{function} raised no {kind.__name__}")


def same(found, expected):
    """Equal in structure, dtype, shape and every bit."""
    assert type(found) is type(expected), (type(found), type(expected))
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, (found, expected)
        bits = [t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*bits), (found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    states: tuple


class Mapped(collections.OrderedDict):
    """As transformers' ModelOutput: a mapping with attributes."""

    def __getattr__(self, name):
        return self[name]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def held_by(rank):
    """What a rank gathers: every dtype, shapes down to nothing, strides and pending conjugations."""
    make = torch.Generator().manual_seed(rank)
    data = Mapped()
    for place, dtype in enumerate(DTYPES):
        data[str(dtype)] = (torch.rand(3, place % 3 + 1, generator=make) * 9).to(dtype)
    base = torch.rand(6, 5, generator=make)
    counted = collections.defaultdict(list, {"rows": [torch.rand(2, 3, 2, generator=make)]})
    return {
        "dtypes": data,
        "scalar": torch.tensor(rank + 0.5),
        "empty": torch.zeros(0, 3, dtype=torch.int64),
        "thin": torch.zeros(4, 0),
        "strided": Point(base.t()[1:4], base[::2]),
        "one": base[::5][:1, 2:3],
        "conjugate": torch.complex(base, base + 1).conj(),
        "negated": torch.complex(base, base + 1).conj().imag,
        "parameter": Output(torch.nn.Parameter(base.clone()), (base[0].expand(2, 5), [])),
        "counted": counted,
    }


def joined(values):
    """What gathering `values` (one a rank) must give, in plain PyTorch."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        rows = [v.detach().resolve_conj().resolve_neg() for v in values]
        rows = [row.reshape(1) if row.dim() == 0 else row for row in rows]
        width = rows[0].dtype.itemsize
        flat = torch.cat([row.contiguous().view(-1).view(torch.uint8) for row in rows])
        shape = (sum(row.shape[0] for row in rows), *rows[0].shape[1:])
        assert flat.numel() == width * torch.Size(shape).numel()
        return flat.view(first.dtype).view(shape)
    if isinstance(first, collections.defaultdict):
        return collections.defaultdict(
            first.default_factory, {k: joined([v[k] for v in values]) for k in first}
        )
    if isinstance(first, dict):
        return type(first)((key, joined([value[key] for value in values])) for key in first)
    if isinstance(first, Point):
        return Point(*(joined(list(parts)) for parts in zip(*values, strict=True)))
    if dataclasses.is_dataclass(first):
        return Output(joined([v.logits for v in values]), joined([v.states for v in values]))
    return type(first)(joined(list(parts)) for parts in zip(*values, strict=True))


@everywhere
def test_gather():
    with Messages() as messages:
        found = gather(held_by(my_rank()))
    assert messages.sent == 1, messages.sent
    same(found, joined([held_by(rank) for rank in all_ranks()]))
    assert found["strided"].x.is_contiguous()
    for leaf in (
        torch.tensor(my_rank()),
        torch.full((2, 3), my_rank()).t(),
        torch.zeros(0, 2),
        torch.tensor([True, False]),
    ):
        with Messages() as messages:
            found = gather(leaf)
        assert messages.sent == 1  # the header, also of a tensor without elements
        expected = [
            torch.tensor(r)
            if leaf.dim() == 0
            else leaf - leaf + r
            if leaf.dtype == torch.int64
            else leaf
            for r in all_ranks()
        ]
        same(found, joined(expected))
    assert gather([]) == [] and gather({}) == {}
    assert not gather(torch.ones(2, requires_grad=True) * 2).requires_grad
    refuses(TypeError, "gather takes tensors", gather, "text")
    refuses(TypeError, "builtins.int", gather, {"a": torch.ones(1), "b": 3})
    refuses(TypeError, "sparse", gather, torch.ones(2).to_sparse())


@everywhere
def test_reduce():
    def values(rank):
        return {
            "a": torch.tensor([1.5, 2.0]) * (rank + 1),
            "b": [
                torch.tensor(2.0 + rank, dtype=torch.float64),
                torch.full((2, 2), rank + 1.0).t(),
            ],
            "c": torch.tensor([1.0 + rank], dtype=torch.bfloat16),
        }

    def expected(function):
        parts = [values(rank) for rank in all_ranks()]
        return {
            "a": function(torch.stack([p["a"] for p in parts])),
            "b": [function(torch.stack([p["b"][i] for p in parts])) for i in range(2)],
            "c": function(torch.stack([p["c"] for p in parts])),
        }

    mine = values(my_rank())
    with Messages() as messages:
        found = reduce(mine)
    assert messages.sent == 3  # one a dtype
    same(found, expected(lambda parts: parts.sum(0) / world()))
    same(mine, values(my_rank()))
    same(reduce(mine, "sum"), expected(lambda parts: parts.sum(0)))
    assert reduce(mine, "none") is mine
    same(reduce(mine, "sum", scale=0.25), expected(lambda parts: parts.sum(0) * 0.25))
    same(reduce(mine, "max"), expected(lambda parts: parts.amax(0)))
    same(reduce(mine, "min"), expected(lambda parts: parts.amin(0)))
    same(reduce(torch.tensor([my_rank(), 1]), "sum"), torch.tensor([sum(all_ranks()), world()]))
    weight = torch.tensor([2.0], requires_grad=True)
    reduce(weight * 3).backward()
    same(weight.grad, torch.tensor([3.0 / world()]))
    refuses(RuntimeError, "Float", reduce, torch.tensor([1, 2]))
    refuses(ConfigurationError, "mean, sum, max, min", reduce, torch.ones(1), "median")
    refuses(TypeError, "reduce takes tensors", reduce, [torch.ones(1), None])


@everywhere
def test_broadcast():
    for source in (0, world() - 1):
        mine = held_by(my_rank())
        # What others' memory shares with itself cannot be written.
        mine["parameter"].states = (mine["parameter"].states[0].clone(), [])
        kept = [mine["strided"].x, mine["parameter"].logits]
        with Messages() as messages:
            found = broadcast(mine, from_process=source)
        assert messages.sent == 1 and found is mine
        assert kept[0] is mine["strided"].x and kept[1] is mine["parameter"].logits
        expected = held_by(source)
        for key in ("dtypes", "scalar", "strided", "conjugate", "counted"):
            same(joined([mine[key]]), joined([expected[key]]))
        assert torch.equal(mine["parameter"].logits, expected["parameter"].logits)
    alone = torch.full((3,), float(my_rank()), requires_grad=True)
    assert broadcast(alone, world() - 1) is alone and alone.tolist() == [world() - 1.0] * 3
    refuses(ConfigurationError, f"ranks are 0 to {world() - 1}", broadcast, alone, world())
    for owner in (0, world() - 1):
        tensor = torch.arange(6, dtype=torch.int16).view(2, 3) if owner == my_rank() else None
        same(copy_tensor_to_devices(tensor), torch.arange(6, dtype=torch.int16).view(2, 3))
    refuses(ValueError, "exactly one rank", copy_tensor_to_devices, None)
    refuses(ValueError, "exactly one rank", copy_tensor_to_devices, torch.ones(1))


@everywhere
def test_objects():
    for size in (0, 10, 60_000, 3_000_000):
        with Messages() as messages:
            found = gather_object([("rank", my_rank(), "x" * (size if my_rank() else 0))])
        assert found == [("rank", rank, "x" * (size if rank else 0)) for rank in all_ranks()]
        assert messages.sent == (1 if size < 64_000 else 2)
    assert gather_object(list(range(my_rank()))) == [n for rank in all_ranks() for n in range(rank)]
    assert gather_object([torch.tensor(my_rank())]) == [torch.tensor(rank) for rank in all_ranks()]
    assert gather_object({"a": 1}) == ["a"] * world()
    refuses(TypeError, "rank 0 passed a", gather_object, 5 if my_rank() == 0 else [])
    refuses(
        TypeError,
        f"rank {world() - 1}: a list cannot be pickled",
        gather_object,
        [lambda: 0] if my_rank() == world() - 1 else [1],
    )
    for source in (0, world() - 1):
        for value in ([source, {"k": None}], [], ["y" * 100_000, source]):
            mine = list(value) if source == my_rank() else [None] * len(value)
            assert broadcast_object_list(mine, from_process=source) is mine and mine == value
    refuses(ConfigurationError, "ranks are", broadcast_object_list, [1], world())
    refuses(TypeError, "cannot be pickled", broadcast_object_list, [lambda: 0])


@everywhere
def test_uneven_rows():
    """Counts from none to all on one rank: exactly the real rows, in rank order, in one message."""
    for counts in (
        [3] * world(),
        list(all_ranks()),
        [0] * (world() - 1) + [5],
        [1] + [0] * (world() - 1),
        [0] * world(),
    ):

        def rows(rank, count):
            first = 100 * rank
            ids = torch.arange(first, first + count)
            return {
                "ids": ids,
                "x": (ids[:, None] + torch.rand(1, 2)[:, :0].new_ones(1, 2)).to(torch.bfloat16),
                "ok": ids % 2 == 0,
            }

        # Behind the real rows stand placeholders, in another number on every rank.
        mine = {
            **rows(my_rank(), counts[my_rank()] + my_rank()),
            "loss": torch.tensor(float(my_rank())),
        }
        mine["ids"][counts[my_rank()] :] = -1
        with Messages() as messages:
            found = gather_counted(mine, counts)
        assert messages.sent == 1
        expected = joined([rows(rank, counts[rank]) for rank in all_ranks()])
        expected["loss"] = torch.tensor([float(rank) for rank in all_ranks() if counts[rank]])
        same(found, expected)
        assert gather_objects_counted(mine["ids"].tolist(), counts) == expected["ids"].tolist()
    refuses(
        ConfigurationError,
        "passed a tensor of shape [1]",
        gather_counted,
        torch.ones(1),
        [2] * world(),
    )
    refuses(ConfigurationError, "1 counts were passed", gather_counted, torch.ones(1), [1])


@everywhere
def test_padding():
    size = my_rank() + 1
    data = {
        "a": torch.ones(size, 2),
        "b": [torch.full((2, 4 - size), 7, dtype=torch.bool)],
        "c": torch.tensor(1.0),
    }
    with Messages() as messages:
        found = pad_across_processes(data)
    assert messages.sent == 1
    same(
        found,
        {
            "a": torch.cat([torch.ones(size, 2), torch.zeros(world() - size, 2)]),
            "b": data["b"],
            "c": data["c"],
        },
    )
    found = pad_across_processes(data, dim=1, pad_index=1, pad_first=True)
    same(found["b"][0], torch.ones(2, 3, dtype=torch.bool))
    same(
        pad_across_processes(torch.zeros(1, size), dim=-1, pad_index=-1, pad_first=True)[0],
        torch.tensor([-1.0] * (world() - size) + [0.0] * size),
    )
    same(pad_across_processes(data["a"], dim=5), data["a"])
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(size)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert pad_across_processes(ragged) is ragged
    assert told[0].category is CannotPadNestedTensorWarning
    gathered = gather(pad_across_processes(torch.full((size,), my_rank()), pad_index=-1))
    assert gathered.tolist() == [
        rank if place <= rank else -1 for rank in all_ranks() for place in all_ranks()
    ]


@everywhere
def test_generators():
    set_seed(7, device_specific=True)
    expected = [random.Random(7 + rank).random() for rank in all_ranks()]
    assert gather_object([random.random()]) == expected
    assert gather_object([float(np.random.rand())]) == [
        float(np.random.RandomState(7 + rank).rand()) for rank in all_ranks()
    ]
    generator = torch.Generator().manual_seed(my_rank())
    with Messages() as messages:
        synchronize_rng_states(["torch", "generator"], generator)
    assert messages.sent == 1
    same(
        gather(torch.rand(2)),
        torch.rand(2, generator=torch.Generator().manual_seed(7)).repeat(world()),
    )
    same(
        gather(torch.rand(2, generator=generator)),
        torch.rand(2, generator=torch.Generator().manual_seed(0)).repeat(world()),
    )
    synchronize_rng_state(None)


@everywhere
def test_subgroup():
    """The same operations among some of the ranks, numbered by their place in the group."""
    from accelerate.collectives.tensors import broadcast_nested, gather_nested, reduce_nested

    groups = [
        dist.new_group(list(range(start, min(start + 2, world()))))
        for start in range(0, world(), 2)
    ]
    group = groups[my_rank() // 2]
    members = dist.get_process_group_ranks(group)
    same(
        gather_nested({"a": torch.tensor(my_rank()), "b": torch.ones(1)}, group)["a"],
        torch.tensor(members),
    )
    same(
        reduce_nested(torch.tensor(float(my_rank())), "mean", group=group),
        torch.tensor(sum(members) / len(members)),
    )
    same(
        broadcast_nested(torch.tensor(my_rank()), len(members) - 1, group),
        torch.tensor(members[-1]),
    )
    same(
        gather_counted(torch.arange(3) + my_rank(), [2, 1][: len(members)], group)[-1],
        torch.tensor(members[-1] + (len(members) == 1)),
    )


@on_ranks(2, env=DEBUG)
@pytest.mark.parametrize(
    "operation", [f"test_{name}" for name in ("reduce", "uneven_rows", "padding", "subgroup")]
)
def test_all_operations_agree_in_debug_mode(operation):
    """The comparison itself must not refuse what is right."""
    assert PartialState(cpu=True).debug
    globals()[operation].__wrapped__()
