# SPDX-License-Identifier: Apache-2.0
"""How much memory a model takes: bytes by tensor and module, the largest layer, and sizes written as text."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.enums import CustomDtype
from ..core.modules import direct_tensors
from ..core.objects import flat_list
from ..torch_internals.buffers import non_persistent
from .names import is_within, join
from .subclasses import is_quantized_tensor, stored_bytes

Dtype = str | torch.dtype | CustomDtype
NamedPart = tuple[str, nn.Module | torch.Tensor]

_CUSTOM_BYTES: dict[CustomDtype, int | float] = {
    CustomDtype.FP8: 1,
    CustomDtype.INT4: 0.5,
    CustomDtype.INT2: 0.25,
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def as_dtype(dtype: Dtype | None) -> Any:
    """A torch dtype from its name (`"float16"`, `"torch.float16"`); dtypes and None are returned as they are.

    Raises ValueError for a name that torch does not know.
    """
    if not isinstance(dtype, str):
        return dtype
    value = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(value, torch.dtype):
        raise ValueError(
            f"{dtype!r} is not a torch dtype: use a dtype such as 'float16' or torch.float16"
        )
    return value


# The API's name.
_get_proper_dtype = as_dtype


def dtype_byte_size(dtype: Dtype) -> int | float:
    """The size of one value of `dtype` in bytes; a bool counts as one bit, and a 4-bit type as half a byte."""
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
    if narrow:
        return int(narrow[1]) / 8
    return dtype.itemsize


def convert_file_size_to_int(size: int | str) -> int:
    """Convert a size written as text to bytes: `"5GB"` or `"5gb"` (10^9), `"5GiB"` (2^30), `"5Gb"` (bits).

    Numbers are returned unchanged. Raises ValueError for any other text and for a negative size.
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmg]i?b)\s*", str(size), re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"`size` {size} is not in a valid format. Use an integer for bytes, or a string with an unit "
            "(like '5.0GB')."
        )
    number, unit = match.groups()
    count = int(float(number) * _UNITS[unit.upper()])
    if unit in ("Kb", "Mb", "Gb"):
        return count // 8
    return count


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors of `module`: parameters, then buffers; with `recurse` those of its submodules too.

    `remove_non_persistent` leaves out buffers that are not part of the state dict.
    """
    yield from nn.Module.named_parameters(module, recurse=recurse)
    if not include_buffers:
        return
    hidden: set[str] = set()
    if remove_non_persistent:
        hidden = get_non_persistent_buffers(module, recurse, fqns=True)
    for name, buffer in nn.Module.named_buffers(module, recurse=recurse):
        if name not in hidden:
            yield name, buffer


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """The size in bytes of all buffers of a model; the arguments are those of `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[Any],
) -> tuple[int, list[str], list[Any]]:
    """The size in bytes of a module and of the modules with tied parameters, with their names and the modules.

    Args:
        tied_params: the names of the tied parameters in other modules.
        module_size: the bytes of the module, with the tied parameters.
        module_sizes: the bytes of each module and parameter by name.
        modules_to_treat: the other modules, with their names.
    """
    tied = {}
    # In the order of the parameters, as the API has it.
    for tied_name in tied_params:
        for name, part in modules_to_treat:
            if is_within(tied_name, name):
                tied[name] = part
    size = module_size + sum(module_sizes[name] for name in tied)
    shared = sum(module_sizes[name] for name in tied_params)
    return size - shared, list(tied), list(tied.values())


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Return the names of the buffers that are not part of the state dict of `module`.

    Args:
        module: the module.
        recurse: include the buffers of its submodules.
        fqns: return dotted names, from `module` on, instead of the buffers' own.
    """
    owners: Iterable[tuple[str, nn.Module]] = [("", module)]
    if recurse:
        owners = module.named_modules()
    names: set[str] = set()
    for prefix, owner in owners:
        if not fqns:
            prefix = ""
        names.update(join(prefix, name) for name in non_persistent(owner))
    return names


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
        special_dtypes: name of a tensor -> its dtype, if it differs.
        buffers_only: count only buffers.

    Returns:
        Name -> bytes, with the total under `""`. A tied tensor counts once.

    Example:
        >>> compute_module_sizes(torch.nn.Linear(2, 1))
        {'': 12, 'weight': 8, 'bias': 4}
    """
    measured = measure(model, dtype, special_dtypes)
    if buffers_only:
        return measured.buffers
    return measured.sizes


class Measured(NamedTuple):
    """What one pass over a model finds.

    Attributes:
        sizes: name -> bytes of each tensor and module, as `compute_module_sizes` returns them.
        buffers: the same of the buffers alone.
        layers: name of a module -> bytes of the largest layer in it, a layer being as `get_max_layer_size` has it.
    """

    sizes: dict[str, Any]
    buffers: dict[str, Any]
    layers: dict[str, Any]


def measure(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    unsplittable: Sequence[str] = (),
) -> Measured:
    """The sizes and the largest layers of a model.

    Args:
        model: the model.
        dtype: as in `compute_module_sizes`.
        special_dtypes: as in `compute_module_sizes`.
        unsplittable: names of the classes whose modules are one layer.
    """
    wanted: float = math.inf
    if dtype is not None:
        wanted = dtype_byte_size(dtype)
    special = {name: dtype_byte_size(kind) for name, kind in (special_dtypes or {}).items()}
    sizes: dict[str, Any] = defaultdict(int)
    buffers: dict[str, Any] = defaultdict(int)
    layers: dict[str, Any] = {}
    counted: set[int] = set()
    modules = list(model.named_modules(remove_duplicate=False))
    for path, module in modules:
        for leaf, tensor in direct_tensors(module).items():
            if id(tensor) in counted:
                continue
            counted.add(id(tensor))
            name = join(path, leaf)
            size: Any = 0
            if is_lazy(tensor):
                # Its first forward gives it a shape.
                pass
            elif is_quantized_tensor(tensor):
                size = stored_bytes(tensor)
            elif name in special:
                size = tensor.numel() * special[name]
            else:
                width = dtype_byte_size(tensor.dtype)
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    width = min(wanted, width)
                size = tensor.numel() * width
            sizes[name] = size
            sizes[path] += size
            if not isinstance(tensor, nn.Parameter):
                buffers[name] = size
                buffers[path] += size
    # From the innermost modules outwards: what is in a module follows it.
    for path, module in reversed(modules):
        if path not in layers or type(module).__name__ in unsplittable:
            layers[path] = sizes.get(path, 0)
        if not path:
            continue
        parent = path.rpartition(".")[0]
        layers[parent] = max(layers.get(parent, 0), layers[path])
        for table in (sizes, buffers):
            if path in table:
                table[parent] += table[path]
    return Measured(sizes, buffers, layers)


def members_of(name: str, module: nn.Module) -> list[NamedPart]:
    """The parameters, submodules and buffers of a module itself, by full name."""
    members: Iterable[tuple[str, Any]] = itertools.chain(
        nn.Module.named_parameters(module, recurse=False),
        module.named_children(),
        nn.Module.named_buffers(module, recurse=False),
    )
    return [(join(name, leaf), part) for leaf, part in members]


def children_of(
    name: str, part: nn.Module | torch.Tensor, unsplittable: Sequence[str]
) -> list[NamedPart]:
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

    A layer is a unit that is not split further: a tensor, a module without children, or a module of a
    class in `no_split_module_classes`.

    Args:
        modules: pairs of a name and a module or tensor.
        module_sizes: name -> bytes, from `compute_module_sizes`.
        no_split_module_classes: names of classes.

    Returns:
        (bytes, names of layers).
    """
    unsplittable = flat_list(no_split_module_classes)
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
    """The size of the model in bytes, and that of its largest layer with the names of all layers of this size.

    Modules of the model's own `_no_split_modules` (class names) count as one layer.
    """
    sizes = compute_module_sizes(model)
    classes = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(members_of("", model), sizes, classes)
