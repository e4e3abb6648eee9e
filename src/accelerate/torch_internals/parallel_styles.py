# SPDX-License-Identifier: Apache-2.0
"""torch's styles of tensor parallelism, with the methods that a style of this package replaces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from . import Internal

PARALLEL_STYLES = Internal(
    name="parallel_styles",
    what="ParallelStyle._apply; _prepare_input_fn, _prepare_output_fn and _replicate_module_fn of its subclasses",
    versions="2.11 to 2.14",
    upstream="not reported; the documentation names apply as the contract of a style, and the method is _apply",
    needed_by="tp_size: layers that share messages, streams that are sharded along the sequence",
    without="layers of these styles are not split",
    test="tests/torch_internals/test_parallel_styles.py::test_a_style_splits_its_module",
)


class SplitStyle(ParallelStyle):
    """A style that splits a module by its own `split`."""

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module in its layout; here it stays as it is."""
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not PARALLEL_STYLES.is_on:
            return module
        return self.split(module, device_mesh)


class ColumnStyle(ColwiseParallel):
    """torch's style; a subclass may split modules otherwise. Inputs may be sharded along the sequence."""

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module, split as torch does."""
        return super()._apply(module, mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not PARALLEL_STYLES.is_on:
            return module
        return self.split(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(
        layouts: Sequence[Placement],
        desired: Sequence[Placement],
        module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        mesh: DeviceMesh,
    ) -> object:
        if isinstance(inputs[0], DTensor):
            return inputs[0].redistribute(placements=desired)
        return ColwiseParallel._prepare_input_fn(layouts, desired, module, inputs, mesh)


class RowStyle(RowwiseParallel):
    """torch's style; a subclass may split modules otherwise."""

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The module, split as torch does."""
        return super()._apply(module, mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not PARALLEL_STYLES.is_on:
            return module
        return self.split(module, device_mesh)


class NormStyle(SequenceParallel):
    """torch's style for norms, with methods that a subclass replaces."""

    def replicate(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Make replicated DTensors of the parameters."""
        raise NotImplementedError

    def check_input(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Raise an error for an input that the style does not take."""

    def change_output(self, output: object) -> object:
        """What the module returns."""
        return output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not PARALLEL_STYLES.is_on:
            return module
        return super()._apply(module, device_mesh)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self.replicate(module, device_mesh)

    def _prepare_input_fn(  # type: ignore[override]
        self,
        sharding: Sequence[Placement],
        module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        mesh: DeviceMesh,
    ) -> object:
        self.check_input(module, inputs[0])
        return SequenceParallel._prepare_input_fn(sharding, module, inputs, mesh)

    def _prepare_output_fn(  # type: ignore[override]
        self, use_local_output: bool, module: nn.Module, outputs: object, mesh: DeviceMesh
    ) -> object:
        changed = self.change_output(outputs)
        if changed is not outputs:
            return changed
        return SequenceParallel._prepare_output_fn(use_local_output, module, outputs, mesh)
