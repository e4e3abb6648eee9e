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

from . import codec_numpy
from .dtypes import dtype_name, torch_dtype

_LONG = 4000  # bits; Python converts integers of up to 4300 digits from and to decimal text only
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))}


def encode_scalar(value: Any) -> Any:
    """The encoding of a scalar value; None for any other type. Raises ValueError for a value without an encoding."""
    kind = type(value)
    if kind is int:  # others were taken as JSON's own
        return {"$": "int", "v": hex(value)}
    if kind is float:
        return {"$": "float", "v": repr(value)}
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "v": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return codec_numpy.encode_scalar(value)
    if isinstance(value, np.dtype):
        return {"$": "npdtype", "v": codec_numpy.describe_dtype(value)}
    if kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if kind is torch.dtype:
        return {"$": "dtype", "v": dtype_name(value)}
    if kind is torch.device:
        return {"$": "device", "v": str(value)}
    if kind in (decimal.Decimal, uuid.UUID):
        return {"$": kind.__name__, "v": str(value)}
    if kind is fractions.Fraction:
        return {"$": "Fraction", "v": [hex(value.numerator), hex(value.denominator)]}
    if _PATHS.get(kind.__name__) is kind:
        return {"$": "path", "v": str(value), "kind": kind.__name__}
    if value is Ellipsis:
        return {"$": "Ellipsis"}
    return _encode_time(value)


def _encode_time(value: Any) -> Any:
    kind = type(value)
    if kind is datetime.date:
        return {"$": "date", "v": value.isoformat()}
    if kind is datetime.timedelta:
        return {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.timezone:
        return {"$": "timezone", "v": _encode_time(value.utcoffset(None))["v"], "name": value.tzname(None)}
    if kind is zoneinfo.ZoneInfo:
        if value.key is None:
            raise ValueError("a time zone without a key has no plain form")
        return {"$": "ZoneInfo", "v": value.key}
    if kind in (datetime.datetime, datetime.time):
        document = {"$": kind.__name__, "v": value.replace(tzinfo=None).isoformat()}
        if value.fold:
            document["fold"] = 1
        if value.tzinfo is not None:
            document["zone"] = _encode_time(value.tzinfo)
            if document["zone"] is None:
                raise ValueError(f"the time zone {value.tzinfo!r} has no plain form")
        return document
    return None


def is_plain_number(value: Any) -> bool:
    """Whether JSON holds an int or float as it is."""
    return math.isfinite(value) if type(value) is float else value.bit_length() <= _LONG


def _path(data: dict[str, Any]) -> pathlib.PurePath:
    if not isinstance(data["v"], str):
        raise ValueError("a path is text")
    return _PATHS.get(data.get("kind", ""), pathlib.Path)(data["v"])


def _timezone(data: dict[str, Any]) -> datetime.timezone:
    offset = datetime.timedelta(*data["v"])
    plain = datetime.timezone(offset)
    return plain if plain.tzname(None) == data["name"] else datetime.timezone(offset, data["name"])


def _moment(kind: Any) -> Callable[[dict[str, Any]], Any]:
    def read(data: dict[str, Any]) -> Any:
        zones = {"timezone": _timezone, "ZoneInfo": _zone}
        found = kind.fromisoformat(data["v"])
        if "zone" in data:
            found = found.replace(tzinfo=zones[data["zone"]["$"]](data["zone"]))
        return found.replace(fold=1) if data.get("fold") else found

    return read


def _zone(data: dict[str, Any]) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(data["v"])
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
        raise ValueError(f"the time zone {data['v']!r} is not known here: {error}") from error


SCALARS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **codec_numpy.SCALARS,
    "int": lambda data: int(data["v"], 16),
    "float": lambda data: float(data["v"]),
    "bytes": lambda data: base64.b64decode(data["v"], validate=True),
    "bytearray": lambda data: bytearray(base64.b64decode(data["v"], validate=True)),
    "complex": lambda data: complex(float(data["v"][0]), float(data["v"][1])),
    "range": lambda data: range(*data["v"]),
    "dtype": lambda data: torch_dtype(data["v"]),
    "device": lambda data: torch.device(data["v"]),
    "path": _path,
    "Decimal": lambda data: decimal.Decimal(data["v"]),
    "UUID": lambda data: uuid.UUID(data["v"]),
    "Fraction": lambda data: fractions.Fraction(int(data["v"][0], 16), int(data["v"][1], 16)),
    "Ellipsis": lambda data: Ellipsis,
    "datetime": _moment(datetime.datetime),
    "time": _moment(datetime.time),
    "date": lambda data: datetime.date.fromisoformat(data["v"]),
    "timedelta": lambda data: datetime.timedelta(*data["v"]),
    "timezone": _timezone,
    "ZoneInfo": _zone,
}
