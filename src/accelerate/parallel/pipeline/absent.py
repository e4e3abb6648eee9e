# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not on this stage: parameters of other stages, and outputs of units that other stages compute.

A stage runs the model's own forward from its beginning, so that code before the stage's units runs on tensors without
content. Operations on them compute shapes and dtypes only, and give tensors of the same kind. As soon as a unit of the
stage, or a tensor with content, would depend on one of them, an error names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from ...core.errors import PrepareError


class AbsentError(PrepareError):
    """A stage needs a tensor that it does not have. The text says which; the caller adds what to do about it."""


@dataclass
class Guard:
    """Which stage runs (`where`), and whether one of its units computes: then nothing absent may be used."""

    where: str = "a stage"
    computing: bool = False


@dataclass(frozen=True)
class Origin:
    """What an absent tensor stands for (`what`), and which stage has its content (`home`)."""

    what: str
    home: str
    guard: Guard

    def fail(self) -> NoReturn:
        raise AbsentError(f"{self.guard.where} uses {self.what}, which only {self.home} has.")


_aten = torch.ops.aten
_READING = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default})
# Their result has nothing of the content of their first argument.
_FACTORIES = frozenset(
    getattr(_aten, name).default
    for name in (
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
        "new_full", "new_empty",
    )
)  # fmt: skip


class Absent(torch.Tensor):
    """A tensor of a shape, dtype and device without content. No operation on it gives numbers."""

    meta: torch.Tensor
    origin: Origin

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, origin: Origin) -> Absent:
        made: Absent = torch.Tensor._make_wrapper_subclass(
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
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: Origin) -> Absent:
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, origin)

    # Methods of tensors go straight to the dispatcher.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        absent = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Absent)]
        origin, device = absent[0].origin, kwargs.get("device") or absent[0].device
        if func in _FACTORIES:
            return func(*tree_map_only(Absent, _without_content, args), **kwargs)
        if origin.guard.computing or func in _READING or _fills_content(func, args, kwargs):
            origin.fail()
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            found = func(*tree_map_only(torch.Tensor, _meta, args), **tree_map_only(torch.Tensor, _meta, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error):
                # An operation whose result depends on the content.
                origin.fail()
            raise
        known = {id(leaf.meta): leaf for leaf in absent}

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            return known[id(tensor)] if id(tensor) in known else cls(tensor, torch.device(device), origin)

        return tree_map_only(torch.Tensor, wrap, found)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype}: {self.origin.what}, which {self.origin.home} has)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Absent.of, (tuple(self.shape), self.dtype, self.device, self.origin)

    def _read(self, *_: Any, **__: Any) -> NoReturn:
        self.origin.fail()

    item = tolist = numpy = data_ptr = untyped_storage = storage = __format__ = _read
    __array__ = __dlpack__ = _read
    __bool__ = __int__ = __float__ = __index__ = __complex__ = __contains__ = _read


def first_absent(values: Any) -> Absent | None:
    """The first absent tensor in nested lists, tuples and mappings."""
    return next((leaf for leaf in values if isinstance(leaf, Absent)), None)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.meta if isinstance(tensor, Absent) else tensor.to("meta")


def _without_content(tensor: Absent) -> torch.Tensor:
    """A tensor of one element's memory, for operations that take its shape alone."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _fills_content(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation writes to a tensor that has content, or turns the shape of its argument."""
    if not func._schema.is_mutable:
        return False
    if torch.Tag.inplace_view in func.tags:
        return True
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[place] if place < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, Absent) for leaf in tree_iter(written)):
            return True
    return False
