# SPDX-License-Identifier: Apache-2.0
"""Remote tensors: outputs and parameters of other stages, of which this rank knows shape and dtype only.

A stage runs the model's own forward from its beginning, so code before the stage's units runs on remote tensors. torch
functions on them compute shapes on the meta device and return remote tensors. Whatever needs values is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from ...core import trees
from ...core.errors import PrepareError
from ...torch_internals.tensor_memory import version_of


class RemoteTensorError(PrepareError):
    """A stage needs values that another stage has. The message names them."""


# Functions that read the memory, which a remote tensor does not have, and do not fail on meta as others do.
_READING = frozenset(
    {"numpy", "data_ptr", "untyped_storage", "__format__", "__array__", "__dlpack__"}
)
_MOVING = frozenset({"to", "cpu", "cuda", "as_tensor", "asarray"})
_MOVED = (torch.Tensor, torch.device)


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
        if name in _READING:
            raise first.fail()
        plain_args, plain_kwargs = trees.map_leaves(_plain, (tuple(args), kwargs))
        if name in _MOVING and args and args[0] is first:
            # Device and dtype are those that one element gets.
            plain_kwargs.pop("memory_format", None)
            element = func(first.plain.new_zeros(()), *plain_args[1:], **plain_kwargs)
            return cls.of(first.plain.shape, element.dtype, element.device, first.origin)
        if name in _MOVING or name.endswith("_like") or name.startswith("new_"):
            # The result depends on shape, dtype and device only.
            return func(*plain_args, **plain_kwargs)
        if name == "__get__":
            result = func(*plain_args)
        else:
            result = _on_meta(func, args, kwargs, first)
        return trees.map_leaves(
            lambda tensor: cls.of(tensor.shape, tensor.dtype, first.plain.device, first.origin),
            result,
        )


def first_remote(data: object) -> RemoteTensor | None:
    """The first remote tensor in nested data."""
    return next((leaf for leaf in trees.leaves(data) if isinstance(leaf, RemoteTensor)), None)


def _plain(tensor: Any) -> Any:
    return getattr(tensor, "plain", tensor)


def _on_meta(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    remote: RemoteTensor,
) -> Any:
    """The result on meta. What reads values, or writes to a tensor that has them, is an error."""
    with_values: list[torch.Tensor] = []

    def on_meta(value: object) -> object:
        if isinstance(value, torch.device):
            return torch.device("meta")
        tensor = _plain(value)
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor is value:
            with_values.append(meta)
        return meta

    meta_args, meta_kwargs = trees.map_leaves(
        on_meta, (tuple(args), dict(kwargs)), lambda value: isinstance(value, _MOVED)
    )
    try:
        result = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise remote.fail() from error
    if any(version_of(tensor) for tensor in with_values):
        raise remote.fail()
    return result
