# SPDX-License-Identifier: Apache-2.0
"""A loss that the model itself computes on logits that are sharded over the vocabulary, by torch's `loss_parallel`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel


class ShardedLoss:
    """Says to the output layer of a model that the model is in its forward, so that logits stay sharded.

    Elsewhere (in the stages of a pipeline, in a module that is called by itself) the layer gathers them.
    """

    is_computed: bool = False

    def wrap_forward(self, model: nn.Module) -> None:
        """Compute a loss of the model in shards. What the model returns besides is gathered if it has no loss.

        The backward must be inside of `loss_parallel` too.
        """
        forward = model.forward
        wrapped = self._around(getattr(forward, "__func__", forward))
        # A method, which a copy of the model has for itself.
        if hasattr(forward, "__func__"):
            model.forward = types.MethodType(wrapped, model)
        else:
            model.forward = wrapped

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def with_sharded_loss(*args: Any, **kwargs: Any) -> object:
            self.is_computed = True
            try:
                with loss_parallel():
                    return _plain(forward(*args, **kwargs))
            finally:
                self.is_computed = False

        return with_sharded_loss


def _plain(output: Any) -> object:
    """A model's output with the loss as a plain tensor; without a loss also the logits, gathered."""
    if isinstance(output, DTensor):
        return _gathered(output)
    is_mapping = isinstance(output, Mapping)
    if not is_mapping and not isinstance(output, tuple | list):
        return output
    entries = dict(output.items() if is_mapping else enumerate(output))
    sharded = {key: value for key, value in entries.items() if isinstance(value, DTensor)}
    losses = {key: value for key, value in sharded.items() if value.ndim == 0}
    entries.update({key: _gathered(value) for key, value in (losses or sharded).items()})
    if not is_mapping:
        if type(output) in (tuple, list):
            return type(output)(entries.values())
        return type(output)(*entries.values())
    for key in losses or sharded:
        output[key] = entries[key]
    return output


def _gathered(value: DTensor) -> object:
    # A copy: a model under FSDP must not return a view.
    return value.full_tensor().clone()
