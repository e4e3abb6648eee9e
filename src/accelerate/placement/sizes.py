# SPDX-License-Identifier: Apache-2.0
"""How much memory a model takes: bytes by tensor and module, the largest layer, and sizes written as text."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.enums import CustomDtype
from ..core.modules import require_module
from .names import join, normalized_classes
from .subclasses import is_quantized_tensor, stored_bytes

Dtype = str | torch.dtype | CustomDtype
NamedPart = tuple[str, nn.Module | torch.Tensor]

_CUSTOM_BYTES: dict[CustomDtype, int | float] = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def as_dtype(dtype: Dtype | None) -> Any:
    """A torch dtype from its name (`"float16"`, `"torch.float16"`); dtypes and None are returned as they are.

    Raises ValueError for a name that torch does not know.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype of torch: give one such as 'float16' or torch.float16")
    return found


def dtype_byte_size(dtype: Dtype) -> int | float:
    """Bytes that one value of `dtype` takes; a bool counts as one bit, as does a 4-bit type as half a byte."""
    dtype = as_dtype(dtype)
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`dtype` is not a valid dtype: {dtype}.")
    return _byte_size(dtype)


@functools.cache
def _byte_size(dtype: torch.dtype) -> int | float:
    if dtype == torch.bool:
        return 1 / 8
    narrow = re.fullmatch(r"torch\.u?int([1-7])", str(dtype))
    return int(narrow[1]) / 8 if narrow else dtype.itemsize


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size written as text: `"5GB"` (10^9), `"5GiB"` (2^30), `"5Gb"` (bits, with a small b); numbers pass.

    Raises ValueError for any other text and for a negative size.
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmg]i?b)\s*", str(size), re.IGNORECASE)
    if found is None:
        raise ValueError(
            f"`size` {size} is not in a valid format. Use an integer for bytes, or a string with an unit "
            "(like '5.0GB')."
        )
    unit = found[2]
    count = int(float(found[1]) * _UNITS[unit.upper()])
    return count // 8 if unit.endswith("b") and "i" not in unit.lower() else count


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors of `module`: parameters, then buffers; with `recurse` those of its submodules too.

    `remove_non_persistent` leaves out buffers that are not part of the state dict.
    """
    require_module(module, "named_module_tensors")
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    hidden = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in hidden:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are not part of the state dict of `module`.

    Args:
        module: the module.
        recurse: include the buffers of its submodules.
        fqns: return dotted names, from `module` on, instead of the buffers' own.
    """
    require_module(module, "get_non_persistent_buffers")
    owners = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix and fqns else name
        for prefix, owner in owners
        for name in owner._non_persistent_buffers_set
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the size of each tensor and module of a model.

    Args:
        model: the model, which may be on the meta device.
        dtype: dtype in which floating point tensors will be stored. Integers and narrower types keep their own.
        special_dtypes: name of a tensor -> its dtype, where it differs.
        buffers_only: count buffers, and no parameters.

    Returns:
        Name -> bytes, with the total under `""`. A tied tensor counts once.

    Example:
        >>> compute_module_sizes(torch.nn.Linear(2, 1))
        {'': 12, 'weight': 8, 'bias': 4}
    """
    require_module(model, "compute_module_sizes")
    measured = measure(model, dtype, special_dtypes)
    return measured.buffers if buffers_only else measured.sizes


class Measured(NamedTuple):
    """What one pass over a model finds.

    Attributes:
        sizes: name -> bytes of each tensor and module, as `compute_module_sizes` returns them.
        buffers: the same of the buffers alone.
        layers: name of a module -> bytes of the largest layer in it, a layer being as `get_max_layer_size` has it.
        tied: the names of each parameter that has several, as `find_tied_parameters` returns them.
    """

    sizes: dict[str, Any]
    buffers: dict[str, Any]
    layers: dict[str, Any]
    tied: list[list[str]]


def measure(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    unsplittable: Sequence[str] = (),
) -> Measured:
    """The sizes, the largest layers and the tied parameters of a model.

    In a separate pass: torch's `named_parameters` and `named_buffers` each take as long as all of it.

    Args:
        model: the model.
        dtype: as in `compute_module_sizes`.
        special_dtypes: as in `compute_module_sizes`.
        unsplittable: names of the classes whose modules are one layer.
    """
    wanted = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(kind) for name, kind in (special_dtypes or {}).items()}
    # Bytes of a value by class and dtype; None where the tensor itself has its size.
    widths: dict[tuple[type, torch.dtype], Any] = {}
    found = Measured(defaultdict(int), defaultdict(int), {}, [])
    # The first name of each parameter and buffer, and all names of the parameters that have several.
    names: dict[int, str] = {}
    tied: dict[int, list[str]] = {}

    def add(tensors: Mapping[str, torch.Tensor | None], start: str, sizes: dict[str, Any]) -> Any:
        total: Any = 0
        for leaf, tensor in tensors.items():
            if tensor is None:
                continue
            name, key = start + leaf, id(tensor)
            if key in names:
                if sizes is not found.buffers:
                    tied.setdefault(key, [names[key]]).append(name)
                continue
            names[key] = name
            kind = (type(tensor), tensor.dtype)
            if kind not in widths:
                widths[kind] = None if is_quantized_tensor(tensor) else _stored_width(tensor.dtype, wanted)
            width = widths[kind]
            if width is None:
                size: Any = stored_bytes(tensor)
            else:
                size = tensor.numel() * (special.get(name, width) if special else width)
            sizes[name] = size
            total += size
        return total

    def visit(name: str, start: str, module: nn.Module) -> tuple[Any, Any, Any]:
        """Bytes of a module's tensors, of its buffers alone, and of the largest layer in it."""
        total = add(module._parameters, start, found.sizes)
        buffers: Any = add(module._buffers, start, found.buffers) if module._buffers else 0
        total += buffers
        largest = None
        for leaf, child in module._modules.items():
            if child is None:
                continue
            size, of_buffers, layer = visit(start + leaf, f"{start}{leaf}.", child)
            total += size
            buffers += of_buffers
            if largest is None or layer > largest:
                largest = layer
        if total:
            found.sizes[name] += total
        if buffers:
            found.buffers[name] += buffers
        if largest is None or type(module).__name__ in unsplittable:
            largest = total
        found.layers[name] = largest
        return total, buffers, largest

    visit("", "", model)
    for name, size in found.buffers.items():
        # Those of the modules are in it.
        found.sizes.setdefault(name, size)
    found.tied.extend(sorted(tied[key]) for key in names if key in tied)
    return found


