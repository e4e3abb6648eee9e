# SPDX-License-Identifier: Apache-2.0
"""1F1B for backends whose messages in one direction do not wait for those in the other.

torch's own 1F1B asks for a micro-batch when it needs it, and waits for each send: right for NCCL, where the messages
of two ranks stand in one queue. gloo sends once the other side has asked, so that a rank would wait while its
neighbour computes. Here all is asked for at the beginning, and sends are waited for at the end. Each rank's forwards
and backwards are in torch's order, so as many activations are alive.

Imported where a schedule is built, since torch's schedules take long to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import Schedule1F1B


def has_independent_directions(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether what two ranks send each other may be asked for in any order."""
    return str(group._get_backend(device).name()) == "gloo"


class EarlyReceive1F1B(Schedule1F1B):
    """torch's order, its receives posted ahead. The loss is in the last stage's output, as `scale_grads` is off."""

    def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, *_: Any, **__: Any) -> None:
        stage, count = self._stage, self._n_microbatches
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
        inputs = [_start(stage.get_fwd_recv_ops(micro)) for micro in range(count)]
        gradients = [_start(stage.get_bwd_recv_ops(micro)) for micro in range(count)]
        losses: dict[int, Any] = {}
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
