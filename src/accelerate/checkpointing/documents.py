# SPDX-License-Identifier: Apache-2.0
"""Documents of a checkpoint: JSON with its tensors in a safetensors file next to it, checked when they are read.

The JSON has a small set of typed encodings, tensors by reference, no pickle. What JSON has itself (None, bool, int,
finite float, str, list, dict with str keys) stays as it is. Everything else is an object with the key "$" that names
its type. Decoding never imports a module and never calls code that a file names: enums and namedtuples are taken from
modules that the program has imported itself.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import enum
import json
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core import json_text
from ..core.bucket_path import BucketPath
from ..core.errors import CheckpointError
from ..core.files import reason
from ..core.json_text import JSONObject
from ..core.tensor_files import (
    NAMES,
    CorruptFile,
    dtype_name,
    read_header,
    tensor_dtype,
    torch_dtype,
)
from .files import (
    BlockIO,
    Memory,
    Segment,
    host_view,
    memory_of,
    read_into,
    read_tensors,
    require_plain_tensor,
    segments,
)
from .layout import CorruptCheckpoint, Manifest

_INLINE = 64  # bytes: a step counter is not worth an entry in a tensor file
_LONG = 4000  # bits; Python converts integers of up to 4300 digits from and to decimal text only
_ARRAY_KINDS = "biufcmMSU"  # NumPy's kinds of dtypes whose values are in the array's own memory
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind
    for kind in (
        list,
        dict,
        set,
        frozenset,
        tuple,
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        deque,
        OrderedDict,
        Counter,
    )
}
_SEQUENCES: dict[str, Callable[[Any], object]] = {
    "tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset
}  # fmt: skip
_REMEDY = (
    "Return plain data from `state_dict()`: numbers, strings, bytes, lists, tuples, dicts, sets, dates, paths, enums, "
    "namedtuples, tensors or numpy arrays; layout='compat' writes the API's own pickled files instead."
)
# What reading an entry of a wrong form raises.
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


class TensorSink:
    """Collects the tensors of one document under keys; the same memory twice is one entry."""

    def __init__(self, inline: int = _INLINE) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.inline = inline
        self._keys: dict[Memory, str] = {}

    def add(self, path: str, tensor: torch.Tensor) -> str:
        """Add a tensor, and return its key. A tensor with the same memory is stored once."""
        memory = memory_of(tensor)
        if memory not in self._keys:
            if path not in self.tensors:
                key = path
            else:
                key = f"{path}#{len(self.tensors)}"
            self.tensors[key] = tensor
            self._keys[memory] = key
        return self._keys[memory]


def _to_text(raw: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(raw).decode()


def _to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _iso_text(value: datetime.datetime | datetime.time) -> str:
    if not isinstance(value.tzinfo, datetime.timezone | None):
        raise ValueError(
            f"the time zone is a {type(value.tzinfo).__qualname__}, not a datetime.timezone"
        )
    return value.isoformat()


# By type: the tag, the JSON form of a value, which is the entry "v", and the value of an entry.
# Integers and floats that JSON has itself were taken before. str() leaves out a zero at the end.
_SCALARS: dict[type, tuple[str, Callable[[Any], object], Callable[[JSONObject], object]]] = {
    int: ("int", hex, lambda data: int(data["v"], 16)),
    float: ("float", repr, lambda data: float(data["v"])),
    complex: (
        "complex", lambda value: [repr(value.real), repr(value.imag)], lambda data: complex(*map(float, data["v"]))
    ),
    bytes: ("bytes", _to_text, lambda data: _to_bytes(data["v"])),
    bytearray: ("bytearray", _to_text, lambda data: bytearray(_to_bytes(data["v"]))),
    np.str_: ("npstr", "".join, lambda data: np.str_(data["v"])),
    np.bytes_: ("npbytes", lambda value: _to_text(b"".join([value])), lambda data: np.bytes_(_to_bytes(data["v"]))),
    torch.dtype: ("dtype", dtype_name, lambda data: torch_dtype(data["v"])),
    torch.device: ("device", str, lambda data: torch.device(data["v"])),
    type(pathlib.Path()): ("path", str, lambda data: pathlib.Path(data["v"])),
    datetime.datetime: ("datetime", _iso_text, lambda data: datetime.datetime.fromisoformat(data["v"])),
    datetime.time: ("time", _iso_text, lambda data: datetime.time.fromisoformat(data["v"])),
    datetime.date: ("date", datetime.date.isoformat, lambda data: datetime.date.fromisoformat(data["v"])),
    datetime.timedelta: (
        "timedelta", lambda value: [value.days, value.seconds, value.microseconds],
        lambda data: datetime.timedelta(*data["v"]),
    ),
}  # fmt: skip
_READERS = {tag: read for tag, _, read in _SCALARS.values()}


def encode(value: object, sink: TensorSink, path: str) -> object:
    """`value` as data for `json.dumps`; its tensors go to `sink` under their paths.

    Raises CheckpointError that names the path inside the object for a type that has no encoding, and for a container
    that contains itself or is nested too deep.
    """
    try:
        return _encode(value, sink, path)
    except RecursionError:
        raise CheckpointError(
            f"{path}: the object contains itself or is nested too deeply to be saved"
        ) from None


def _encode(value: Any, sink: TensorSink, path: str) -> object:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if (kind is float and math.isfinite(value)) or (kind is int and value.bit_length() <= _LONG):
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, sink, path)
    try:
        if isinstance(value, enum.Enum):
            return {
                "$": "enum",
                "type": _type_name(kind),
                "v": _encode(value.value, sink, f"{path}.value"),
            }
        if kind in _SCALARS:
            tag, encode_scalar, _ = _SCALARS[kind]
            return {"$": tag, "v": encode_scalar(value)}
        if isinstance(value, np.generic):
            return {
                "$": "npscalar",
                "dtype": _array_dtype(value.dtype.str).str,
                "b64": _to_text(value.tobytes()),
            }
        if kind is np.ndarray:
            return _encode_array(value, sink, path)
        if kind is list:
            return _encode_items(value, sink, path)
        if kind in (tuple, torch.Size, set, frozenset):
            if kind in (set, frozenset):
                items = sorted(value, key=repr)
            else:
                items = value
            return {"$": kind.__name__.lower(), "v": _encode_items(items, sink, path)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {
                "$": "namedtuple",
                "type": _type_name(kind),
                "v": _encode_items(value, sink, path),
            }
        if kind is deque:
            return {"$": "deque", "maxlen": value.maxlen, "v": _encode_items(value, sink, path)}
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return _encode_mapping(value, sink, path)
        raise ValueError("its type has no plain form")
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved: {error}. {_REMEDY}"
        ) from None


def _encode_items(values: Iterable[object], sink: TensorSink, path: str) -> list[object]:
    return [_encode(item, sink, f"{path}[{index}]") for index, item in enumerate(values)]


def _encode_mapping(value: Mapping[Any, object], sink: TensorSink, path: str) -> JSONObject:
    kind = type(value)
    if kind is dict and all(type(key) is str for key in value) and "$" not in value:
        return {key: _encode(item, sink, f"{path}.{key}") for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        encoded_key = _encode(key, sink, f"{path} (a key)")
        encoded_item = _encode(item, sink, f"{path}[{key!r}]")
        pairs.append([encoded_key, encoded_item])
    document: JSONObject = {"$": kind.__name__, "v": pairs}
    if isinstance(value, defaultdict):
        factory = value.default_factory
        document["factory"] = None
        if factory is not None:
            document["factory"] = getattr(factory, "__name__", "")
            if _FACTORIES.get(document["factory"]) is not factory:
                raise ValueError(f"its factory is {factory!r}")
    if kind is OrderedDict and vars(value):  # the versions in a module's state dict
        document["attributes"] = _encode(dict(vars(value)), sink, f"{path} (attributes)")
    return document


def _encode_tensor(value: torch.Tensor, sink: TensorSink, path: str) -> JSONObject:
    require_plain_tensor(value, path)
    document = _encode_values(value.detach(), sink, path)
    if isinstance(value, torch.nn.Parameter):
        return {"$": "parameter", "requires_grad": value.requires_grad, "v": document}
    if value.requires_grad:
        return {"$": "leaf", "v": document}
    return document


def _encode_values(value: torch.Tensor, sink: TensorSink, path: str) -> JSONObject:
    if value.dtype is torch.complex128:  # safetensors has no such dtype
        return {
            "$": "complex_tensor",
            "v": _encode_values(torch.view_as_real(value.resolve_conj()), sink, path),
        }
    if value.dtype not in NAMES:
        raise CheckpointError(
            f"{path}: a tensor of dtype {value.dtype} cannot be saved. Convert it."
        )
    if value.nbytes > sink.inline:
        return {"$": "tensor", "ref": sink.add(path, value)}
    raw = value.cpu().resolve_conj().resolve_neg().contiguous()
    return {
        "$": "tensor",
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "b64": _to_text(host_view(raw) if raw.numel() else b""),
    }


def _encode_array(value: NDArray[Any], sink: TensorSink, path: str) -> JSONObject:
    dtype = _array_dtype(value.dtype.str)
    if value.size:
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    else:
        raw = np.empty(0, np.uint8)
    # torch warns of read-only memory
    if not raw.flags.writeable:
        raw = raw.copy()
    data = _encode_values(torch.from_numpy(raw), sink, path)
    return {"$": "ndarray", "dtype": dtype.str, "shape": list(value.shape), "bytes": data}


def _array_dtype(description: Any) -> np.dtype[Any]:
    """A dtype by NumPy's text for it. Raises ValueError unless its values are plain numbers, times or text."""
    if isinstance(description, str):
        dtype = np.dtype(description)
    else:
        dtype = None
    if dtype is None or dtype.kind not in _ARRAY_KINDS or not dtype.itemsize:
        raise ValueError(
            f"the NumPy dtype {str(description)[:80]} is not that of plain numbers, times or text"
        )
    return dtype


