# SPDX-License-Identifier: Apache-2.0
"""Plain Python state as JSON and back: a small set of typed encodings, tensors by reference, no pickle.

What JSON has itself (None, bool, int, finite float, str, list, dict with str keys) stays as it is. Everything else is
an object with the key "$" that names its type. Decoding never imports a module and never calls code that a file names,
but for the constructors of enums and namedtuples whose module the program has imported itself.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..core.errors import CheckpointError
from ..core.trees import is_namedtuple

_INLINE = 64  # bytes: a step counter is not worth an entry in a tensor file
_FACTORIES: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": set, "int": int, "float": float}
_REMEDY = (
    "Return plain data from `state_dict()`: numbers, strings, bytes, lists, tuples, dicts, sets, enums, tensors or "
    "numpy arrays; layout='compat' writes the API's own pickled files instead."
)


class TensorSink:
    """Collects the tensors of one document under keys; the same memory twice is one entry."""

    def __init__(self, inline: int = _INLINE) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.inline = inline
        self._seen: dict[tuple[Any, ...], str] = {}

    def add(self, path: str, tensor: torch.Tensor) -> str:
        identity = memory_of(tensor)
        if identity not in self._seen:
            key = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
            self.tensors[key] = tensor
            self._seen[identity] = key
        return self._seen[identity]


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same values in the same memory. Empty and meta tensors are their own."""
    if hasattr(tensor, "to_local"):  # a DTensor has no memory but its shard's
        return (tuple(tensor.shape), *memory_of(tensor.to_local()))
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


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


def encode(value: Any, sink: TensorSink, path: str) -> Any:
    """`value` as data for `json.dumps`; its tensors go to `sink` under their paths.

    Raises CheckpointError that names the path inside the object for a type that has no encoding, and for a container
    that contains itself.
    """
    return _Encoder(sink).encode(value, path)


class _Encoder:
    def __init__(self, sink: TensorSink) -> None:
        self.sink = sink
        self.inside: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, enum.Enum):
            return {"$": "enum", "type": _type_name(kind), "v": self.encode(value.value, f"{path}.value")}
        small = _encode_scalar(value)
        if small is not None:
            return small
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self.inside:
            raise CheckpointError(f"{path}: the object contains itself and cannot be saved. {_REMEDY}")
        self.inside.add(id(value))
        try:
            return self._container_body(value, path)
        finally:
            self.inside.discard(id(value))

    def _container_body(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind in (tuple, torch.Size):
            return {"$": "tuple" if kind is tuple else "size", "v": self._items(value, path)}
        if is_namedtuple(value):
            return {"$": "namedtuple", "type": _type_name(kind), "v": self._items(value, path)}
        if kind is deque:
            return {"$": "deque", "maxlen": value.maxlen, "v": self._items(value, path)}
        if kind in (set, frozenset):
            return {"$": kind.__name__, "v": self._items(sorted(value, key=repr), path)}
        if kind is dict or (isinstance(value, Mapping) and kind in (OrderedDict, Counter, defaultdict)):
            return self._mapping(value, path)
        raise CheckpointError(f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved. {_REMEDY}")

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.encode(item, f"{path}[{index}]") for index, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        kind = type(value)
        plain = all(type(key) is str for key in value) and "$" not in value
        if kind is dict and plain:
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"{path} (a key)"), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        document: dict[str, Any] = {"$": kind.__name__, "v": pairs}
        if kind is defaultdict:
            factory = value.default_factory  # type: ignore[attr-defined]
            name = None if factory is None else getattr(factory, "__name__", repr(factory))
            if name is not None and _FACTORIES.get(name) is not factory:
                raise CheckpointError(f"{path}: a defaultdict whose factory is {factory!r} cannot be saved. {_REMEDY}")
            document["factory"] = name
        return document

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        require_plain_tensor(value, path)
        if value.dtype is torch.complex128 or (value.is_complex() and value.dtype is not torch.complex64):
            real = torch.view_as_real(value.detach().resolve_conj())
            return {"$": "complex_tensor", "v": self._tensor(real, path)}
        document: dict[str, Any]
        if value.numel() * value.element_size() <= self.sink.inline:
            raw = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            document = {
                "$": "tensor",
                "dtype": _dtype_name(value.dtype),
                "shape": list(value.shape),
                "b64": base64.b64encode(_bytes_of(raw)).decode(),
            }
        else:
            document = {"$": "tensor", "ref": self.sink.add(path, value.detach())}
        if isinstance(value, torch.nn.Parameter):
            return {"$": "parameter", "requires_grad": value.requires_grad, "v": document}
        return document

    def _array(self, value: np.ndarray, path: str) -> Any:
        if value.dtype.hasobject:
            raise CheckpointError(f"{path}: a numpy array of Python objects cannot be saved. {_REMEDY}")
        if value.dtype.kind in "biufc" and value.nbytes > self.sink.inline and value.dtype.isnative:
            try:
                tensor = torch.from_numpy(np.ascontiguousarray(value))
            except TypeError:
                tensor = None
            if tensor is not None:
                return {"$": "ndarray", "v": self._tensor(tensor.reshape(value.shape), path)}
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$": "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "b64": raw}


