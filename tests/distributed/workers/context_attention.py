# SPDX-License-Identifier: Apache-2.0
"""Each rank: ring, all-gather and all-to-all attention against torch's own, whole one, forward and back."""

import itertools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accelerate.collectives import transport
from accelerate.parallel.context import gather as gather_room
from accelerate.parallel.context.attention import Call, ContextAttention, SequenceAttention
from accelerate.parallel.context.blocks import Block
from accelerate.parallel.context.gather import GatherAttention
from accelerate.parallel.context.ring import Exchange, RingAttention
from accelerate.parallel.context.shard import SequenceLayout
from accelerate.parallel.context.ulysses import split_rows, spread_inputs
from accelerate.state import PartialState

BATCH, ROWS, WIDTH, SCALE = 2, 24, 8, 0.3


def whole_inputs(heads, shared, dtype, width=WIDTH):
    generator = torch.Generator().manual_seed(heads * 10 + shared)
    sizes = ((heads, WIDTH), (shared, WIDTH), (shared, width), (heads, width))
    tensors = [torch.randn(BATCH, n, ROWS, w, generator=generator, dtype=torch.float64).to(dtype) for n, w in sizes]
    return tensors


def expected(inputs, causal, keep=None):
    query, key, value = (tensor.double().clone().requires_grad_() for tensor in inputs[:3])
    mask = None
    if keep is not None:
        mask = keep[:, None, None] & (torch.ones(ROWS, ROWS, dtype=torch.bool).tril() if causal else True)
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
        ("output", "query", "key", "value"), (out, query.grad, key.grad, value.grad), reference, strict=True
    ):
        difference = (found.double() - layout.take(whole, 2)).abs().max().item()
        assert difference <= tolerance, f"{what}: {name} is off by {difference}"


def check_exchanges(group, world, rank):
    layout = SequenceLayout("cp_size", world, rank, balanced=True)
    keep = torch.rand(BATCH, ROWS, generator=torch.Generator().manual_seed(5)) > 0.4
    keep[0, :3], keep[1] = False, False  # rows that see nothing, and a sample that sees nothing
    own_keep = torch.stack([
        SequenceLayout("cp_size", world, r, balanced=True).take(keep, 1) for r in range(world)
    ])  # fmt: skip
    cases = itertools.product((RingAttention, GatherAttention), (True, False), ((4, 4), (4, 2)), (None, keep))
    for kind, causal, heads, seen in cases:
        what = f"{kind.__name__} causal={causal} heads={heads} keep={seen is not None}"
        exchange = Exchange(group, world, rank, Block(SCALE, causal), None if seen is None else own_keep)
        inputs = whole_inputs(*heads, torch.float64)
        attention = lambda *qkv: kind.apply(*qkv, exchange)  # noqa: B023, E731
        compare(what, layout, attention, inputs, expected(inputs, causal, seen), 1e-10)
        if seen is not None or heads != (4, 2):
            continue
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 6e-2)):
            inputs = whole_inputs(*heads, dtype)
            compare(f"{what} {dtype}", layout, attention, inputs, expected(inputs, causal), tolerance)
        inputs = whole_inputs(*heads, torch.float64, width=5)
        compare(f"{what} narrow values", layout, attention, inputs, expected(inputs, causal), 1e-10)


def check_all_to_all(group, world, rank):
    layout = SequenceLayout("sp_size", world, rank, balanced=False)

    def attention(query, key, value):
        query, key, value = spread_inputs(query, key, value, group, world)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=SCALE, enable_gqa=True)
        return split_rows(out, group, world)

    for causal, heads, width in itertools.product((True, False), ((4, 4), (4, 1), (12, 6)), (WIDTH, 5)):
        inputs = whole_inputs(*heads, torch.float64, width)
        what = f"all to all causal={causal} heads={heads} width={width}"
        compare(what, layout, attention, inputs, expected(inputs, causal), 1e-10)


def check_messages(group, world, rank):
    """What is said to be sent is what is sent."""
    inputs = [tensor.requires_grad_() for tensor in whole_inputs(4, 2, torch.bfloat16)[:3]]
    found = []
    send, gather = dist.batch_isend_irecv, transport.all_gather
    scatter, swap = gather_room._reduce_scatter, transport.exchange

    def sends(operations):
        found.append(operations[0].tensor.nbytes)
        return send(operations)

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

    for attention in (
        ContextAttention(group, SequenceLayout("cp_size", world, rank, True), rotate=True),
        ContextAttention(group, SequenceLayout("cp_size", world, rank, True), rotate=False),
        SequenceAttention(group, SequenceLayout("sp_size", world, rank, False)),
    ):
        found.clear()
        with (
            mock.patch.object(dist, "batch_isend_irecv", sends),
            mock.patch.object(transport, "all_gather", gathers),
            mock.patch.object(gather_room, "_reduce_scatter", scatters),
            mock.patch.object(transport, "exchange", swaps),
        ):
            attention(*inputs, Call(None, 0.0, True, None)).sum().backward()
        told = attention.sent(*inputs).values()
        assert (len(found), sum(found)) == tuple(map(sum, zip(*told, strict=True))), (attention, found, told)


def main():
    state = PartialState(cpu=True)
    group = dist.group.WORLD
    check_exchanges(group, state.num_processes, state.process_index)
    check_messages(group, state.num_processes, state.process_index)
    check_all_to_all(group, state.num_processes, state.process_index)
    print("all equal")


if __name__ == "__main__":
    main()
