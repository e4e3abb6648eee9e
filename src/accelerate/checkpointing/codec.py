# SPDX-License-Identifier: Apache-2.0
"""Plain Python state as JSON and back: a small set of typed encodings, tensors by reference, no pickle.

What JSON has itself (None, bool, int, finite float, str, list, dict with str keys) stays as it is. Everything else is
an object with the key "$" that names its type. Decoding never imports a module and never calls code that a file names:
enums, namedtuples and dataclasses are taken from modules that the program has imported itself, and are filled without
their constructors.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..core.dtypes import NAMES, dtype_name, tensor_dtype
from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..core.trees import is_dataclass_instance, is_namedtuple
from . import codec_numpy
from .blocks import host_view
from .codec_scalars import SCALARS, encode_scalar, is_plain_number

_INLINE = 64  # bytes: a step counter is not worth an entry in a tensor file
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind
    for kind in (list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes, deque, OrderedDict, Counter)
}
_REMEDY = (
    "Return plain data from `state_dict()`: numbers, strings, bytes, lists, tuples, dicts, sets, enums, dataclasses, "
    "tensors or numpy arrays; layout='compat' writes the API's own pickled files instead."
)
# What reading an entry of a wrong form raises.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


# What identifies the values of a tensor: see `memory_of`.
Memory = tuple[object, ...]


class TensorSink:
    """Collects the tensors of one document under keys; the same memory twice is one entry."""

    def __init__(self, inline: int = _INLINE) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.inline = inline
        self._seen: dict[Memory, str] = {}
        # Documents of tensors that stand in the JSON text, with the tensor: its memory must not be given to another.
        self.small: dict[Memory, tuple[JSONObject, torch.Tensor]] = {}

    def add(self, path: str, tensor: torch.Tensor) -> str:
        """Add a tensor, and return its key. A tensor with the same memory is stored once."""
        identity = memory_of(tensor)
        if identity not in self._seen:
            key = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
            self.tensors[key] = tensor
            self._seen[identity] = key
        return self._seen[identity]


def memory_of(tensor: torch.Tensor) -> Memory:
    """Equal for two tensors that are the same values in the same memory. Empty and meta tensors are their own."""
    if hasattr(tensor, "to_local"):  # a DTensor has no memory but its shard's
        return (tuple(tensor.shape), *memory_of(tensor.to_local()))
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return (id(tensor),)
    # A conjugate or negative view has the memory of its base, and other values.
    views = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), *views)


def require_plain_tensor(tensor: torch.Tensor, path: str) -> None:
    """CheckpointError for a tensor that a safetensors file cannot hold as it is."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{path}: a tensor of type {kind.__module__}.{kind.__qualname__} ({tensor.layout}) cannot be saved. "
            "Convert it to a dense torch.Tensor in `state_dict()` (for a DTensor: `full_tensor()`)."
        )
    if tensor.is_quantized or tensor.device.type == "meta":
        what = "quantized" if tensor.is_quantized else "on the meta device, so it has no values"
        raise CheckpointError(f"{path}: the tensor is {what} and cannot be saved")


def encode(value: object, sink: TensorSink, path: str) -> object:
    """`value` as data for `json.dumps`; its tensors go to `sink` under their paths.

    Raises CheckpointError that names the path inside the object for a type that has no encoding, and for a container
    that contains itself or is nested too deep.
    """
    encoder = _Encoder(sink)
    try:
        return encoder.encode(value, path)
    except RecursionError:
        raise CheckpointError(
            f"{path}: the object is nested too deep to be saved (below {encoder.deepest[:200]}). {_REMEDY}"
        ) from None


