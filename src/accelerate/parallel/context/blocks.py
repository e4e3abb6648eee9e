# SPDX-License-Identifier: Apache-2.0
"""Attention of some rows to some keys with its log-sum-exp, so that partial results can be merged; its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

# The output of a block, and the log of its softmax's denominator, (batch, heads, rows).
Partial = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256
_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT = 8


@dataclass(frozen=True)
class Block:
    """Options of a block of queries and keys.

    Fields:
        scale: of the scores. causal: row i sees keys 0..i only; the block is square.
        keep: (batch, keys), which keys are not padding; None for all.
        mask: broadcasts to (batch, heads, rows, keys); boolean, or added to the scores in the dtype of the queries.
        shift: (batch, heads, rows, 1), added to the scores and subtracted again, which rounds them.
    """

    scale: float
    causal: bool = False
    keep: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def selects(self) -> bool:
        """Whether some rows may see no key."""
        return self.keep is not None or self.mask is not None


@dataclass(frozen=True)
class Attended:
    """An attention for its backward: inputs, output, log-sum-exp and the output's gradient.

    `out` and `lse` are those of the attention to all keys, also where `key` and `value` are some of them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    gradient: torch.Tensor

    def part(self, rows: slice, key: torch.Tensor, value: torch.Tensor) -> Attended:
        """The same attention of some rows, to these keys."""
        query, out, gradient = (tensor[:, :, rows] for tensor in (self.query, self.out, self.gradient))
        return Attended(query, key, value, out, self.lse[:, :, rows], gradient)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> Partial:
    """Attention of one block: (output, log-sum-exp in float32 or float64; -inf for a row that sees no key).

    Shapes: query (batch, heads, rows, width); key and value (batch, heads or a divisor of them, keys, width).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = _repeat(key, groups), _repeat(value, groups)
    out, lse = _kernel(query, key, value, block).forward(query, key, value, block)
    if block.selects:
        lse = lse.masked_fill(~_sees_any(block, query.shape[2]), float("-inf"))
    return out, lse


def attend_backward(of: Attended, block: Block) -> Gradients:
    """Gradients of a block's query, key and value, from output and log-sum-exp of the attention to *all* keys."""
    groups = of.query.shape[1] // of.key.shape[1]
    # A row that sees nothing anywhere has no weights: exp(-inf - 0), where exp(-inf - -inf) would be nan.
    lse = of.lse.masked_fill(of.lse == float("-inf"), 0.0) if block.selects else of.lse
    of = replace(of, key=_repeat(of.key, groups), value=_repeat(of.value, groups), lse=lse)
    d_query, d_key, d_value = _kernel(of.query, of.key, of.value, block).backward(of, block)
    return d_query, _sum_groups(d_key, groups), _sum_groups(d_value, groups)


class Merger:
    """Merges partial attentions of the same rows to different keys."""

    def __init__(self, query: torch.Tensor, width: int) -> None:
        shape = query.shape[:-1]
        self.dtype: torch.dtype = query.dtype
        self.out: torch.Tensor = query.new_zeros((*shape, width), dtype=accumulator(query.dtype))
        self.lse: torch.Tensor = query.new_full(shape, float("-inf"), dtype=accumulator(query.dtype))

    def add(self, rows: slice, partial: Partial) -> None:
        """Merge the partial result of some rows."""
        out, lse = partial
        former = self.lse[:, :, rows]
        total = torch.logaddexp(former, lse)
        self.out[:, :, rows].mul_(_share(former, total)).addcmul_(out.to(self.out.dtype), _share(lse, total))
        self.lse[:, :, rows] = total

    def result(self) -> Partial:
        """Return the merged output and its log-sum-exp."""
        return self.out.to(self.dtype), self.lse


