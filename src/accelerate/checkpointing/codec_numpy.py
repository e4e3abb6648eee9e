# SPDX-License-Identifier: Apache-2.0
"""NumPy's types for the codec: descriptions of dtypes, scalars, and the array classes that it keeps."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.json_text import JSONObject

DType = np.dtype[np.generic]
Array = NDArray[np.generic]

_KINDS = "?biufcmMSUV"
# Subclasses of an array whose class is no more than a view of its memory.
VIEWS: dict[str, type[Array]] = {"recarray": np.recarray, "matrix": np.matrix}


def describe_dtype(dtype: DType) -> str | JSONObject:
    """A dtype as JSON data: its text, or the fields of a structured one with their places.

    Raises ValueError for a dtype whose values are not in the array's own memory, or that another package defines.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": describe_dtype(base), "shape": list(shape)}
    if dtype.fields is not None and dtype.names is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        titles = [field[2] if len(field) > 2 else None for field in fields]
        if any(not (title is None or isinstance(title, str)) for title in titles):
            raise ValueError("a field's title is not text")
        return {
            "names": list(dtype.names),
            "formats": [describe_dtype(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "titles": titles,
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
            "record": dtype.type is np.record,
        }
    if dtype.hasobject or dtype.kind not in _KINDS or np.dtype(dtype.str) != dtype:
        raise ValueError(f"the dtype {dtype!r} has no plain form")
    if np.dtype(dtype.str).type is not dtype.type:
        return {"text": dtype.str, "char": dtype.char}  # a C type of the same width, such as `longlong` and `long`
    return dtype.str


def read_dtype(data: Any) -> DType:
    """The dtype of a description. Raises ValueError, TypeError or KeyError for anything else."""
    if isinstance(data, str):
        return _plain(data)
    if "base" in data:
        return np.dtype((read_dtype(data["base"]), extents(data["shape"])))
    if "text" in data:
        wanted = _plain(data["text"])
        twin: DType = np.dtype(str(data["char"])[:1]).newbyteorder(wanted.byteorder)
        return twin if twin == wanted else wanted
    fields: Any = {
        "names": [str(name) for name in data["names"]],
        "formats": [read_dtype(row) for row in data["formats"]],
        "offsets": [int(offset) for offset in data["offsets"]],
        "itemsize": int(data["itemsize"]),
    }
    if any(title is not None for title in data["titles"]):
        fields["titles"] = data["titles"]
    found: DType = np.dtype(fields, align=bool(data["aligned"]))
    return np.dtype((np.record, found)) if data["record"] else found


def _plain(text: str) -> DType:
    found = np.dtype(text)
    if found.hasobject or found.fields is not None or found.kind not in _KINDS:
        raise ValueError(f"{text!r} is not the dtype of plain values")
    return found


def extents(shape: object) -> tuple[int, ...]:
    """A shape read from a file. Raises ValueError unless it is a list of sizes."""
    if not isinstance(shape, list) or any(type(extent) is not int or extent < 0 for extent in shape):
        raise ValueError(f"{str(shape)[:80]} is not a shape")
    return tuple(shape)


def array_from_bytes(raw: bytes | bytearray, dtype: DType, shape: tuple[int, ...]) -> Array:
    """An array over `raw`. Raises ValueError unless that is exactly its size, before memory is taken."""
    count = math.prod(shape)
    if count * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are there for the shape {list(shape)} of {dtype}")
    if not raw:
        if max(shape, default=0) >= 1 << 62 or count >= 1 << 40:
            raise ValueError(f"the shape {list(shape)} has values without bytes")
        return np.empty(shape, dtype)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def encode_scalar(value: np.generic) -> JSONObject:
    """A NumPy scalar. Raises ValueError for one of a dtype that has no plain form."""
    if type(value) is np.str_:  # NumPy's own conversions leave out what follows a zero at the end
        return {"$": "npstr", "v": "".join(value)}
    if type(value) is np.bytes_:
        return {"$": "npbytes", "v": base64.b64encode(b"".join([value])).decode()}
    dtype = describe_dtype(value.dtype)
    return {"$": "npscalar", "dtype": dtype, "b64": base64.b64encode(value.tobytes()).decode()}


def _scalar(data: JSONObject) -> object:
    dtype = read_dtype(data["dtype"])
    raw = base64.b64decode(data["b64"])
    return array_from_bytes(raw, dtype, (1,))[0] if dtype.itemsize else np.zeros((), dtype)[()]


SCALARS: dict[str, Callable[[JSONObject], object]] = {
    "npscalar": _scalar,
    "npstr": lambda data: np.str_(data["v"]),
    "npbytes": lambda data: np.bytes_(base64.b64decode(data["v"])),
    "npdtype": lambda data: read_dtype(data["v"]),
    "npmasked": lambda data: np.ma.masked,
}