class _Encoder:
    def __init__(self, sink: TensorSink) -> None:
        self.sink = sink
        self.inside: set[int] = set()
        self.deepest = ""

    def encode(self, value: object, path: str) -> object:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float) and is_plain_number(value):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, enum.Enum):
            return {"$": "enum", "type": _type_name(kind, path), "v": self.encode(value.value, f"{path}.value")}
        try:
            if value is np.ma.masked:
                return {"$": "npmasked"}
            if isinstance(value, np.ndarray):
                return self._array(value, path)
            small = encode_scalar(value)
            return small if small is not None else self._container(value, path)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved: {error}. {_REMEDY}"
            ) from None

    def _container(self, value: object, path: str) -> object:
        if id(value) in self.inside:
            raise CheckpointError(f"{path}: the object contains itself and cannot be saved. {_REMEDY}")
        self.inside.add(id(value))
        self.deepest = max(self.deepest, path, key=len)
        try:
            return self._container_body(value, path)
        finally:
            self.inside.discard(id(value))

    def _container_body(self, value: Any, path: str) -> object:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind in (tuple, torch.Size):
            return {"$": "tuple" if kind is tuple else "size", "v": self._items(value, path)}
        if is_namedtuple(value):
            return {"$": "namedtuple", "type": _type_name(kind, path), "v": self._items(value, path)}
        if kind is deque:
            return {"$": "deque", "maxlen": value.maxlen, "v": self._items(value, path)}
        if kind in (set, frozenset):
            return {"$": kind.__name__, "v": self._items(sorted(value, key=repr), path)}
        if kind in (slice, range):
            return {"$": kind.__name__, "v": self._items((value.start, value.stop, value.step), path)}
        if kind is dict or (isinstance(value, Mapping) and kind in (OrderedDict, Counter, defaultdict)):
            return self._mapping(value, path)
        if is_dataclass_instance(value):
            return self._dataclass(value, path)
        raise CheckpointError(f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved. {_REMEDY}")

    def _items(self, values: Iterable[object], path: str) -> list[object]:
        return [self.encode(item, f"{path}[{index}]") for index, item in enumerate(values)]

    def _dataclass(self, value: Any, path: str) -> JSONObject:
        kind = type(value)
        names = [field.name for field in dataclasses.fields(value)]
        others = sorted(set(getattr(value, "__dict__", ())) - set(names))
        try:
            object.__new__(kind)
        except TypeError as error:  # it is a dict, an exception, ... too
            raise ValueError(str(error)) from None
        if others:
            raise ValueError(f"it has attributes that are no fields: {', '.join(others)}")
        fields = {name: self.encode(getattr(value, name), f"{path}.{name}") for name in names if hasattr(value, name)}
        return {"$": "dataclass", "type": _type_name(kind, path), "v": fields}

    def _mapping(self, value: Mapping[Any, object], path: str) -> JSONObject:
        kind = type(value)
        plain = all(type(key) is str for key in value) and "$" not in value
        if kind is dict and plain:
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"{path} (a key)"), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        document: JSONObject = {"$": kind.__name__, "v": pairs}
        if kind is defaultdict:
            factory = value.default_factory  # type: ignore[attr-defined]
            name = None if factory is None else getattr(factory, "__name__", repr(factory))
            if name is not None and _FACTORIES.get(name) is not factory:
                raise CheckpointError(f"{path}: a defaultdict whose factory is {factory!r} cannot be saved. {_REMEDY}")
            document["factory"] = name
        if kind is OrderedDict and vars(value):  # the versions in a module's state dict
            document["attributes"] = self.encode(dict(vars(value)), f"{path} (attributes)")
        return document

    def _tensor(self, value: torch.Tensor, path: str) -> JSONObject:
        require_plain_tensor(value, path)
        if isinstance(value, torch.nn.Parameter):
            document = {"$": "parameter", "requires_grad": value.requires_grad, "v": self._plain(value.detach(), path)}
        else:
            document = self._plain(value.detach(), path)
            if value.requires_grad:
                document = {"$": "leaf", "v": document}
        if isinstance(value, torch.nn.Buffer):
            document = {"$": "buffer", "persistent": value.persistent, "v": document}
        return document

    def _plain(self, value: torch.Tensor, path: str) -> JSONObject:
        if value.dtype is torch.complex128 or (value.is_complex() and value.dtype is not torch.complex64):
            real = torch.view_as_real(value.resolve_conj())
            return {"$": "complex_tensor", "v": self._plain(real, path)}
        if value.dtype not in NAMES:
            raise CheckpointError(f"{path}: a tensor of dtype {value.dtype} cannot be saved. Convert it.")
        if value.numel() * value.element_size() > self.sink.inline:
            return {"$": "tensor", "ref": self.sink.add(path, value)}
        memory = memory_of(value)
        if memory in self.sink.small:
            first = self.sink.small[memory][0]
            return {"$": "tensor", "same": first.setdefault("id", len(self.sink.small))}
        raw = value.cpu().resolve_conj().resolve_neg().contiguous()
        document = {
            "$": "tensor",
            "dtype": dtype_name(value.dtype),
            "shape": list(value.shape),
            "b64": base64.b64encode(host_view(raw) if raw.numel() else b"").decode(),
        }
        self.sink.small[memory] = (document, value)
        return document

    def _array(self, value: codec_numpy.Array, path: str) -> JSONObject:
        kind = type(value)
        if kind is np.ma.MaskedArray:
            return self._masked(value, path)
        view = next((name for name, known in codec_numpy.VIEWS.items() if kind is known), None)
        if kind is not np.ndarray and view is None:
            raise ValueError("it is a subclass of numpy.ndarray (numpy.asarray(...) converts it to a plain array)")
        if value.dtype.hasobject:
            raise CheckpointError(f"{path}: a numpy array of Python objects cannot be saved. {_REMEDY}")
        document = self._values(value.view(np.ndarray), path)
        if view is not None:
            document["class"] = view
            document["dtype"] = codec_numpy.describe_dtype(value.dtype)
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            document["order"] = "F"
        return document

    def _values(self, value: codec_numpy.Array, path: str) -> JSONObject:
        here = np.ascontiguousarray(value)
        here = here if here.flags.writeable else here.copy()  # torch warns of read-only memory
        if value.dtype.kind in "biufc" and value.nbytes > self.sink.inline and value.dtype.isnative:
            try:
                tensor = torch.from_numpy(here)
            except TypeError:
                tensor = None
            if tensor is not None and tensor.numpy().dtype.type is value.dtype.type:
                return {"$": "ndarray", "v": self._plain(tensor.reshape(value.shape), path)}
        document = {
            "$": "ndarray",
            "dtype": codec_numpy.describe_dtype(value.dtype),
            "shape": list(value.shape),
        }
        if value.nbytes > self.sink.inline:
            raw = np.frombuffer(here.tobytes(), np.uint8).copy()
            document["bytes"] = self._plain(torch.from_numpy(raw), path)
        else:
            document["b64"] = base64.b64encode(here.tobytes()).decode()
        return document

    def _masked(self, value: Any, path: str) -> JSONObject:
        return {
            "$": "masked",
            "data": self._array(np.asarray(value.data), f"{path}.data"),
            "mask": self._array(np.asarray(value.mask), f"{path}.mask"),
            "some": value.mask is not np.ma.nomask,
            "fill": None if value._fill_value is None else self._array(value._fill_value, f"{path}.fill_value"),
            "hard": bool(value.hardmask),
        }


