# SPDX-License-Identifier: Apache-2.0
"""What split linear layers and embeddings compute: on each rank's own part, in plain tensors, with messages between.

DTensor would do the same operation by operation, and ask at each what becomes of its layout: several times the time of
a small layer. The parameters are DTensors all the same, for whoever shards, clips, saves or loads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from . import loss as tensor_loss

# What a residual stream is sharded along: (batch, sequence, features).
SEQUENCE = 1


def _sum(part: torch.Tensor, mesh: DeviceMesh, own: bool) -> torch.Tensor:
    """The sum over the ranks; in place where the tensor is nobody else's (`own`)."""
    if torch.compiler.is_compiling():
        # The functional form, which can be taken into a graph.
        collectives = torch.ops._c10d_functional
        total: torch.Tensor = collectives.all_reduce(part.contiguous(), "sum", mesh.get_group().group_name)
        return collectives.wait_tensor(total)
    total = part.contiguous() if own else part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


class SumForward(torch.autograd.Function):
    """The sum over the ranks; the gradient, the same on every rank, is that of each summand."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _sum(part, mesh, own=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class SumBackward(torch.autograd.Function):
    """What is the same on every rank, on its way into a split: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # It comes out of the linear layers that read this.
        return _sum(gradients[0], ctx.mesh, own=True), None


class GatherFeatures(torch.autograd.Function):
    """Each rank's features put side by side; the gradient, the same on every rank, is cut again.

    A new tensor: DTensor would give a view, which FSDP must not see, since a change in place would lose its hooks.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        ranks, collectives = mesh.size(), torch.ops._c10d_functional
        parts = collectives.all_gather_into_tensor(part.contiguous(), ranks, mesh.get_group().group_name)
        return torch.cat(collectives.wait_tensor(parts).chunk(ranks), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].chunk(ctx.mesh.size(), -1)[ctx.mesh.get_local_rank()], None


class SharedInput:
    """Layers that read one tensor, in turn: it is made whole once, and its gradient is summed over the ranks once."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._given: torch.Tensor | None = None
        self._whole: torch.Tensor | None = None
        self._left = 0

    def take(self, given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if given is not self._given or self._whole is None:
            self._given, self._whole, self._left = given, _whole(given, mesh), self.layers
        whole = self._whole
        self._left -= 1
        if self._left == 0:
            # Nothing outlives the forward.
            self._given = self._whole = None
        return whole


def _whole(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if not isinstance(given, DTensor):
        return SumBackward.apply(given, mesh)
    return given.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))


class LocalPart(torch.autograd.Function):
    """What a parameter's `to_local` gives, at a third of its cost: a gradient lies as its parameter does."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.layout = parameter._spec
        part = parameter._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _like(gradients[0], ctx.layout)


def _like(part: torch.Tensor, layout: Any) -> DTensor:
    """A part of what lies by `layout` as the DTensor that it is a part of."""
    # Without its initialiser, which does nothing, at length.
    return DTensor.__new__(DTensor, part, layout, requires_grad=False)


def local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a parameter, through which a gradient comes back to it."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local()
    return LocalPart.apply(parameter)


class ColumnLinear(nn.Linear):
    """A linear layer of which each rank has some of the outputs; `gathered`, all of them are put together.

    With `as_dtensor` (logits that a loss is taken of) they stay split, but where no gradient is taken: there they are
    to be read.
    """

    plain_class = nn.Linear
    ranks: DeviceMesh
    shared: SharedInput
    gathered: bool
    as_dtensor: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        whole = self.shared.take(input, self.ranks)
        part = F.linear(whole, local(self.weight), local(self.bias))  # type: ignore[arg-type]
        if self.gathered or (self.as_dtensor and not torch.is_grad_enabled()):
            return GatherFeatures.apply(part, self.ranks)
        if self.as_dtensor:
            if not torch.compiler.is_compiling():
                tensor_loss.ensure()
            return DTensor.from_local(part, self.ranks, (Shard(part.ndim - 1),), run_check=False)
        return part


class RowLinear(nn.Linear):
    """A linear layer of which each rank has some of the inputs. `along_sequence`: each keeps its part of the sum."""

    plain_class = nn.Linear
    ranks: DeviceMesh
    along_sequence: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, DTensor):
            input = input.redistribute(placements=(Shard(input.ndim - 1),)).to_local()
        part = F.linear(input, local(self.weight))  # type: ignore[arg-type]
        if self.along_sequence:
            total: torch.Tensor = DTensor.from_local(part, self.ranks, (Partial(),), run_check=False)
            total = total.redistribute(placements=(Shard(SEQUENCE),))  # type: ignore[attr-defined]
            return total if self.bias is None else total + self.bias
        total = SumForward.apply(part, self.ranks)
        bias = local(self.bias)
        return total if bias is None else total + bias.to(total.dtype)


class RowEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows: it gives zeros for the others', and the ranks are summed."""

    plain_class = nn.Embedding
    ranks: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: Any = local(self.weight)
        first = self.ranks.get_local_rank() * rows.shape[0]
        own = input - first
        others = (own < 0) | (own >= rows.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows.shape[0]:
            padding = None
        found = F.embedding(
            own.masked_fill(others, 0), rows, padding, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        return SumForward.apply(found.masked_fill(others.unsqueeze(-1), 0), self.ranks)


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> nn.Module:
    """The same module, computing as `kind`. A class, and no forward of each module's own: equal blocks stay equal to
    torch.compile, which compiles them once."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
