# SPDX-License-Identifier: Apache-2.0
"""Tensors without values, and a mode that is told of every operation: what `accelerate plan` traces a step with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..core.errors import ConfigurationError
from ..core.trees import leaves
from . import Internal

TRACING = Internal(
    name="tracing",
    what="FakeTensorMode and its errors, TorchDispatchMode, and the shapes and FLOPs of some kernels",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="accelerate plan; accelerate.planning.placement.place with a batch",
    without="a ConfigurationError: a step cannot be traced",
    test="tests/torch_internals/test_tracing.py::test_a_step_on_tensors_without_values",
)

aten = torch.ops.aten

# Errors of operations whose results depend on values, which fake tensors do not have.
NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
# A block in which tensors have values inside of a fake mode.
with_values = fake_tensor.unset_fake_temporarily
FakeTensor = fake_tensor.FakeTensor


def fake_mode() -> contextlib.AbstractContextManager[Any]:
    """A block in which new tensors have shapes and no values."""
    if not TRACING.is_on:
        raise ConfigurationError("ACCELERATE_TORCH_INTERNALS_OFF=tracing: a step cannot be traced")
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, fake_tensor.FakeTensor)


class OperationMode(TorchDispatchMode):
    """A mode in which `ran` is called after each operation on plain tensors.

    Args:
        fake: it is inside a fake mode; an operation on tensors that have values then stays real, and is not told.
    """

    def __init__(self, fake: bool = False) -> None:
        super().__init__()
        self.fake = fake

    def ran(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Take note of an operation (a torch.ops overload), its arguments, and the tensors among them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            # The operations on local tensors come here next.
            return NotImplemented
        kwargs = kwargs or {}
        inputs = list(leaves((args, kwargs)))
        has_fake = any(map(is_fake, inputs))
        if self.fake and inputs and not has_fake:
            # A tensor that was there before, as the ranks of a device mesh: its values are known.
            with with_values():
                return func(*args, **kwargs)
        shape = _SHAPES.get(func.overloadpacket) if has_fake else None
        out = (shape or func)(*args, **kwargs)
        self.ran(func, args, kwargs, out, inputs, list(leaves(out)))
        return out


def flops(
    operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
) -> int | None:
    """The floating point operations of a matrix product or an attention; None for another operation."""
    packet = operation.overloadpacket
    if "scaled_dot_product" in packet.__name__:
        # torch 2.13 has no formula for attention's kernels on the CPU; those elsewhere have the same shapes.
        packet = getattr(aten, packet.__name__.replace("_for_cpu", ""))
        # torch 2.11 refuses heads of queries that share keys and values. The work is that of keys for each head.
        heads = max(tensor.shape[1] for tensor in args[:3])
        args = tuple(
            (arg.shape[0], heads, *arg.shape[2:]) if getattr(arg, "ndim", 0) == 4 else arg
            for arg in args
        )
    formula: Callable[..., int] | None = flop_registry.get(packet) or _FLOPS.get(packet)
    if formula is None:
        return None
    return int(formula(*args, **kwargs, out_val=out))


def ranks_of_group(name: str) -> int:
    """The number of ranks of the process group that a functional collective has as an argument."""
    return int(_resolve_process_group(name).size())  # type: ignore[arg-type]


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of `aten._grouped_mm`, which torch 2.13 traces for bfloat16 only."""
    dtype = out_dtype or mat_a.dtype
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        assert offs is not None
        return mat_a.new_empty((offs.shape[0], mat_a.shape[0], mat_b.shape[1]), dtype=dtype)
    shape = (
        mat_a.shape[0] if mat_a.dim() == 3 and mat_b.dim() == 3 else None,
        mat_a.shape[-2],
        mat_b.shape[-1],
    )
    return mat_a.new_empty([size for size in shape if size is not None], dtype=dtype)


_SHAPES: dict[Any, Callable[..., torch.Tensor]] = {
    aten._grouped_mm: _grouped_mm,
    # It returns the tensor itself; on fake tensors torch 2.13 returns another one.
    torch.ops._c10d_functional.wait_tensor: lambda tensor: tensor,
}
# Each row of a group is multiplied with the matrix of its group once.
_FLOPS: dict[Any, Any] = {
    aten._grouped_mm: lambda mat_a, mat_b, *_, **__: 2 * math.prod(mat_a.shape) * mat_b.shape[-1]
}
