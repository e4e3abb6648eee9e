# SPDX-License-Identifier: Apache-2.0
"""Nested data: lists, tuples, namedtuples, mappings (ModelOutput-like too) and dataclasses that hold tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

import torch

from .objects import flat_list

Leaf = Callable[[Any], bool]
Origin = TypeVar("Origin")


def is_torch_tensor(tensor: object) -> bool:
    """Whether a value is a tensor."""
    return isinstance(tensor, torch.Tensor)


is_tensor = is_torch_tensor


def is_namedtuple(data: Any) -> bool:
    """Whether `data` is an instance of a `namedtuple` type (a tuple with `_fields` and `_asdict`)."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: Any) -> bool:
    """Whether `data` is an instance of a dataclass, and not a dataclass itself."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The values of `generator` in a container of the type of `obj` (list, tuple or namedtuple)."""
    if is_namedtuple(obj):
        return type(obj)(*list(generator))
    return type(obj)(generator)


def rebuild_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `like` that holds `items`, whatever its constructor looks like."""
    kind = type(like)
    if kind is dict:
        return items
    if isinstance(like, MutableMapping):
        # A copy keeps what the constructor takes besides the items, as those of defaultdict and BatchEncoding do.
        fresh = copy.copy(like)
        try:
            for key, value in items.items():
                fresh[key] = value
        except (TypeError, RuntimeError):
            # A TensorDict refuses tensors of another batch size.
            return kind(items)  # type: ignore[call-arg]
        return fresh
    return kind(items)  # type: ignore[call-arg]


def children(data: Any) -> dict[Any, Any] | None:
    """The values in a container by position, key or field; None for what is not a container."""
    if isinstance(data, (list, tuple)):
        return dict(enumerate(data))
    if isinstance(data, Mapping):
        return dict(data.items())
    if is_dataclass_instance(data):
        return {
            field.name: getattr(data, field.name)
            for field in dataclasses.fields(data)
            if field.init
        }
    return None


def with_children(like: Any, values: dict[Any, Any]) -> Any:
    """A container of the type of `like` with other values, which are in the order of `children(like)`."""
    if isinstance(like, (list, tuple)):
        return honor_type(like, values.values())
    if isinstance(like, Mapping):
        return rebuild_mapping(like, values)
    return dataclasses.replace(like, **values)


def map_leaves(
    func: Callable[[Any], Any], data: Any, is_leaf: Leaf = is_tensor, strict: str | None = None
) -> Any:
    """`data` with `func` applied to each leaf; containers keep their types, anything else is returned as it is.

    `strict` names the calling operation: then a value that is neither container nor leaf is a TypeError.
    """
    if is_leaf(data):
        return func(data)
    inner = children(data)
    if inner is not None:
        return with_children(
            data, {key: map_leaves(func, value, is_leaf, strict) for key, value in inner.items()}
        )
    if strict is not None:
        raise TypeError(
            f"{strict} takes tensors, or lists, tuples, mappings and dataclasses of them, not a "
            f"{type(data).__module__}.{type(data).__qualname__}"
        )
    return data


def leaves(data: Any, is_leaf: Leaf = is_tensor) -> Iterator[Any]:
    """The leaves of `data` in the order in which `map_leaves` visits them."""
    if is_leaf(data):
        yield data
        return
    for value in (children(data) or {}).values():
        yield from leaves(value, is_leaf)


def replace_leaves(data: Any, values: Iterable[Any], is_leaf: Leaf = is_tensor) -> Any:
    """`data` with its leaves replaced, in order, by `values`."""
    following = iter(values)
    return map_leaves(lambda _: next(following), data, is_leaf)


def first_leaf(data: Any, is_leaf: Leaf = is_tensor) -> Any | None:
    """Return the first leaf of nested `data`, or None if there is none."""
    return next(leaves(data, is_leaf), None)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Leaf = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf (`test_type(leaf)` is true) of nested `data`.

    Raises TypeError for a value that is neither leaf nor container when `error_on_other_type` is set.
    """
    if error_on_other_type:
        name = getattr(func, "__name__", repr(func)).strip("_")
    else:
        name = None
    return map_leaves(lambda leaf: func(leaf, *args, **kwargs), data, test_type, name)


