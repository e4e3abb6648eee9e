# SPDX-License-Identifier: Apache-2.0
"""Attention in parts that are merged, and its gradient, against torch's own attention in one piece."""

import pytest
import torch
import torch.nn.functional as F

from accelerate.parallel.context import blocks
from accelerate.parallel.context.blocks import Attended, Block, Merger, attend, attend_backward

ROWS, SCALE = 32, 0.4


def whole(query, key, value, gradient, causal, keep=None, shown=None):
    query, key, value = (tensor.double().clone().requires_grad_() for tensor in (query, key, value))
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool, device=query.device)
    mask = (
        (mask.tril() if causal else mask) if keep is None else (mask.tril() if causal else mask) & keep[:, None, None]
    )
    mask = mask if shown is None else shown.double() if shown.is_floating_point() else shown
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=SCALE, enable_gqa=True)
    out.backward(gradient.double())
    return out.detach(), query.grad, key.grad, value.grad


def in_parts(query, key, value, gradient, causal, keep=None, shown=None):
    """The first half of the rows sees the first half of the keys, the second both."""
    half, merger = ROWS // 2, Merger(query, value.shape[-1])
    first, second = slice(0, half), slice(half, ROWS)
    pairs = [(first, first, causal), (second, second, causal), (second, first, False)]
    if not causal:
        pairs.append((first, second, False))
    parts = [
        (
            rows,
            keys,
            Block(
                SCALE,
                square,
                None if keep is None else keep[:, keys],
                None if shown is None else shown[:, :, rows, keys],
            ),
        )
        for rows, keys, square in pairs
    ]
    for rows, keys, block in parts:
        merger.add(rows, attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], block))
    out, lse = merger.result()
    found = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in (query, key, value)]
    of = Attended(query, key, value, out, lse, gradient)
    for rows, keys, block in parts:
        d_parts = attend_backward(of.part(rows, key[:, :, keys], value[:, :, keys]), block)
        for total, part, place in zip(found, d_parts, (rows, keys, keys), strict=True):
            total[:, :, place] += part
    return out, *found


def inputs(dtype, device="cpu", width=8, shared=2):
    generator = torch.Generator().manual_seed(3)
    sizes = ((4, 8), (shared, 8), (shared, width), (4, width))
    return [torch.randn(2, heads, ROWS, w, generator=generator).to(device, dtype) for heads, w in sizes]


def some_keys(device="cpu"):
    keep = torch.rand(2, ROWS, generator=torch.Generator().manual_seed(4)) > 0.3
    keep[0, :20] = False
    keep[1] = False
    return keep.to(device)


def some_pairs(dtype, device="cpu"):
    """A boolean mask with rows that see nothing, and a bias of each head with keys that are hidden."""
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand(2, 1, ROWS, ROWS, generator=generator) > 0.5
    seen[0, :, 3], seen[1, :, 17] = False, False
    bias = torch.randn(1, 4, ROWS, ROWS, generator=generator).masked_fill(~seen[:1], float("-inf"))
    return seen.to(device), bias.to(device, dtype)


def compare(found, expected, tolerance):
    for name, one, other in zip(("output", "query", "key", "value"), found, expected, strict=True):
        difference = (one.double() - other).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference}"


@pytest.mark.parametrize("math", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_merge_to_the_whole(causal, math, monkeypatch):
    if math:
        monkeypatch.setattr(blocks, "_kernel", lambda *args: blocks._Math)
    given = inputs(torch.float64)
    assert (blocks._kernel(*given[:3], Block(1.0)) is blocks._Math) is math
    compare(in_parts(*given, causal), whole(*given, causal), 1e-12)
    compare(in_parts(*given, causal, some_keys()), whole(*given, causal, some_keys()), 1e-12)
    for shown in some_pairs(torch.float64) if not causal else ():
        compare(in_parts(*given, False, shown=shown), whole(*given, False, shown=shown), 1e-12)
    narrow = inputs(torch.float64, width=5)
    compare(in_parts(*narrow, causal), whole(*narrow, causal), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_low_precision(dtype, tolerance):
    given = inputs(dtype)
    compare(in_parts(*given, True), whole(*given, True), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kernel", "tolerance"),
    [(torch.bfloat16, "_CudaFlash", 5e-2), (torch.float32, "_CudaEfficient", 1e-3), (torch.float64, "_Math", 1e-10)],
)
def test_kernels_of_a_gpu(dtype, kernel, tolerance, causal):
    given = inputs(dtype, "cuda", shared=4)
    assert blocks._kernel(*given[:3], Block(1.0)) is getattr(blocks, kernel)
    compare(in_parts(*given, causal), whole(*given, causal), tolerance)
    keep = some_keys("cuda")
    compare(in_parts(*given, causal, keep), whole(*given, causal, keep), tolerance)
    for shown in some_pairs(dtype, "cuda") if not causal else ():
        compare(in_parts(*given, False, shown=shown), whole(*given, False, shown=shown), tolerance)