def _stored_width(dtype: torch.dtype, wanted: float | None) -> int | float:
    """Bytes of a value of `dtype` where floating point values take `wanted` at most."""
    width = dtype_byte_size(dtype)
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return width if wanted is None or is_integer else min(wanted, width)


def members_of(name: str, module: nn.Module) -> list[NamedPart]:
    """The parameters, submodules and buffers of a module itself, by full name."""
    groups = (module.named_parameters(recurse=False), module.named_children(), module.named_buffers(recurse=False))
    return [(join(name, own), part) for group in groups for own, part in group]


def children_of(name: str, part: nn.Module | torch.Tensor, unsplittable: Sequence[str]) -> list[NamedPart]:
    """The submodules into which a part may be split, by full name: none for a tensor or a class not to be split."""
    if not isinstance(part, nn.Module) or type(part).__name__ in unsplittable:
        return []
    return [(join(name, child), module) for child, module in part.named_children()]


def get_max_layer_size(
    modules: Sequence[NamedPart],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Return the size of the largest layer, and the names of all layers of that size.

    A layer is what is not split further: a tensor, a module without children, or a module of a class in
    `no_split_module_classes`.

    Args:
        modules: pairs of a name and a module or tensor.
        module_sizes: name -> bytes, from `compute_module_sizes`.
        no_split_module_classes: names of classes.

    Returns:
        (bytes, names of layers).
    """
    unsplittable = normalized_classes(no_split_module_classes)
    largest: int = 0
    names: list[str] = []
    ahead = list(reversed(modules))
    while ahead:
        name, part = ahead.pop()
        children = children_of(name, part, unsplittable)
        if children:
            ahead.extend(reversed(children))
            continue
        size = module_sizes[name]
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """The bytes of the model, and of its largest layer with the names of all layers of that size.

    Modules of the model's own `_no_split_modules` (class names) count as one layer.
    """
    require_module(model, "calculate_maximum_sizes")
    sizes = compute_module_sizes(model)
    return sizes[""], get_max_layer_size(members_of("", model), sizes, getattr(model, "_no_split_modules", None))