def _encode_scalar(value: Any) -> Any:
    """The encoding of a value without parts, or None."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "v": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return {"$": "npscalar", "dtype": value.dtype.str, "b64": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, np.dtype):
        return {"$": "npdtype", "v": value.str}
    if kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if kind is range:
        return {"$": "range", "v": [value.start, value.stop, value.step]}
    if kind is torch.dtype:
        return {"$": "dtype", "v": _dtype_name(value)}
    if kind is torch.device:
        return {"$": "device", "v": str(value)}
    if isinstance(value, pathlib.PurePath):
        return {"$": "path", "v": str(value)}
    if kind in (datetime.datetime, datetime.date):
        return {"$": kind.__name__, "v": value.isoformat()}
    if kind is datetime.timedelta:
        return {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    return None


def decode(data: Any, tensors: Mapping[str, torch.Tensor], where: str, unshare: bool = False) -> Any:
    """What `encode` was given. `where` names the file in errors.

    Two references to one tensor give the same tensor; with `unshare`, each gives a copy of its own.
    Raises CheckpointError for an encoding, an enum or a tensor that is not known here.
    """
    return _Decoder(tensors, where, unshare).decode(data)


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str, unshare: bool) -> None:
        self.tensors = tensors
        self.where = where
        self.unshare = unshare
        self.used: set[str] = set()

    def decode(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        if "$" not in data:
            return {key: self.decode(item) for key, item in data.items()}
        try:
            return self._typed(data["$"], data)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.where}: an entry of type {data['$']!r} cannot be read: {error}") from error

    def _typed(self, tag: str, data: dict[str, Any]) -> Any:
        if tag in ("tensor", "complex_tensor", "parameter", "ndarray"):
            return self._array_like(tag, data)
        if tag in _SCALARS:
            return _SCALARS[tag](data)
        if tag == "enum":
            return _known_type(data["type"], enum.Enum, self.where)(self.decode(data["v"]))
        if tag == "namedtuple":
            return _known_type(data["type"], tuple, self.where)(*self.decode(data["v"]))
        if tag == "deque":
            return deque(self.decode(data["v"]), maxlen=data["maxlen"])
        if tag in ("tuple", "size", "set", "frozenset"):
            kinds: dict[str, Any] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
            return kinds[tag](self.decode(data["v"]))
        if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
            return self._mapping(tag, data)
        raise CheckpointError(
            f"{self.where}: it holds an entry of type {tag!r}, which this version cannot read. "
            "It was written by a newer version, or by something else."
        )

    def _mapping(self, tag: str, data: dict[str, Any]) -> Any:
        items = [(self.decode(key), self.decode(item)) for key, item in data["v"]]
        if tag == "defaultdict":
            name = data["factory"]
            return defaultdict(None if name is None else _FACTORIES[name], items)
        if tag == "Counter":
            return Counter(dict(items))
        return OrderedDict(items) if tag == "OrderedDict" else dict(items)

    def _array_like(self, tag: str, data: dict[str, Any]) -> Any:
        if tag == "parameter":
            return torch.nn.Parameter(self.decode(data["v"]), requires_grad=data["requires_grad"])
        if tag == "complex_tensor":
            return torch.view_as_complex(self.decode(data["v"]).contiguous())
        if tag == "ndarray":
            if "v" in data:
                return self.decode(data["v"]).numpy()
            raw = bytearray(base64.b64decode(data["b64"]))
            return np.frombuffer(raw, dtype=np.dtype(data["dtype"])).reshape(data["shape"])
        if "ref" in data:
            key = data["ref"]
            found = self.tensors[key]
            if self.unshare and key in self.used:
                found = found.clone()
            self.used.add(key)
            return found
        dtype = _dtype(data["dtype"])
        raw = bytearray(base64.b64decode(data["b64"]))
        if not raw:
            return torch.empty(data["shape"], dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).reshape(data["shape"]).clone()


_SCALARS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda data: float(data["v"]),
    "bytes": lambda data: base64.b64decode(data["v"]),
    "bytearray": lambda data: bytearray(base64.b64decode(data["v"])),
    "npscalar": lambda data: np.frombuffer(base64.b64decode(data["b64"]), dtype=np.dtype(data["dtype"]))[0],
    "npdtype": lambda data: np.dtype(data["v"]),
    "complex": lambda data: complex(float(data["v"][0]), float(data["v"][1])),
    "range": lambda data: range(*data["v"]),
    "dtype": lambda data: _dtype(data["v"]),
    "device": lambda data: torch.device(data["v"]),
    "path": lambda data: pathlib.Path(data["v"]),
    "datetime": lambda data: datetime.datetime.fromisoformat(data["v"]),
    "date": lambda data: datetime.date.fromisoformat(data["v"]),
    "timedelta": lambda data: datetime.timedelta(*data["v"]),
}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch")
    return found


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _known_type(name: str, base: type, where: str) -> Any:
    """A type by its module and name, taken only from modules that the program has imported itself."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, base)) or (base is tuple and not hasattr(found, "_fields")):
        raise CheckpointError(
            f"{where}: it holds a value of the type {name}, which is not defined here. Import the module {module}, "
            "which defines it, before loading."
        )
    return found
