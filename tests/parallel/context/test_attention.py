# SPDX-License-Identifier: Apache-2.0
"""Attention with gathered keys and with exchanged heads against torch's own, whole one, forward and back."""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import on_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerate.collectives import transport
from accelerate.core.errors import ConfigurationError
from accelerate.parallel.context import attention as attention_module
from accelerate.parallel.context import exchange as exchange_module
from accelerate.parallel.context.attention import (
    AttentionCall,
    ContextAttention,
    SequenceAttention,
    ShardRandom,
)
from accelerate.parallel.context.exchange import split_rows, spread_inputs
from accelerate.parallel.context.shard import SequenceLayout
from accelerate.state import PartialState

BATCH, ROWS, WIDTH, SCALE = 2, 24, 8, 0.3
pytestmark = pytest.mark.usefixtures("float64")
everywhere = on_ranks(2, 4)


def here():
    """The default group, its size, and this rank in it."""
    state = PartialState(cpu=True)
    return dist.group.WORLD, state.num_processes, state.process_index


def whole_inputs(heads, shared, dtype, width=WIDTH):
    generator = torch.Generator().manual_seed(heads * 10 + shared)
    sizes = ((heads, WIDTH), (shared, WIDTH), (shared, width), (heads, width))
    tensors = [
        torch.randn(BATCH, n, ROWS, w, generator=generator, dtype=torch.float64).to(dtype)
        for n, w in sizes
    ]
    return tensors


def expected(inputs, causal, keep=None, mask=None):
    query, key, value = (tensor.double().clone().requires_grad_() for tensor in inputs[:3])
    if keep is not None:
        mask = keep[:, None, None] & (
            torch.ones(ROWS, ROWS, dtype=torch.bool).tril() if causal else True
        )
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal and mask is None, scale=SCALE, enable_gqa=True
    )
    out.backward(inputs[3].double())
    return [out.detach(), query.grad, key.grad, value.grad]


def compare(what, layout, attention, inputs, reference, tolerance):
    own = [layout.take(tensor, 2) for tensor in inputs]
    query, key, value = (tensor.requires_grad_() for tensor in own[:3])
    out = attention(query, key, value)
    assert out.dtype == inputs[0].dtype and out.shape == (*query.shape[:3], value.shape[-1]), what
    out.backward(own[3])
    for name, found, whole in zip(
        ("output", "query", "key", "value"),
        (out, query.grad, key.grad, value.grad),
        reference,
        strict=True,
    ):
        difference = (found.double() - layout.take(whole, 2)).abs().max().item()
        assert difference <= tolerance, f"{what}: {name} is off by {difference}"


def method_of(name, group, world, rank):
    layout = SequenceLayout(
        "sp_size" if name == "heads" else "cp_size", world, rank, balanced=name != "heads"
    )
    random = ShardRandom(rank, "cpu")
    if name == "heads":
        return SequenceAttention(group, layout, random)
    return ContextAttention(group, layout, random, all_to_all=name == "all to all")


METHODS = ("gather", "all to all", "heads")


@everywhere
@pytest.mark.parametrize("method", ["gather", "all to all"])
def test_keys_of_all_ranks(method):
    attention = method_of(method, *here())
    layout = attention.layout
    keep = (
        torch.rand(BATCH, ROWS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        > 0.4
    )
    keep[0, :3] = False  # rows that see nothing
    for causal, heads in itertools.product((True, False), ((4, 4), (4, 2))):
        inputs = whole_inputs(*heads, torch.float64)
        for kept in (None, keep):
            attend = functools.partial(
                attention, call=AttentionCall(None, 0.0, causal, SCALE, kept)
            )
            what = f"causal {causal}, heads {heads}, padded {kept is not None}"
            compare(what, layout, attend, inputs, expected(inputs, causal, kept), 1e-10)
    for causal in (True, False):
        attend = functools.partial(attention, call=AttentionCall(None, 0.0, causal, SCALE))
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 6e-2)):
            inputs = whole_inputs(4, 2, dtype)
            what = f"causal {causal}, {dtype}"
            compare(what, layout, attend, inputs, expected(inputs, causal), tolerance)
        inputs = whole_inputs(4, 2, torch.float64, width=5)
        what = f"causal {causal}, narrow values"
        compare(what, layout, attend, inputs, expected(inputs, causal), 1e-10)


