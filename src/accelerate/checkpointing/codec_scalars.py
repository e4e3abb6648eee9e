# SPDX-License-Identifier: Apache-2.0
"""Scalar values for the codec: numbers, bytes, dates, paths, ranges, dtypes and devices."""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import math
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..core.dtypes import dtype_name, torch_dtype
from ..core.json_text import JSONObject
from . import codec_numpy

_LONG = 4000  # bits; Python converts integers of up to 4300 digits from and to decimal text only
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))}


def encode_scalar(value: Any) -> JSONObject | None:
    """The encoding of a scalar value; None for any other type. Raises ValueError for a value without an encoding."""
    kind = type(value)
    if kind in _ROWS:
        tag, encode, _ = _ROWS[kind]
        return {"$": tag, "v": encode(value)}
    if isinstance(value, np.generic):
        return codec_numpy.encode_scalar(value)
    if isinstance(value, np.dtype):
        return {"$": "npdtype", "v": codec_numpy.describe_dtype(value)}
    if _PATHS.get(kind.__name__) is kind:
        return {"$": "path", "v": str(value), "kind": kind.__name__}
    if value is Ellipsis:
        return {"$": "Ellipsis"}
    if kind is datetime.timezone:
        offset = value.utcoffset(None)
        return {"$": "timezone", "v": [offset.days, offset.seconds, offset.microseconds], "name": value.tzname(None)}
    if kind in (datetime.datetime, datetime.time):
        return _encode_moment(value)
    return None


def _encode_moment(value: datetime.datetime | datetime.time) -> JSONObject:
    document: JSONObject = {"$": type(value).__name__, "v": value.replace(tzinfo=None).isoformat()}
    if value.fold:
        document["fold"] = 1
    if value.tzinfo is not None:
        document["zone"] = encode_scalar(value.tzinfo)
        if document["zone"] is None:
            raise ValueError(f"the time zone {value.tzinfo!r} has no plain form")
    return document


def _zone_key(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None:
        raise ValueError("a time zone without a key has no plain form")
    return zone.key


def is_plain_number(value: Any) -> bool:
    """Whether JSON holds an int or float as it is."""
    return math.isfinite(value) if type(value) is float else value.bit_length() <= _LONG


def _path(data: JSONObject) -> pathlib.PurePath:
    if not isinstance(data["v"], str):
        raise ValueError("a path is text")
    return _PATHS.get(data.get("kind", ""), pathlib.Path)(data["v"])


def _timezone(data: JSONObject) -> datetime.timezone:
    offset = datetime.timedelta(*data["v"])
    plain = datetime.timezone(offset)
    return plain if plain.tzname(None) == data["name"] else datetime.timezone(offset, data["name"])


def _moment(kind: Any) -> Callable[[JSONObject], object]:
    def read(data: JSONObject) -> object:
        found = kind.fromisoformat(data["v"])
        if "zone" in data:
            found = found.replace(tzinfo=_ZONES[data["zone"]["$"]](data["zone"]))
        return found.replace(fold=1) if data.get("fold") else found

    return read


def _zone(key: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
        raise ValueError(f"the time zone {key!r} is not known here: {error}") from error


def _text(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# By type: its tag, and the functions between a value and its JSON form, which is the entry "v".
_ROWS: dict[type, tuple[str, Callable[[Any], object], Callable[[Any], object]]] = {
    int: ("int", hex, lambda text: int(text, 16)),  # integers and floats that JSON has itself were taken before
    float: ("float", repr, float),
    bytes: ("bytes", _text, _bytes),
    bytearray: ("bytearray", _text, lambda text: bytearray(_bytes(text))),
    complex: ("complex", lambda one: [repr(one.real), repr(one.imag)], lambda v: complex(float(v[0]), float(v[1]))),
    torch.dtype: ("dtype", dtype_name, torch_dtype),
    torch.device: ("device", str, torch.device),
    decimal.Decimal: ("Decimal", str, decimal.Decimal),
    uuid.UUID: ("UUID", str, uuid.UUID),
    fractions.Fraction: (
        "Fraction",
        lambda one: [hex(one.numerator), hex(one.denominator)],
        lambda v: fractions.Fraction(int(v[0], 16), int(v[1], 16)),
    ),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (
        "timedelta", lambda one: [one.days, one.seconds, one.microseconds], lambda v: datetime.timedelta(*v)
    ),
    zoneinfo.ZoneInfo: ("ZoneInfo", _zone_key, _zone),
}  # fmt: skip
_ZONES = {"timezone": _timezone, "ZoneInfo": lambda data: _zone(data["v"])}


def _decoder(decode: Callable[[Any], object]) -> Callable[[JSONObject], object]:
    return lambda data: decode(data["v"])


SCALARS: dict[str, Callable[[JSONObject], object]] = {
    **codec_numpy.SCALARS,
    **{tag: _decoder(decode) for tag, _, decode in _ROWS.values()},
    "path": _path,
    "Ellipsis": lambda data: Ellipsis,
    "datetime": _moment(datetime.datetime),
    "time": _moment(datetime.time),
    "timezone": _timezone,
}
