# SPDX-License-Identifier: Apache-2.0
"""Attention that separates the documents of packed rows, in place of torch's function: by a mask, or by a kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core import trees
from ..core.availability import is_triton_available
from ..core.documents import Documents
from ..core.modules import untraced
from ..torch_internals.attention import PUBLIC_NAME, plain_attention, replaced_attention

# The length of rows from which flex_attention is compiled. In shorter rows, a mask has a few megabytes, and attention
# is too little of a step to pay for the compilation.
_LONG = 2048
# The compute capabilities with enough shared memory for its kernels, which fail elsewhere (pytorch/pytorch#133254).
_DATA_CENTER = ((8, 0), (9, 0), (10, 0), (10, 3))


class DocumentAttention:
    """Attention in the packed forwards of a run, and where a backward computes it again.

    Fields:
        documents: of the batch that is computed; None for rows that are not packed.
        names: (module, name) of what is torch's attention in the models' sources.
        is_used: whether a forward was on packed rows.
    """

    def __init__(self) -> None:
        self.documents: Documents | None = None
        self.names: set[tuple[str, str]] = {PUBLIC_NAME}
        self.is_used = False
        self._is_open = False

    @contextlib.contextmanager
    def separating(self, documents: Documents | None = None) -> Iterator[None]:
        """A block in which attention separates documents; by default those of the forward that is recomputed."""
        former = self.documents, self._is_open
        self.documents, self._is_open = documents, True
        # The fused layers of nn.TransformerEncoder attend without torch's function.
        is_fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with replaced_attention(untraced(self._attend), self.names):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fused)
            self.documents, self._is_open = former

    def expect_backward(self, output: object, documents: Documents) -> None:
        """Separate documents again where the backward through an output recomputes its forward."""

        def begin(gradient: torch.Tensor) -> None:
            if self._is_open:
                self.documents = documents

        for tensor in trees.leaves(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Takes the arguments of torch's function, which it replaces. Attention to other rows is computed as it is."""
        documents = self.documents
        shape = query.shape[0], query.shape[-2]
        if documents is not None and documents.numbers.shape == shape and key.shape[-2] == shape[1]:
            if attn_mask is None and dropout_p == 0.0:
                kernel = kernel_for(query, key, value)
                if kernel is not None:
                    return kernel(query, key, value, documents, is_causal, scale)
            attn_mask = documents.mask(is_causal, attn_mask)
            is_causal = False
            if query.dim() == 3:
                attn_mask = attn_mask.squeeze(1)
        return plain_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def kernel_for(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[..., torch.Tensor] | None:
    """What computes these documents without a mask of (length, length) elements; None if nothing does."""
    if query.device.type != "cuda" or not torch.cuda.is_available() or query.dim() != 4:
        return None
    if query.shape[0] != key.shape[0] or key.shape != value.shape:
        return None
    length, width = query.shape[-2:]
    capability = torch.cuda.get_device_capability(query.device)
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if (
        is_half
        and width % 8 == 0
        and width <= 256
        and capability >= (8, 0)
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return attend_by_length
    if (
        (is_half or query.dtype == torch.float32)
        and 16 <= width <= 128
        and length >= _LONG
        and capability in _DATA_CENTER
        and is_triton_available()
    ):
        return attend_in_blocks
    return None


def attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The attention of each document to itself. Queries are (rows, heads, length, width)."""
    # Few devices have it.
    from torch.nn.attention import varlen

    window = (-1, -1)
    if is_causal:
        window = (-1, 0)
    bounds, longest = documents.cu_seqlens, documents.longest
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output: Any = varlen.varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=window,
        enable_gqa=True,
    )
    attended: torch.Tensor = output.unflatten(0, documents.numbers.shape).transpose(1, 2)
    return attended


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The same, by a kernel that leaves out blocks of scores between documents."""
    attend = compiled_flex_attention()
    block_mask = documents.block_mask(is_causal)
    return attend(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=True)


@functools.cache
def compiled_flex_attention() -> Callable[..., torch.Tensor]:
    """The function flex_attention, which computes all scores where it is not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention)
    return compiled