def send_to_device(
    tensor: Any,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Iterable[Any] | None = None,
) -> Any:
    """Return nested data with every tensor (or object with a `.to` method) moved to `device`.

    `skip_keys` are keys of mappings whose values stay where they are. With `non_blocking`, the copy overlaps
    with work on the host if the source is pinned.

    Example:
        batch = send_to_device(batch, accelerator.device, non_blocking=True)
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    # BatchEncoding-like containers move themselves, when nothing has to stay behind.
    if callable(getattr(tensor, "to", None)) and not (isinstance(tensor, Mapping) and skip_keys):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:
            return tensor.to(device)
    inner = children(tensor)
    if inner is None:
        return tensor
    stay = set(flat_list(skip_keys)) if isinstance(tensor, Mapping) else ()
    moved = {
        key: value if key in stay else send_to_device(value, device, non_blocking, skip_keys)
        for key, value in inner.items()
    }
    return with_children(tensor, moved)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested `data`, or None."""
    found = first_leaf(data)
    return None if found is None else found.device


def get_shape(data: Any) -> Any:
    """The shapes, as lists, of all tensors in nested `data`; other values stay as they are."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def find_batch_size(data: Any) -> int | None:
    """The size of dimension 0 of the first tensor in nested `data`.

    Raises ValueError where there is none and the first container is empty, and TypeError for other data without one.
    """
    found = first_leaf(data)
    if found is not None:
        return int(found.shape[0])
    first = data
    while isinstance(first, (list, tuple, Mapping)):
        if not first:
            raise ValueError(f"Cannot find the batch size from empty {type(first)}.")
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """The result of `find_batch_size`, or None if there is no batch size."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError, IndexError):
        return None


def listify(data: Any) -> Any:
    """Convert every tensor in nested data to a Python list (or number)."""

    def as_list(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            # numpy has no bfloat16
            tensor = tensor.to(torch.float32)
        return tensor.tolist()

    return map_leaves(as_list, data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert every fp16 or bf16 tensor in nested data to fp32."""

    def is_half(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)

    return map_leaves(torch.Tensor.float, tensor, is_half)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate the tensors of equally structured nested data along `dim`.

    Leaves that are not tensors cannot be joined: a list of one entry returns them unchanged, a longer one raises
    TypeError.
    """
    first = data[0]
    inner = children(first)
    if inner is not None:
        entries: list[Any] = [children(entry) for entry in data]
        return with_children(
            first, {key: concatenate([entry[key] for entry in entries], dim) for key in inner}
        )
    if not isinstance(first, torch.Tensor):
        if len(data) == 1:
            return first
        raise TypeError(f"Can only concatenate tensors but got {type(first)}")
    return torch.cat(data, dim=dim)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Slice every tensor in nested data by `tensor_slice` along dimension 0."""
    return map_leaves(lambda leaf: leaf[tensor_slice], data)


class Origins(Generic[Origin]):
    """From what each tensor was computed."""

    def __init__(self) -> None:
        self._origins: dict[int, frozenset[Origin]] = {}
        # Tensors are kept alive, so that no id is reused.
        self._alive: list[torch.Tensor] = []

    def record(self, tensor: torch.Tensor, origins: frozenset[Origin]) -> None:
        """Replace the origins of a tensor."""
        self._alive.append(tensor)
        self._origins[id(tensor)] = origins

    def of(self, data: Any) -> frozenset[Origin]:
        """The origins of all tensors in nested data."""
        origins: frozenset[Origin] = frozenset()
        for tensor in leaves(data):
            origins |= self._origins.get(id(tensor), frozenset())
        return origins
