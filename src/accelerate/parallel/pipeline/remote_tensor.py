# SPDX-License-Identifier: Apache-2.0
"""Remote tensors: outputs and parameters of other stages, of which this rank knows shape and dtype only.

A stage runs the model's own forward from its beginning, so code before the stage's units runs on remote tensors. torch
functions on them compute shapes on the meta device and return remote tensors. Whatever needs values is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from ...core import trees
from ...core.errors import PrepareError


class RemoteTensorError(PrepareError):
    """A stage needs values that another stage has. The message names them."""


# Functions that read values, or the memory that a remote tensor does not have.
_READING = frozenset({
    "item", "tolist", "numpy", "data_ptr", "untyped_storage", "equal", "is_nonzero", "__format__", "__array__",
    "__dlpack__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
})  # fmt: skip


class RemoteTensor(torch.Tensor):
    """A tensor with a shape, a dtype and a device, and no values.

    Fields:
        plain: a tensor with the same shape, dtype and device, which has the memory of one element.
        origin: what it stands for, for errors.
    """

    plain: torch.Tensor
    origin: str

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: str
    ) -> RemoteTensor:
        """Create a remote tensor."""
        plain = torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
        if type(plain) is not torch.Tensor:
            # In a trace: a fake tensor has no values either, and cannot be of another class.
            return cast(RemoteTensor, plain)
        remote = plain.as_subclass(cls)
        remote.plain, remote.origin = plain, origin
        return remote

    def fail(self) -> RemoteTensorError:
        """Return the error for a use of the values."""
        return RemoteTensorError(f"This stage uses {self.origin}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function on meta tensors."""
        kwargs = kwargs or {}
        name = func.__name__
        first = first_remote((*args, kwargs))
        assert first is not None
        if name == "__repr__":
            return f"RemoteTensor({tuple(first.plain.shape)}, {first.plain.dtype}: {first.origin})"
        if name in _READING or _writes_values(name, args, kwargs):
            raise first.fail()
        if name in ("detach", "contiguous", "requires_grad_"):
            return first
        if name in ("to", "cpu", "cuda"):
            return _moved(func, args, kwargs)
        if name.endswith("_like") or name.startswith("new_"):
            # Of these the result depends on shape, dtype and device only.
            return func(*_map(lambda tensor: getattr(tensor, "plain", tensor), args), **kwargs)
        if name == "__get__":
            result = func(*_map(lambda tensor: getattr(tensor, "plain", tensor), args))
        else:
            meta = torch.device("meta")
            moved = [meta if isinstance(value, torch.device) else value for value in args]
            options = {
                key: meta if key == "device" and value is not None else value
                for key, value in kwargs.items()
            }
            try:
                result = func(*_map(_on_meta, moved), **_map(_on_meta, options))
            except (NotImplementedError, RuntimeError) as error:
                raise first.fail() from error
        return _map(
            lambda tensor: cls.of(tensor.shape, tensor.dtype, first.plain.device, first.origin),
            result,
        )


def first_remote(data: object) -> RemoteTensor | None:
    """The first remote tensor in nested data."""
    return next((leaf for leaf in trees.leaves(data) if isinstance(leaf, RemoteTensor)), None)


def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The result of `to`, `cpu` or `cuda`: a remote tensor of the device and dtype that one element gets."""
    source, *targets = _map(lambda tensor: getattr(tensor, "plain", tensor), list(args))
    options = _map(lambda tensor: getattr(tensor, "plain", tensor), dict(kwargs))
    remote = args[0]
    if not isinstance(remote, RemoteTensor):
        result: torch.Tensor = func(source, *targets, **options)
        return result
    options.pop("memory_format", None)
    element = func(source.new_zeros(()), *targets, **options)
    return RemoteTensor.of(remote.shape, element.dtype, element.device, remote.origin)


def _map(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    # torch's result tuples (torch.return_types) cannot be built from values one by one.
    if isinstance(data, tuple) and type(data) is not tuple and not isinstance(data, torch.Size):
        data = tuple(data)
    if isinstance(data, torch.Size):
        return data
    return trees.map_leaves(function, data)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, RemoteTensor):
        return torch.empty(tensor.plain.shape, dtype=tensor.plain.dtype, device="meta")
    return tensor.detach().to("meta")


def _writes_values(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to a tensor that has values."""
    in_place = (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in ("__invert__",)
    )
    targets = [*(args[:1] if in_place or name == "__setitem__" else ()), kwargs.get("out")]
    return any(
        isinstance(target, torch.Tensor) and not isinstance(target, RemoteTensor)
        for target in targets
    )