def decode(
    data: object, tensors: Mapping[str, torch.Tensor], where: str, unshare: bool = False
) -> Any:
    """What `encode` was given. `where` names the file in errors.

    Two references to one tensor give the same tensor; with `unshare`, each gives a separate copy.
    Raises CheckpointError for an encoding, an enum or a tensor that is not known here.
    """
    try:
        return _Decoder(tensors, where, unshare).decode(data)
    except RecursionError:
        raise CheckpointError(f"{where}: it is nested too deeply") from None


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str, unshare: bool) -> None:
        self.tensors = tensors
        self.where = where
        self.unshare = unshare
        self.used: set[str] = set()

    def decode(self, data: object) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        if "$" not in data:
            return {key: self.decode(item) for key, item in data.items()}
        try:
            return self._typed(data["$"], data)
        except (RecursionError, CheckpointError):
            raise
        except MALFORMED as error:
            why = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(
                f"{self.where}: an entry of type {str(data['$'])[:80]!r} cannot be read: {why}"
            ) from error

    def _typed(self, tag: object, data: JSONObject) -> object:
        if tag in _READERS:
            return _READERS[tag](data)
        if tag == "tensor":
            return self._tensor(data)
        if tag == "complex_tensor":
            parts = self.decode(data["v"])
            return torch.view_as_complex(parts.contiguous())
        if tag == "parameter":
            tensor = self.decode(data["v"])
            return torch.nn.Parameter(tensor, requires_grad=bool(data["requires_grad"]))
        if tag == "leaf":
            tensor = self.decode(data["v"])
            return tensor.detach().requires_grad_()
        if tag == "ndarray":
            raw = self.decode(data["bytes"]).numpy()
            dtype = _array_dtype(data["dtype"])
            return raw.view(dtype).reshape(data["shape"])
        if tag == "npscalar":
            dtype = _array_dtype(data["dtype"])
            return np.frombuffer(_to_bytes(data["b64"]), dtype, 1)[0]
        if tag == "enum":
            kind = self._known_type(data["type"], enum.Enum)
            return kind(self.decode(data["v"]))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self._items(data))
        if tag == "deque":
            return deque(self._items(data), maxlen=data["maxlen"])
        if tag == "namedtuple":
            kind = self._known_type(data["type"], tuple)
            values = self._items(data)
            if len(values) != len(kind._fields):
                raise ValueError(f"{len(values)} values for the fields {', '.join(kind._fields)}")
            return tuple.__new__(kind, values)
        if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
            return self._mapping(tag, data)
        raise CheckpointError(
            f"{self.where}: it holds an entry of type {str(tag)[:80]!r}, which this version "
            f"cannot read. Another version of accelerate or another program wrote it. {_REMEDY}"
        )

    def _items(self, data: JSONObject) -> list[Any]:
        values = self.decode(data["v"])
        if not isinstance(values, list):
            raise ValueError(f"a list is expected, not {str(values)[:80]}")
        return values

    def _mapping(self, tag: str, data: JSONObject) -> object:
        items = {self.decode(key): self.decode(item) for key, item in data["v"]}
        if tag == "defaultdict":
            return defaultdict(
                None if data["factory"] is None else _FACTORIES[data["factory"]], items
            )
        if tag == "OrderedDict":
            ordered: OrderedDict[object, object] = OrderedDict(items)
            vars(ordered).update(self.decode(data.get("attributes", {})))
            return ordered
        if tag == "Counter":
            return Counter(items)
        return items

    def _tensor(self, data: JSONObject) -> torch.Tensor:
        if "ref" in data:
            tensor = self.tensors[data["ref"]]
            if self.unshare and data["ref"] in self.used:
                tensor = tensor.clone()
            self.used.add(data["ref"])
            return tensor
        dtype = tensor_dtype(data["dtype"])
        raw = bytearray(_to_bytes(data["b64"]))
        shape = tuple(data["shape"])
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()

    def _known_type(self, name: object, base: type) -> Any:
        """A type by its module and name, taken only from modules that the program has imported itself."""
        kind = _lookup(name) if isinstance(name, str) else None
        fits = isinstance(kind, type) and issubclass(kind, base)
        if not fits or (base is tuple and not isinstance(getattr(kind, "_fields", None), tuple)):
            raise CheckpointError(
                f"{self.where}: it holds a value of the type {str(name)[:200]}, which is not "
                "defined here. Before loading, import the module "
                f"{str(name).partition(':')[0][:200]}, which defines it."
            )
        return kind


