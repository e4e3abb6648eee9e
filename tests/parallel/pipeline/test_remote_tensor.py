# SPDX-License-Identifier: Apache-2.0
"""Tensors of other stages: operations on them compute shapes, and whatever would need their content names them."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accelerate.parallel.pipeline.remote_tensor import RemoteTensor, RemoteTensorError, first_remote

DTYPE, CPU = torch.float64, torch.device("cpu")


def remote():
    return RemoteTensor.of((4, 6), DTYPE, CPU, "embed.weight, which only stage 0 has")


SHAPES = {
    "sum": (lambda a: a + torch.ones(6, dtype=DTYPE), (4, 6)),
    "product": (lambda a: F.linear(torch.ones(2, 6, dtype=DTYPE), a), (2, 4)),
    "part": (lambda a: a[:2, None], (2, 1, 6)),
    "entries": (lambda a: a[torch.tensor([0, 2])], (2, 6)),
    "lookup": (lambda a: F.embedding(torch.tensor([[1, 2]]), a), (1, 2, 6)),
    "in place": (lambda a: (a * 2).mul_(3).add_(1), (4, 6)),
    "parts": (lambda a: torch.cat(a.chunk(2)), (4, 6)),
    "attention": (
        lambda a: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]),
        (1, 1, 4, 6),
    ),
    "parameter": (lambda a: nn.Parameter(torch.ones(6, dtype=DTYPE)) * a, (4, 6)),
    "without gradient": (lambda a: a.data.detach().T, (6, 4)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_operations_before_the_stage_compute_shapes(name):
    operation, shape = SHAPES[name]
    found = operation(remote())
    assert (
        type(found) is RemoteTensor
        and found.shape == shape
        and found.dtype == DTYPE
        and found.device == CPU
    )


MOVES = {
    "device": (lambda a: a.to("cpu:0"), torch.device("cpu:0"), DTYPE),
    "index": (lambda a: a.to(torch.device("cpu", 0)), torch.device("cpu:0"), DTYPE),
    "keyword": (lambda a: a.to(device="meta"), torch.device("meta"), DTYPE),
    "dtype": (lambda a: a.to(torch.float32), CPU, torch.float32),
    "both": (lambda a: a.to("meta", torch.float16), torch.device("meta"), torch.float16),
    "another": (lambda a: a.to(torch.ones(2, device="meta")), torch.device("meta"), torch.float32),
    "method": (lambda a: a.cpu(), CPU, DTYPE),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_has_the_requested_device(name):
    move, device, dtype = MOVES[name]
    moved = move(remote())
    expected = torch.zeros((), dtype=dtype, device=device)
    assert type(moved) is RemoteTensor and moved.shape == (4, 6)
    assert moved.device == expected.device and moved.dtype == dtype


def test_values_are_moved_to_where_a_remote_tensor_is():
    moved = torch.ones(2).to(remote())
    assert type(moved) is torch.Tensor and moved.dtype == DTYPE and moved.sum() == 2


READS = {
    "item": lambda a: a.sum().item(),
    "truth": lambda a: 1 if (a > 0).any() else 0,
    "list": lambda a: a.tolist(),
    "numpy": lambda a: a.numpy(),
    "array": lambda a: numpy.asarray(a),
    "address": lambda a: a.data_ptr(),
    "format": lambda a: f"{a.sum():.2f}",
    "equal": lambda a: torch.equal(a, torch.ones(4, 6, dtype=DTYPE)),
    "shape by content": lambda a: a.nonzero(),
    "choice": lambda a: torch.ones(4, 6)[a > 0],
    "into another": lambda a: torch.ones(4, 6, dtype=DTYPE).add_(a),
    "copied": lambda a: torch.ones(4, 6, dtype=DTYPE).copy_(a),
    "written": lambda a: torch.ones(4, 6, dtype=DTYPE).__setitem__(0, a[0]),
    "out": lambda a: torch.add(a, 1, out=torch.ones(4, 6, dtype=DTYPE)),
}


@pytest.mark.parametrize("name", READS)
def test_content_is_never_made_up(name):
    with pytest.raises(RemoteTensorError, match=r"embed\.weight"):
        READS[name](remote())


def test_what_takes_its_shape_alone_has_content():
    found = torch.zeros_like(remote()), remote().new_ones(2), torch.full_like(remote(), 3.0)
    assert [type(tensor) for tensor in found] == [torch.Tensor] * 3
    assert found[0].sum() == 0 and found[1].sum() == 2 and found[2].sum() == 72


def test_a_stand_in_shows_shapes():
    assert remote().device == CPU and remote().shape == (4, 6) and "embed.weight" in repr(remote())
    assert (
        first_remote([{"a": (torch.ones(1), remote() + 1)}]) is not None
        and first_remote([torch.ones(1)]) is None
    )