def decode(data: object, tensors: Mapping[str, torch.Tensor], where: str, unshare: bool = False) -> Any:
    """What `encode` was given. `where` names the file in errors.

    Two references to one tensor give the same tensor; with `unshare`, each gives a separate copy.
    Raises CheckpointError for an encoding, an enum or a tensor that is not known here.
    """
    try:
        return _Decoder(tensors, where, unshare).decode(data)
    except RecursionError:
        raise CheckpointError(f"{where}: it is nested too deep") from None


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str, unshare: bool) -> None:
        self.tensors = tensors
        self.where = where
        self.unshare = unshare
        self.used: set[str] = set()
        self.small: dict[int, torch.Tensor] = {}
        self.wrapped: dict[tuple[str, int, bool], torch.Tensor] = {}

    def decode(self, data: object) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        if "$" not in data:
            return {key: self.decode(item) for key, item in data.items()}
        try:
            return self._typed(data["$"], data)
        except RecursionError:
            raise
        except MALFORMED as error:
            if isinstance(error, CheckpointError):
                raise
            tag = str(data["$"])[:80]
            kind = "" if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: "
            why = f"{kind}{error}"[:300]
            raise CheckpointError(f"{self.where}: an entry of type {tag!r} cannot be read: {why}") from error

    def _typed(self, tag: object, data: JSONObject) -> object:
        if tag in ("parameter", "leaf", "buffer"):
            return self._wrapped(tag, data)
        if tag in ("tensor", "complex_tensor"):
            return self._tensor(tag, data)
        if tag in ("ndarray", "masked"):
            return self._array(data) if tag == "ndarray" else self._masked(data)
        if tag in SCALARS:
            return SCALARS[tag](data)
        if tag == "enum":
            return _known_type(data["type"], enum.Enum, self.where)(self.decode(data["v"]))
        if tag in ("namedtuple", "dataclass"):
            return self._record(tag, data)
        if tag == "deque":
            return deque(_rows(self.decode(data["v"])), maxlen=data["maxlen"])
        if tag in ("tuple", "size", "set", "frozenset"):
            kinds: JSONObject = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
            return kinds[tag](_rows(self.decode(data["v"])))
        if tag in ("slice", "range"):
            return (slice if tag == "slice" else range)(*_rows(self.decode(data["v"])))
        if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
            return self._mapping(tag, data)
        raise CheckpointError(
            f"{self.where}: it holds an entry of type {str(tag)[:80]!r}, which this version cannot read. "
            "It was written by a newer version, or by something else."
        )

    def _record(self, tag: str, data: JSONObject) -> object:
        """A namedtuple or dataclass, without a call of its constructor."""
        values = self.decode(data["v"])
        if tag == "namedtuple":
            found = _known_type(data["type"], tuple, self.where)
            if len(_rows(values)) != len(found._fields):
                raise ValueError(f"{len(values)} values for the fields {', '.join(found._fields)}")
            return tuple.__new__(found, values)
        found = _known_type(data["type"], object, self.where)
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(found)})
        if unknown:
            raise ValueError(f"{data['type']} has no fields {', '.join(unknown)}")
        made = object.__new__(found)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def _mapping(self, tag: str, data: JSONObject) -> object:
        items = [(self.decode(key), self.decode(item)) for key, item in data["v"]]
        if tag == "defaultdict":
            name = data["factory"]
            return defaultdict(None if name is None else _FACTORIES[name], items)
        if tag == "Counter":
            return Counter(dict(items))
        if tag == "dict":
            return dict(items)
        found: OrderedDict[object, object] = OrderedDict(items)
        vars(found).update(self.decode(data.get("attributes", {})))
        return found

    def _wrapped(self, tag: str, data: JSONObject) -> torch.Tensor:
        """A tensor that is more than its values; one memory gives one object."""
        inner = self.decode(data["v"])
        flag = data.get("requires_grad", data.get("persistent", True))
        if not isinstance(inner, torch.Tensor) or not isinstance(flag, bool):
            raise ValueError("it wraps no tensor")
        key = (tag, id(inner), flag)
        if key not in self.wrapped:
            if tag == "parameter":
                made: torch.Tensor = torch.nn.Parameter(inner, requires_grad=flag)
            elif tag == "leaf":
                made = inner.detach().requires_grad_()
            else:
                made = torch.nn.Buffer(inner, persistent=flag)
            self.wrapped[key] = made
            self.wrapped[("", id(inner), False)] = inner  # kept, so that no other tensor gets its id
        return self.wrapped[key]

    def _tensor(self, tag: str, data: JSONObject) -> torch.Tensor:
        if tag == "complex_tensor":
            return torch.view_as_complex(self.decode(data["v"]).contiguous())
        if "ref" in data:
            key = data["ref"]
            found = self.tensors[key]
            if self.unshare and key in self.used:
                found = found.clone()
            self.used.add(key)
            return found
        if "same" in data:
            found = self.small[data["same"]]
            return found.clone() if self.unshare else found
        dtype = tensor_dtype(data["dtype"])
        raw = bytearray(base64.b64decode(data["b64"], validate=True))
        shape = codec_numpy.extents(data["shape"])
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"{len(raw)} bytes are there for the shape {list(shape)} of {dtype}")
        if raw:
            found = torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()
        else:
            found = torch.empty(shape, dtype=dtype)
        if "id" in data:
            self.small[data["id"]] = found
        return found

    def _array(self, data: JSONObject) -> codec_numpy.Array:
        found: codec_numpy.Array
        if "v" in data:
            found = self.decode(data["v"]).numpy()
            dtype = found.dtype
        else:
            dtype = codec_numpy.read_dtype(data["dtype"])
            if "bytes" in data:
                raw = bytearray(self.decode(data["bytes"]).numpy().tobytes())
            else:
                raw = bytearray(base64.b64decode(data["b64"], validate=True))
            found = codec_numpy.array_from_bytes(raw, dtype, codec_numpy.extents(data["shape"]))
        if data.get("order") == "F":
            found = np.asfortranarray(found)
        if "class" in data:
            dtype = codec_numpy.read_dtype(data["dtype"])
            if dtype != found.dtype:
                raise ValueError(f"its dtypes {dtype} and {found.dtype} differ")
            found = found.view(dtype).view(codec_numpy.VIEWS[data["class"]])
        return found

    def _masked(self, data: JSONObject) -> object:
        values = self._array(data["data"])
        mask: Any = self._array(data["mask"])
        found: Any = np.ma.MaskedArray(values, mask=mask if data["some"] else np.ma.nomask, hard_mask=data["hard"])
        if data["fill"] is not None:
            found.fill_value = self._array(data["fill"])
        return found


def _rows(values: object) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"a list is expected, not {str(values)[:80]}")
    return values


def _type_name(kind: type, path: str) -> str:
    """The name under which a type is found again. Raises CheckpointError for one that is defined in a function."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _lookup(name) is not kind:
        raise CheckpointError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved: its type is not found under this name "
            "again. Define it at the top of a module."
        )
    return name


def _lookup(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found


def _known_type(name: object, base: type, where: str) -> Any:
    """A type by its module and name, taken only from modules that the program has imported itself.

    `base` is Enum, tuple (for namedtuples) or object (for dataclasses).
    """
    found = _lookup(name) if isinstance(name, str) else None
    fits = isinstance(found, type) and issubclass(found, base)
    if fits and base is tuple:
        fits = isinstance(getattr(found, "_fields", None), tuple)
    elif fits and base is object:
        fits = dataclasses.is_dataclass(found)
    if not fits:
        module = str(name).partition(":")[0]
        raise CheckpointError(
            f"{where}: it holds a value of the type {str(name)[:200]}, which is not defined here. Import the module "
            f"{module[:200]}, which defines it, before loading."
        )
    return found