def _share(part: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The share of a denominator in the total; 0 where that is 0."""
    return torch.exp(part - total).masked_fill(total == float("-inf"), 0.0).unsqueeze(-1)


def _repeat(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys and values once for each query head that shares them."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _sum_groups(heads: torch.Tensor, groups: int) -> torch.Tensor:
    if groups == 1:
        return heads
    # In the accumulator's precision: the kernel returns that of its inputs.
    total: torch.Tensor = heads.unflatten(1, (-1, groups)).sum(2, dtype=accumulator(heads.dtype))
    return total


def _sees_any(block: Block, rows: int) -> torch.Tensor:
    """Whether a row sees any key; broadcasts to (batch, heads, rows)."""
    if block.mask is not None:
        return seen(block.mask, block.keep).any(-1)
    assert block.keep is not None
    if block.causal:
        return (block.keep.cumsum(-1) > 0)[:, None]
    return block.keep.any(-1, keepdim=True).expand(-1, rows)[:, None]


def seen(mask: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Which keys each row sees, of a mask of either kind."""
    shown = mask if mask.dtype == torch.bool else mask > float("-inf")
    return shown if keep is None else shown & keep[:, None, None]


def _kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> type[_Math]:
    """The most memory-efficient of torch's kernels that returns a log-sum-exp for these tensors, else plain torch."""
    width = query.shape[-1]
    plain = query.dtype in _FLOATS and query.dtype == key.dtype == value.dtype and width == value.shape[-1]
    # For a row whose scores are rounded by a shift, torch's kernel for CPUs computes a wrong gradient (2.13): it
    # computes the weights from a log-sum-exp that is rounded, too.
    if not plain or block.shift is not None:
        return _Math
    if query.device.type == "cpu":
        return _CpuFlash
    if query.device.type == "cuda" and query.dtype != torch.float64 and width % 8 == 0:
        half = query.dtype in (torch.float16, torch.bfloat16)
        if half and width <= _FLASH_WIDTH and not block.selects and torch.backends.cuda.flash_sdp_enabled():
            return _CudaFlash
        if torch.backends.cuda.mem_efficient_sdp_enabled():
            return _CudaEfficient
    return _Math


def _bias(block: Block, query: torch.Tensor, keys: int) -> torch.Tensor | None:
    """What is added to the scores, -inf for hidden keys, expanded to (batch, heads, rows, keys) without copies."""
    if not block.selects:
        return None
    mask, keep = block.mask, block.keep
    batch, heads, rows = (1, 1, 1) if mask is None else mask.shape[:3]
    if keep is not None:
        batch = keep.shape[0]
    padded = -(-keys // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = query.new_zeros((batch, heads, rows, padded))
    inner = bias[..., :keys]
    if mask is not None and mask.dtype != torch.bool:
        inner += mask
    elif mask is not None:
        inner.masked_fill_(~mask, float("-inf"))
    if keep is not None:
        inner.masked_fill_(~keep[:, None, None], float("-inf"))
    return inner.expand(*query.shape[:3], keys)


class _Math:
    """Matrices of scores in plain torch: any device, any dtype."""

    @staticmethod
    def _scores(query: torch.Tensor, key: torch.Tensor, block: Block) -> torch.Tensor:
        dtype = accumulator(query.dtype)
        scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * block.scale
        if block.shift is not None:
            scores = (scores + block.shift) - block.shift
        if block.causal:
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(unseen, float("-inf"))
        if block.mask is not None and block.mask.dtype == torch.bool:
            scores.masked_fill_(~block.mask, float("-inf"))
        elif block.mask is not None:
            scores += block.mask
        if block.keep is not None:
            scores.masked_fill_(~block.keep[:, None, None], float("-inf"))
        return scores

    @staticmethod
    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> Partial:
        with torch.autocast(query.device.type, enabled=False):
            scores = _Math._scores(query, key, block)
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
            return weights @ value.to(weights.dtype), lse

    @staticmethod
    def backward(of: Attended, block: Block) -> Gradients:
        with torch.autocast(of.query.device.type, enabled=False):
            weights = torch.exp(_Math._scores(of.query, of.key, block) - of.lse.unsqueeze(-1))
            gradient, key, value = (tensor.to(weights.dtype) for tensor in (of.gradient, of.key, of.value))
            d_weights = gradient @ value.transpose(-1, -2)
            along = (gradient * of.out.to(weights.dtype)).sum(-1, keepdim=True)
            d_scores = weights * (d_weights - along) * block.scale
            return (
                d_scores @ key,
                d_scores.transpose(-1, -2) @ of.query.to(weights.dtype),
                weights.transpose(-1, -2) @ gradient,
            )


class _CpuFlash(_Math):
    """torch's flash attention for CPUs."""

    @staticmethod
    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.causal, attn_mask=_bias(block, query, key.shape[2]), scale=block.scale
        )
        return out, lse

    @staticmethod
    def backward(of: Attended, block: Block) -> Gradients:
        found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            of.gradient.contiguous(),
            of.query,
            of.key,
            of.value,
            of.out,
            # The kernel needs its own memory layout, in which the heads of a row are adjacent.
            of.lse.transpose(1, 2).contiguous().transpose(1, 2),
            0.0,
            block.causal,
            attn_mask=_bias(block, of.query, of.key.shape[2]),
            scale=block.scale,
        )
        return found


class _CudaFlash(_Math):
    """torch's flash attention for GPUs: half precision, no key left out."""

    @staticmethod
    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, block.causal, False, scale=block.scale
        )[:2]
        return out, lse

    @staticmethod
    def backward(of: Attended, block: Block) -> Gradients:
        # Without dropout the generator's state is not read, and dense inputs have no cumulated lengths.
        shape, dtype = ((), torch.int64) if torch.version.hip else ((2,), torch.uint64)
        state = torch.empty(shape, dtype=dtype, device=of.query.device)
        found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            of.gradient,
            of.query,
            of.key,
            of.value,
            of.out,
            of.lse.contiguous(),
            None,
            None,
            of.query.shape[2],
            of.key.shape[2],
            0.0,
            block.causal,
            state,
            torch.empty((), dtype=dtype, device=of.query.device),
            scale=block.scale,
        )
        return found


class _CudaEfficient(_Math):
    """torch's memory-efficient attention for GPUs: float32 too, and keys that are left out."""

    @staticmethod
    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(block, query, key.shape[2]), True, 0.0, block.causal, scale=block.scale
        )[:2]
        return out, lse[..., : query.shape[2]]

    @staticmethod
    def backward(of: Attended, block: Block) -> Gradients:
        missing = -of.lse.shape[-1] % _LSE_ALIGNMENT
        # Padding rows have infinite sums: their weights are 0.
        lse = F.pad(of.lse, (0, missing), value=float("inf")).contiguous()
        state = torch.zeros((), dtype=torch.int64, device=of.query.device)
        d_query, d_key, d_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            of.gradient,
            of.query,
            of.key,
            of.value,
            _bias(block, of.query, of.key.shape[2]),
            of.out,
            lse,
            state,
            state,
            0.0,
            [True, True, True, False],
            block.causal,
            scale=block.scale,
        )
        return d_query, d_key, d_value
