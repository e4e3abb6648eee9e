# SPDX-License-Identifier: Apache-2.0
"""Remote tensors: parameters of other stages, and outputs of units that other stages compute, without their data.

A stage runs the model's own forward from its beginning, so code before the stage's units runs on remote tensors.
Operations on them compute shapes and dtypes only and return remote tensors. An error names the tensor as soon as a
unit of this stage, or a tensor with data, would depend on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter, tree_map_only

from ...core.errors import PrepareError


class RemoteTensorError(PrepareError):
    """A stage needs a tensor that another stage has. The message names it; the caller adds the remedy."""


@dataclass
class StageContext:
    """Which stage is running, and whether one of its units is computing, which must not use remote tensors."""

    where: str = "a stage"
    computing: bool = False


@dataclass(frozen=True)
class Origin:
    """What a remote tensor stands for (`what`), and which stage has its data (`home`)."""

    what: str
    home: str
    context: StageContext

    def fail(self) -> NoReturn:
        """Raise RemoteTensorError, which names the tensor and the stage that has its data."""
        raise RemoteTensorError(f"{self.context.where} uses {self.what}, which only {self.home} has.")


_aten = torch.ops.aten
_READING = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default})
# Their result does not depend on the data of their first argument.
_FACTORIES = frozenset(
    getattr(_aten, name).default
    for name in (
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
        "new_full", "new_empty",
    )
)  # fmt: skip


class RemoteTensor(torch.Tensor):
    """A tensor with a shape, a dtype and a device, and no data."""

    meta: torch.Tensor
    origin: Origin

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, origin: Origin) -> RemoteTensor:
        """Create a remote tensor with the metadata of a meta tensor."""
        made: RemoteTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
        )
        made.meta, made.origin = meta, origin
        return made

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: Origin) -> RemoteTensor:
        """Create a remote tensor of a shape and a dtype."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, origin)

    # Tensor methods go straight to the dispatcher.
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        remote = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, RemoteTensor)]
        origin, device = remote[0].origin, kwargs.get("device") or remote[0].device
        if func in _FACTORIES:
            # Of the same shape, with the memory of one element.
            given = tree_map_only(
                RemoteTensor, lambda x: torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape), args
            )
            return func(*given, **kwargs)
        if origin.context.computing or func in _READING or _writes_data(func, args, kwargs):
            origin.fail()
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            found = func(*tree_map_only(torch.Tensor, _meta, args), **tree_map_only(torch.Tensor, _meta, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error):
                # The result depends on the data.
                origin.fail()
            raise
        known = {id(leaf.meta): leaf for leaf in remote}

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            return known[id(tensor)] if id(tensor) in known else cls(tensor, torch.device(device), origin)

        return tree_map_only(torch.Tensor, wrap, found)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"RemoteTensor({tuple(self.shape)}, {self.dtype}: {self.origin.what}, which {self.origin.home} has)"

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteTensor:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return RemoteTensor.of, (tuple(self.shape), self.dtype, self.device, self.origin)

    def _read(self, *_: object, **__: object) -> NoReturn:
        self.origin.fail()


# What reads the data of a tensor, or the storage that it does not have.
for _name in (
    "item", "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "__format__", "__array__", "__dlpack__",
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
):  # fmt: skip
    setattr(RemoteTensor, _name, RemoteTensor._read)


def first_remote(leaves: Iterable[object]) -> RemoteTensor | None:
    """The first remote tensor among leaves."""
    return next((leaf for leaf in leaves if isinstance(leaf, RemoteTensor)), None)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.meta if isinstance(tensor, RemoteTensor) else tensor.to("meta")


def _writes_data(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an operation writes to a tensor that has data, or changes the shape of its argument in place."""
    if not func._schema.is_mutable:
        return False
    if torch.Tag.inplace_view in func.tags:
        return True
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[place] if place < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, RemoteTensor) for leaf in tree_iter(written)):
            return True
    return False