@everywhere
def test_causal_attention_computes_no_more_than_half():
    attention = method_of("gather", *here())
    own = [attention.layout.take(tensor, 2) for tensor in whole_inputs(4, 4, torch.float64)[:3]]
    with mock.patch.object(
        attention_module, "plain_attention", side_effect=F.scaled_dot_product_attention
    ) as attend:
        attention(*own, AttentionCall(None, 0.0, True, None))
    computed = sum(call.args[0].shape[2] * call.args[1].shape[2] for call in attend.call_args_list)
    chunk = ROWS // attention.layout.multiple
    assert computed == chunk * chunk * (attention.layout.multiple + 1)


@everywhere
def test_all_to_all():
    group, world, rank = here()
    layout = SequenceLayout("sp_size", world, rank, balanced=False)

    def attention(query, key, value, causal):
        query, key, value = spread_inputs(query, key, value, group, world)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=SCALE, enable_gqa=True
        )
        return split_rows(out, group, world)

    for causal, heads, width in itertools.product(
        (True, False), ((4, 4), (4, 1), (12, 6)), (WIDTH, 5)
    ):
        inputs = whole_inputs(*heads, torch.float64, width)
        what = f"causal {causal}, heads {heads}, width {width}"
        attend = functools.partial(attention, causal=causal)
        compare(what, layout, attend, inputs, expected(inputs, causal), 1e-10)


def masks():
    """Over the whole sequence: (what, mask, the mask of torch's own call where that needs another)."""
    generator = torch.Generator().manual_seed(8)
    i, j = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    causal = j <= i
    yield "window", causal & (j > i - 5), None
    documents = torch.tensor([0] * 7 + [1] * 11 + [2] * (ROWS - 18))
    packed = causal & (documents[:, None] == documents)
    yield "documents", torch.stack([packed, causal])[:, None], None
    slopes = (i - j).abs() * -torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    bias = slopes.double().masked_fill(~causal, float("-inf"))
    yield "bias of heads", bias, None
    anything = torch.rand(BATCH, 4, ROWS, ROWS, generator=generator) > 0.6
    anything[0, 1, 3], anything[1, :, -1] = False, False  # rows that see nothing
    yield "anything", anything, None
    yield "keys", torch.rand(1, ROWS, generator=generator) > 0.4, None
    yield "rows", i % 3 > 0, (i % 3 > 0).expand(ROWS, ROWS)
    finite = torch.zeros(BATCH, 1, ROWS, ROWS, dtype=torch.float64).masked_fill(
        ~causal, torch.finfo(torch.float32).min
    )
    yield "causal by large numbers", finite, causal
    hidden = torch.randn(1, 1, ROWS, ROWS, generator=generator, dtype=torch.float64)
    plain = hidden.clone()
    hidden[:, :, 4] -= 1e6  # a row from which as much is taken everywhere
    yield "large numbers", hidden, plain
    # Rows in which nothing of the scores is left, or a part of it: what torch gives.
    empty = torch.zeros(BATCH, 1, ROWS, ROWS, dtype=torch.float64).masked_fill(
        ~causal, torch.finfo(torch.float64).min
    )
    empty[0, :, :3] = torch.finfo(torch.float64).min
    empty[1, :, 5:9] = -1e15
    yield "rows hidden by large numbers", empty, None
    yield "everything", torch.ones(1, ROWS, ROWS, dtype=torch.bool), None


@everywhere
@pytest.mark.parametrize("method", METHODS)
def test_masks(method):
    attention = method_of(method, *here())
    for what, mask, plain in masks():
        check_mask(attention, what, mask, mask if plain is None else plain)


