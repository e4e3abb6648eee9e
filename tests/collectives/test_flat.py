# SPDX-License-Identifier: Apache-2.0
"""Any tensors in a row of bytes and back, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from accelerate.collectives import flat

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    return fresh.copy_(tensor.detach()).view(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    width = dtype.itemsize
    count = torch.Size(shape).numel()
    content = draw(st.binary(min_size=count * width, max_size=count * width))
    tensor = torch.frombuffer(bytearray(content or b"\0" * 16), dtype=torch.uint8)[: count * width]
    if dtype is torch.bool:
        tensor = tensor % 2
    tensor = tensor.clone().view(dtype).view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
        if draw(st.booleans()):
            tensor = tensor.imag
    return tensor


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=6), st.integers(1, 3))
def test_there_and_back(leaves, world):
    specs = flat.specs_of(leaves)
    row = flat.pack(leaves)
    assert row.dtype == torch.uint8 and row.shape == (sum(flat.sizes_of(specs)),)
    assert row.numpy().tobytes() == b"".join(bits(leaf) for leaf in leaves)
    for leaf, found in zip(leaves, flat.unpack(row, specs), strict=True):
        assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape) and bits(found) == bits(leaf)
    stacked = flat.unpack_stacked(row.expand(world, -1).contiguous(), specs)
    for leaf, found in zip(leaves, stacked, strict=True):
        assert (
            found.dtype == leaf.dtype
            and found.is_contiguous()
            and bits(found) == bits(leaf) * world
        )
        assert found.shape == (
            (world, *leaf.shape[:0])
            if leaf.dim() == 0
            else (world * leaf.shape[0], *leaf.shape[1:])
        )


def test_a_lone_contiguous_tensor_is_not_copied():
    for tensor in (
        torch.ones(3, 4),
        torch.tensor(1.0),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(10)[::5][:1],
    ):
        row = flat.pack([tensor])
        assert row.data_ptr() == tensor.data_ptr() and not row.requires_grad
        row.zero_()
        assert tensor.eq(0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_join_and_part(shapes):
    leaves = [torch.rand(shape).requires_grad_() for shape in shapes]
    parts = flat.part(flat.join(leaves), leaves)
    assert all(torch.equal(one, leaf) for one, leaf in zip(parts, leaves, strict=True))
    assert all(
        one.data_ptr() != leaf.data_ptr()
        for one, leaf in zip(parts, leaves, strict=True)
        if leaf.numel()
    )
    filled = [(index, one) for index, one in enumerate(parts) if one.numel()]
    if filled:
        sum((index + 1) * one.sum() for index, one in filled).backward()
        assert all(leaves[index].grad.eq(index + 1).all() for index, _ in filled)


def test_what_is_no_dense_tensor_is_refused():
    group = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=group, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(2), mesh)
        with pytest.raises(TypeError, match=r"some_op .* DTensor"):
            flat.collect([sharded], "some_op")
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(TypeError, match="sparse"):
        flat.collect([torch.ones(2), torch.eye(2).to_sparse()], "some_op")
    with pytest.raises(TypeError, match="nested: True"):
        flat.collect(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "some_op")
    with pytest.raises(TypeError, match=r"some_op takes tensors.*builtins.str"):
        flat.collect({"a": [torch.ones(1), "text"]}, "some_op")


def test_a_subclass_that_only_decorates_is_plain():
    class Image(torch.Tensor):
        pass

    (found,) = flat.collect(torch.ones(2).as_subclass(Image), "some_op")
    assert type(found) is torch.Tensor and found.tolist() == [1.0, 1.0]
