# SPDX-License-Identifier: Apache-2.0
"""What a module holds instead of an offloaded weight while that is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.trees import leaves, map_leaves

if TYPE_CHECKING:
    from .align import AlignDevicesHook

_WITHOUT_DATA = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class OffloadedParameter(nn.Parameter):
    """A parameter on the meta device. An operator that gets it reads the values from where its hook keeps them.

    The forward of a module finds its weights in place and never meets one. Others do: the forward of a parent that
    uses a weight without calling its module, such as those in an `nn.ParameterList` or the output layer of
    `nn.MultiheadAttention`. Torch computes some matrix products with a weight on the meta device from memory that
    nobody has filled, without an error.
    """

    __slots__ = ("hook", "name")
    hook: AlignDevicesHook
    name: str
    # Copied by `__reduce_ex__` as it is pickled, and not by the method of `nn.Parameter`, which loses the hook.
    __deepcopy__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with the values, on the device of its other arguments."""
        if func in _WITHOUT_DATA:
            return _on_meta(args[0])
        operands = [args, kwargs or {}]
        others = (value for value in leaves(operands) if not isinstance(value, cls) and value.dim())
        device = next((value.device for value in others), None)
        args, kwargs = map_leaves(
            lambda value: value._read(device), operands, lambda value: isinstance(value, cls)
        )
        return func(*args, **kwargs)

    def _read(self, device: torch.device | None) -> torch.Tensor:
        assert self.hook.weights_map is not None
        return self.hook.weights_map[self.name].to(device or self.hook.execution_device, self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self.hook, self.name, self.requires_grad, dict(vars(self)))
        return _empty, (tuple(self.shape), self.stride(), self.dtype), state

    def __setstate__(self, state: Any) -> None:
        self.hook, self.name, requires_grad, attributes = state
        self.requires_grad_(requires_grad)
        vars(self).update(attributes)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> OffloadedParameter:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").as_subclass(
        OffloadedParameter
    )


def placeholder(parameter: torch.Tensor, hook: AlignDevicesHook, name: str) -> torch.Tensor:
    """What stands for `parameter`, the weight `name` of the hook; another kind of tensor stands for itself."""
    if type(parameter) not in (nn.Parameter, OffloadedParameter):
        return parameter
    empty = _empty(tuple(parameter.shape), parameter.stride(), parameter.dtype)
    empty.__setstate__((hook, name, parameter.requires_grad, vars(parameter)))
    return empty
