# SPDX-License-Identifier: Apache-2.0
"""The backward of a batch whose micro-batches went forward one after another: from the last stage to the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .batch import Batch, Saved
from .p2p import Arriving, P2PChannel


class Backward:
    """Takes gradients of a batch's output through this rank's stages. `ranks[s]` is the rank that holds stage s."""

    def __init__(self, stages: Iterable[int], ranks: Sequence[int], wire: P2PChannel) -> None:
        self.stages, self.ranks, self.wire = sorted(stages, reverse=True), ranks, wire
        self.last = len(ranks) - 1

    def __call__(self, batch: Batch, grads: list[torch.Tensor | None]) -> None:
        for number in self.stages:
            if number == self.last:
                arriving: list[Any] = self._output_backward(batch, grads)
            else:
                arriving = self._post_gradients(number, batch)
            for micro, saved in enumerate(batch.saved[number]):
                self._micro_backward(number, micro, batch, saved, arriving[micro])
            batch.saved[number] = []
        self.wire.settle()

    def _output_backward(self, batch: Batch, grads: list[torch.Tensor | None]) -> list[list[torch.Tensor | None]]:
        """The gradients of what each micro-batch of the last stage gave."""
        starts, rows = batch.inputs.starts, batch.inputs.rows
        if batch.tail is None:
            return [
                [None if grad is None else grad.narrow(0, start, count) for grad in grads]
                for start, count in zip(starts, rows, strict=True)
            ]
        _through(batch.tail.outputs, grads)
        found = [leaf.grad for leaf in batch.tail.leaves]
        batch.tail = None
        return [
            [
                grad.narrow(0, start, count) if divided and grad is not None else None
                for grad, divided in zip(found, batch.divided, strict=True)
            ]
            for start, count in zip(starts, rows, strict=True)
        ]

    def _post_gradients(self, number: int, batch: Batch) -> list[Any]:
        sender = self.ranks[number + 1]
        if sender == self.wire.rank:
            return [batch.local.pop((number, micro)) for micro in range(len(batch.inputs.rows))]
        wanted = [
            [spec for spec in batch.known.outlets[number, rows].specs if spec.requires_grad]
            for rows in batch.inputs.rows
        ]
        return [self.wire.post(specs, sender) for specs in wanted]

    def _micro_backward(self, number: int, micro: int, batch: Batch, saved: Saved, arriving: Any) -> None:
        outputs = saved.outputs
        if isinstance(arriving, Arriving):
            arriving = arriving.take()
        if number != self.last:
            outputs = [tensor for tensor in outputs if tensor.requires_grad]
        _through(outputs, arriving)
        if number == 0:
            return
        grads = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in saved.leaves if leaf.requires_grad
        ]
        peer = self.ranks[number - 1]
        if peer == self.wire.rank:
            batch.local[number - 1, micro] = grads
        else:
            self.wire.send(grads, peer)


def _through(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Backward from those outputs that have a gradient."""
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(outputs, grads, strict=True)
        if grad is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