def check_mask(attention, what, mask, plain):
    """A mask over all rows, and over this rank's rows; with what is padding beside it."""
    layout = attention.layout
    keep = torch.rand(BATCH, ROWS, generator=torch.Generator().manual_seed(5)) > 0.2
    inputs = whole_inputs(4, 4, torch.float64)
    for own in (False, True):
        given = layout.take(mask, -2) if own and mask.shape[-2] == ROWS else mask
        call = AttentionCall(given, 0.0, False, SCALE)
        attend = functools.partial(attention, call=call)
        # torch's kernel for CPUs has a wrong gradient of rows without scores (2.13).
        exact = (
            sdpa_kernel(SDPBackend.MATH)
            if what.startswith("rows hidden")
            else contextlib.nullcontext()
        )
        with exact:
            reference = expected(inputs, False, mask=plain)
            compare(f"{what}, own rows {own}", layout, attend, inputs, reference, 1e-10)
        if own and plain.dtype == torch.bool:
            call.keep = keep
            reference = expected(inputs, False, mask=plain & keep[:, None, None])
            compare(f"{what}, padded", layout, attend, inputs, reference, 1e-10)


@everywhere
@pytest.mark.parametrize("method", METHODS)
def test_masks_in_bfloat16(method):
    method = method_of(method, *here())
    half = [tensor.to(torch.bfloat16) for tensor in whole_inputs(4, 2, torch.float64)]
    for what, mask, _ in masks():
        if what not in ("window", "bias of heads"):
            continue
        call = AttentionCall(
            mask if mask.dtype == torch.bool else mask.to(torch.bfloat16), 0.0, False, SCALE
        )
        attend = functools.partial(method, call=call)
        reference = expected(
            half, False, mask=mask if mask.dtype == torch.bool else call.mask.double()
        )
        compare(what, method.layout, attend, half, reference, 6e-2)


@everywhere
def test_masks_that_do_not_fit_are_refused():
    method, window = method_of("gather", *here()), next(masks())[1]
    own = [method.layout.take(tensor, 2) for tensor in whole_inputs(4, 4, torch.float64)[:3]]
    for mask, why in (
        (torch.ones(ROWS, ROWS - 1, dtype=torch.bool), f"the sequence has {ROWS} rows"),
        (window.expand(3, 1, ROWS, ROWS), "does not broadcast"),
    ):
        with pytest.raises(ConfigurationError, match=why) as caught:
            method(*own, AttentionCall(mask, 0.0, False, None))
        assert "cp_size" in str(caught.value)


@everywhere
@pytest.mark.parametrize("method", METHODS)
def test_what_is_said_to_be_sent_is_what_is_sent(method):
    group, world, rank = here()
    inputs = [tensor.requires_grad_() for tensor in whole_inputs(4, 2, torch.bfloat16)[:3]]
    found = []
    gather, scatter, swap = (
        transport.all_gather,
        exchange_module._reduce_scatter,
        transport.exchange,
    )

    def gathers(row, of):
        found.append(row.nbytes * (world - 1))
        with mock.patch.object(transport, "exchange", swap):
            return gather(row, of)

    def scatters(out, whole, group):
        found.append(out.nbytes * (world - 1))
        return scatter(out, whole, group=group)

    def swaps(out, parts, of):
        found.append(parts.nbytes * (world - 1) // world)
        return swap(out, parts, of)

    attention = method_of(method, group, world, rank)
    with (
        mock.patch.object(transport, "all_gather", gathers),
        mock.patch.object(exchange_module, "_reduce_scatter", scatters),
        mock.patch.object(transport, "exchange", swaps),
    ):
        attention(*inputs, AttentionCall(None, 0.0, True, None)).sum().backward()
    told = attention.sent(*inputs).values()
    assert (len(found), sum(found)) == tuple(map(sum, zip(*told, strict=True)))
