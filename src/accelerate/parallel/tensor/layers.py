# SPDX-License-Identifier: Apache-2.0
"""Forwards of split linear layers, embeddings and losses: on local shards as plain tensors, with collectives between.

DTensor would dispatch each operation and propagate its sharding, which takes several times as long as a small layer.
The parameters are DTensors all the same, for whatever shards, clips, saves or loads them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from ...collectives.transport import all_gather_single
from ...core import trees

Layer = TypeVar("Layer", bound=nn.Module)

# The dimension of a residual stream (batch, sequence, features) that is sharded.
SEQUENCE = 1


def _summed(partial: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    dist.all_reduce(partial, group=mesh.get_group())
    return partial


class _OnRanks(FunctionCtx):
    """The context of a function with a collective over the ranks of a mesh."""

    mesh: DeviceMesh


class SumForward(torch.autograd.Function):
    """All-reduce in the forward; the gradient, equal on all ranks, is passed on."""

    @staticmethod
    def forward(ctx: _OnRanks, partial: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return the sum of `partial` over the ranks."""
        ctx.mesh = mesh
        return _summed(partial.clone(memory_format=torch.contiguous_format), mesh)

    @staticmethod
    def backward(ctx: _OnRanks, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient unchanged."""
        # The gradient of this gradient is a sum again.
        return SumBackward.apply(gradients[0], ctx.mesh) if torch.is_grad_enabled() else gradients[
            0
        ], None


class SumBackward(torch.autograd.Function):
    """Identity in the forward; the gradient is all-reduced."""

    @staticmethod
    def forward(ctx: _OnRanks, replicated: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return a view of the tensor."""
        ctx.mesh = mesh
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: _OnRanks, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the sum of the gradient over the ranks."""
        if torch.is_grad_enabled():
            return SumForward.apply(gradients[0], ctx.mesh), None
        # The linear layers that read the tensor have made this gradient: nothing else uses its memory. torch.compile
        # does not trace a sum in place of one.
        if torch.compiler.is_compiling():
            gradient = gradients[0].clone()
        else:
            gradient = gradients[0]
        return _summed(gradient.contiguous(), ctx.mesh), None


class GatherFeatures(torch.autograd.Function):
    """All-gather of features; the gradient, equal on all ranks, is split.

    It returns a new tensor. DTensor would return a view, and a change of it in place would lose FSDP's hooks.
    """

    @staticmethod
    def forward(ctx: _OnRanks, shard: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return the features of all ranks, concatenated."""
        ctx.mesh = mesh
        shards = shard.new_empty((mesh.size() * shard.shape[0], *shard.shape[1:]))
        all_gather_single(shards, shard.contiguous(), group=mesh.get_group())
        return torch.cat(shards.chunk(mesh.size()), -1)

    @staticmethod
    def backward(ctx: _OnRanks, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return this rank's slice of the gradient."""
        if torch.is_grad_enabled():
            return SplitFeatures.apply(gradients[0], ctx.mesh), None
        return gradients[0].chunk(ctx.mesh.size(), -1)[ctx.mesh.get_local_rank()], None


class SplitFeatures(torch.autograd.Function):
    """This rank's features of a tensor that all ranks have; the gradient is gathered."""

    @staticmethod
    def forward(ctx: _OnRanks, gathered: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return this rank's slice."""
        ctx.mesh = mesh
        return gathered.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone()

    @staticmethod
    def backward(ctx: _OnRanks, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradients of all ranks, concatenated."""
        return GatherFeatures.apply(gradients[0], ctx.mesh), None


class SharedInput:
    """The input of several layers: it is gathered once, and its gradient is all-reduced once."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._input: torch.Tensor | None = None
        self._replicated: torch.Tensor | None = None
        self._left = 0

    def take(self, input: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return the input replicated on all ranks. The last layer that takes it releases it."""
        replicated = self._replicated
        if input is not self._input or replicated is None:
            if isinstance(input, DTensor):
                replicated = input.redistribute(placements=(Replicate(),)).to_local(
                    grad_placements=(Partial(),)
                )
            else:
                replicated = SumBackward.apply(input, mesh)
            self._input, self._replicated, self._left = input, replicated, self.layers
        self._left -= 1
        if self._left == 0:
            # Nothing outlives the forward.
            self._input = self._replicated = None
        return replicated


def local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's shard of a parameter, differentiable."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter


class ColumnLinear(nn.Linear):
    """A linear layer of which each rank computes some of the outputs; `gathered`: all ranks return all of them.

    `loss`, of the layer that computes the logits: while it is computed, gathered outputs stay sharded.
    """

    ranks: DeviceMesh
    shared: SharedInput
    gathered: bool
    loss: ShardedLoss | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute this rank's output features, and gather them if the layer is set to."""
        replicated = self.shared.take(input, self.ranks)
        shard = F.linear(replicated, local(self.weight), local(self.bias))  # type: ignore[arg-type]
        if self.loss is not None and self.loss.is_computed and torch.is_grad_enabled():
            return DTensor.from_local(shard, self.ranks, (Shard(shard.ndim - 1),), run_check=False)
        if self.gathered:
            gathered: torch.Tensor = GatherFeatures.apply(shard, self.ranks)
            return gathered
        return shard


class RowLinear(nn.Linear):
    """A linear layer of which each rank reads some of the inputs. `along_sequence`: the sum is sharded over tokens."""

    ranks: DeviceMesh
    along_sequence: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute a partial product of this rank's input features, and sum it over the ranks."""
        if isinstance(input, DTensor):
            input = input.redistribute(placements=(Shard(input.ndim - 1),)).to_local()
        partial = F.linear(input, local(self.weight))  # type: ignore[arg-type]
        if self.along_sequence:
            total: torch.Tensor = DTensor.from_local(
                partial, self.ranks, (Partial(),), run_check=False
            )
            total = total.redistribute(placements=(Shard(SEQUENCE),))  # type: ignore[attr-defined]
            if self.bias is None:
                return total
            return total + self.bias
        total = SumForward.apply(partial, self.ranks)
        bias = local(self.bias)
        if bias is None:
            return total
        return total + bias.to(total.dtype)


class RowEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows: it returns zeros for the other rows, and ranks are summed."""

    ranks: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up this rank's rows, and sum the results over the ranks."""
        rows: torch.Tensor = local(self.weight)  # type: ignore[assignment]
        first = self.ranks.get_local_rank() * rows.shape[0]
        indices = input - first
        elsewhere = (indices < 0) | (indices >= rows.shape[0])
        if self.padding_idx is None:
            padding = None
        else:
            padding = self.padding_idx - first
        if padding is not None and not 0 <= padding < rows.shape[0]:
            padding = None
        features = F.embedding(
            indices.masked_fill(elsewhere, 0),
            rows,
            padding,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )
        total: torch.Tensor = SumForward.apply(
            features.masked_fill(elsewhere.unsqueeze(-1), 0), self.ranks
        )
        return total


def as_split(module: nn.Module, kind: type[Layer], **attributes: object) -> Layer:
    """A layer of the class `kind` that has the parameters, hooks and attributes of `module`.

    A class, not a forward for each module: torch.compile compiles equal blocks once.
    """
    layer = kind.__new__(kind)
    vars(layer).update(vars(module), **attributes)
    return layer


class ShardedLoss:
    """Says to the output layer of a model that the model is in its forward, so that logits stay sharded.

    Elsewhere (in the stages of a pipeline, in a module that is called by itself) the layer gathers them.
    """

    is_computed: bool = False

    def wrap_forward(self, model: nn.Module) -> None:
        """Compute a loss of the model in shards. What the model returns besides is gathered if it has no loss.

        The backward must be inside `loss_parallel` too.
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
    entries = trees.children(output) or {}
    sharded = {key: value for key, value in entries.items() if isinstance(value, DTensor)}
    losses = {key: value for key, value in sharded.items() if value.ndim == 0}
    if not sharded:
        return output
    for key, value in (losses or sharded).items():
        entries[key] = _gathered(value)
    return trees.with_children(output, entries)


def _gathered(value: DTensor) -> object:
    # A copy: a model under FSDP must not return a view.
    return value.full_tensor().clone()
