# SPDX-License-Identifier: Apache-2.0
"""How one module is split over tensor-parallel ranks: torch's styles, with what training a model needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ...core.errors import PrepareError
from ...core.modules import direct_parameters
from ...torch_internals.parallel_styles import ColumnStyle, NormStyle, RowStyle, SplitStyle
from .layers import (
    SEQUENCE,
    ColumnLinear,
    RowEmbedding,
    RowLinear,
    ShardedLoss,
    SharedInput,
    as_split,
)


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Make DTensors of parameters that are equal on all ranks, without a message."""
    for name, placement in placements.items():
        parameter = getattr(module, name, None)
        if parameter is not None:
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(shard, requires_grad=parameter.requires_grad)
            )


class Colwise(ColumnStyle):
    """Each rank computes some of the outputs. Siblings that read the same tensor share its messages.

    With a `loss`, the logits of a language model.
    """

    def __init__(self, output: Placement | None = None, loss: ShardedLoss | None = None) -> None:
        super().__init__(output_layouts=output)
        self.shared: SharedInput = SharedInput(1)
        self.loss = loss

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module in its layout."""
        # Layers with another forward (quantized, fp8) keep it.
        if type(module) is not nn.Linear:
            return super().split(module, mesh)
        _distribute(module, mesh, weight=Shard(0), bias=Shard(0))
        gathered = self.output_layouts[0].is_replicate()
        return as_split(
            module,
            ColumnLinear,
            ranks=mesh,
            shared=self.shared,
            gathered=gathered,
            loss=self.loss,
        )


class Rowwise(RowStyle):
    """Each rank reads some of the inputs; outputs are summed, and with `along_sequence` sharded."""

    def __init__(self, full_input: bool = False, along_sequence: bool = False) -> None:
        super().__init__(
            input_layouts=Replicate() if full_input else Shard(-1),
            output_layouts=Shard(SEQUENCE) if along_sequence else Replicate(),
            use_local_output=not along_sequence,
        )
        self.full_input = full_input
        self.along_sequence = along_sequence

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module in its layout."""
        if type(module) is nn.Embedding:
            _distribute(module, mesh, weight=Shard(0))
            return as_split(module, RowEmbedding, ranks=mesh)
        if type(module) is nn.Linear and not self.full_input:
            _distribute(module, mesh, weight=Shard(1), bias=Replicate())
            return as_split(module, RowLinear, ranks=mesh, along_sequence=self.along_sequence)
        split = super().split(module, mesh)
        if self.use_local_output:
            split.register_forward_hook(_copied)
        return split


class SequenceNorm(NormStyle):
    """A norm of a stream that is sharded along the sequence. Its parameters are replicated.

    With `gather` its output is gathered.
    """

    def __init__(
        self, dimension: int = SEQUENCE, use_local_output: bool = False, gather: bool = False
    ) -> None:
        super().__init__(sequence_dim=dimension, use_local_output=use_local_output)
        self.gather = gather
        self.along_sequence = not use_local_output

    def replicate(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Make replicated DTensors of the parameters."""
        _distribute(module, mesh, **dict.fromkeys(direct_parameters(module), Replicate()))

    def check_input(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Raise PrepareError for an input that is not sharded along the sequence."""
        if self.along_sequence and not isinstance(tensor, DTensor):
            raise PrepareError(
                f"{type(module).__name__} should compute along the sequence, but its input is not "
                "sharded: it is not in the residual stream. Use a plan without it."
            )

    def change_output(self, output: object) -> object:
        """The gathered output, with `gather`."""
        if self.gather:
            return _gathered(output)
        return output


class PerHead(SequenceNorm):
    """A norm of each head (q_norm, k_norm): a rank has its own heads, and the weight's gradient is over all of them.

    Heads are sharded as tokens would be, which is the same for a norm of the last dimension.
    """

    def __init__(self) -> None:
        super().__init__(dimension=0, use_local_output=True)


class Unsplit(SplitStyle):
    """A module that is not split."""


class SequenceEntry(SplitStyle):
    """Shards the residual stream along the sequence before this module; with `gather` it is gathered after it."""

    def __init__(self, gather: bool = False) -> None:
        self.gather = gather

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module in its layout."""

        def shard(
            inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if args:
                return (_shard(args[0], mesh), *args[1:]), kwargs
            name = next(key for key, value in kwargs.items() if isinstance(value, torch.Tensor))
            return args, {**kwargs, name: _shard(kwargs[name], mesh)}

        # Before the hooks of other layouts, which read the inputs.
        module.register_forward_pre_hook(shard, with_kwargs=True, prepend=True)
        if self.gather:
            module.register_forward_hook(lambda inner, args, output: _mapped(output, _gathered))
        return module


class SequenceExit(SplitStyle):
    """Gathers the residual stream after this module."""

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module in its layout."""
        module.register_forward_hook(lambda inner, args, output: _mapped(output, _gathered))
        return module


def _shard(stream: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if isinstance(stream, DTensor):
        return stream
    replicated = DTensor.from_local(stream, mesh, (Replicate(),), run_check=False)
    return replicated.redistribute(placements=(Shard(SEQUENCE),))


def _gathered(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=(Replicate(),)).to_local()


def _copied(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    # What torch's style returns is a view that may not be changed in place.
    return output.clone()


def _mapped(output: object, change: Callable[[object], object]) -> object:
    if isinstance(output, tuple):
        return tuple(change(value) for value in output)
    return change(output)
