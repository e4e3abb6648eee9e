# SPDX-License-Identifier: Apache-2.0
"""1F1B for gloo: all receives are posted at the start of a batch, and sends are awaited at its end.

torch's 1F1B posts a receive when it needs the micro-batch and waits for each send. That suits NCCL, which queues the
messages between two ranks in one stream. gloo transfers data only when the receive is posted, so a rank would wait
while its neighbor computes. Forwards and backwards run in torch's order, so the same number of activations is alive.

Imported only when a schedule is built: torch's schedules take long to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import Schedule1F1B


class EarlyReceive1F1B(Schedule1F1B):
    """torch's 1F1B with early receives. The last stage's output is the weighted loss, since `scale_grads` is off."""

    def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, *_: object, **__: object) -> None:
        stage, count = self._stage, self._n_microbatches
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
        inputs = [_start(stage.get_fwd_recv_ops(micro)) for micro in range(count)]
        gradients = [_start(stage.get_bwd_recv_ops(micro)) for micro in range(count)]
        losses: dict[int, object] = {}
        sent: list[dist.Work] = []

        def forward(micro: int) -> None:
            _wait(inputs[micro])
            output = stage.forward_one_chunk(micro, arg_mbs[micro], kwarg_mbs[micro], save_forward_output=False)
            if stage.is_last:
                losses[micro] = output
            sent.extend(_start(stage.get_fwd_send_ops(micro)))

        def backward(micro: int) -> None:
            _wait(gradients[micro])
            stage.backward_one_chunk(micro, loss=losses.pop(micro, None), last_backward=micro == count - 1)
            sent.extend(_start(stage.get_bwd_send_ops(micro)))

        ahead = min(count, self._num_stages - stage.stage_index)
        for micro in range(ahead):
            forward(micro)
        for micro in range(count):
            backward(micro)
            if micro + ahead < count:
                forward(micro + ahead)
        _wait(sent)


def _start(messages: Sequence[dist.P2POp]) -> list[dist.Work]:
    return [message.op(message.tensor, message.peer, message.group, message.tag) for message in messages]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