def _type_name(kind: type) -> str:
    """The name under which a type is found again. Raises ValueError for one that is defined in a function."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _lookup(name) is not kind:
        raise ValueError(
            "its type cannot be imported by this name: define it at the top level of a module"
        )
    return name


def _lookup(name: str) -> Any:
    module, _, qualname = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if hasattr(value, "__dict__"):
            value = vars(value).get(part)
        else:
            value = None
    return value


def documents(name: str, value: object, root: str, inline: int = 64) -> dict[str, list[Segment]]:
    """{file name: segments} of a JSON document, and of a tensor file if the value contains tensors."""
    sink = TensorSink(inline)
    data = encode(value, sink, root)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    files: dict[str, list[Segment]] = {f"{name}.json": [text.encode()]}
    if sink.tensors:
        files[f"{name}.safetensors"] = segments(sink.tensors)
    return files


def read_document(
    io: BlockIO, folder: Path, name: str, manifest: Manifest, unshare: bool = False
) -> Any:
    """The value that `documents` wrote, its files checked against the manifest in the same reading."""
    text_path = folder / f"{name}.json"
    with damage(text_path):
        text = _read_text(io, folder, name, manifest)
    path = folder / f"{name}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    if path.name in manifest.files:
        with damage(path):
            tensors = read_tensors(io, path, manifest.files[path.name])
    with damage(text_path):
        data = json_text.parse(text)
        return decode(data, tensors, str(text_path), unshare)


def read_document_into(
    io: BlockIO, folder: Path, name: str, manifest: Manifest, current: object, root: str
) -> Callable[[], object]:
    """Do the same as `read_document` in two steps: check the files now, and return a function that reads them.

    The function returns the saved value. It reads tensors into those of the `current` value if that has a tensor of
    the same shape and dtype at the same place.
    """
    text_path = folder / f"{name}.json"
    path = folder / f"{name}.safetensors"
    sink = TensorSink()
    encode(current, sink, root)
    is_in_bucket = isinstance(folder, BucketPath)
    if not sink.tensors or path.name not in manifest.files or is_in_bucket:
        # From a bucket it is read once.
        value = read_document(io, folder, name, manifest, unshare=True)
        return lambda: value
    with damage(text_path):
        text = _read_text(io, folder, name, manifest)
        data = json_text.parse(text)
    with damage(path):
        held = io.hold(path)
        io.check(held, manifest.files[path.name])
        entries = read_header(held).entries

    def read() -> Any:
        targets = {}
        for key, entry in entries.items():
            target = sink.tensors.get(key)
            fits = False
            if target is not None:
                fits = target.dtype == entry.dtype and tuple(target.shape) == entry.shape
            if target is None or not fits:
                target = torch.empty(entry.shape, dtype=entry.dtype)
            targets[key] = target
        with damage(path):
            read_into(io, held, targets)
        with damage(text_path):
            return decode(data, targets, str(text_path), unshare=True)

    return read


def _read_text(io: BlockIO, folder: Path, name: str, manifest: Manifest) -> bytearray:
    record = manifest.files.get(f"{name}.json")
    if record is None:
        raise CorruptCheckpoint(f"{folder} does not contain {name}.json")
    text = bytearray(record.size)
    io.read(folder / f"{name}.json", [memoryview(text)], record)
    return text


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Convert errors from reading a damaged file to a CorruptCheckpoint that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except (CorruptFile, OSError, *MALFORMED) as error:
        if isinstance(error, KeyError):
            why = f"it does not have the entry {error}"
        else:
            why = reason(error)[:500]
        raise CorruptCheckpoint(f"{path} is damaged: {why}") from error
