# SPDX-License-Identifier: Apache-2.0
"""The page's charts as SVG, for reports that are read without scripts. Colours are those of `page/page.css`."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from .steps import Array
from .view import Curve

LEFT, RIGHT, TOP, BOTTOM = 62, 12, 8, 24
# The same colours as RAMP in `page/charts.js`: cividis.
RAMP = np.array(
    [
        [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116],
        [195, 179, 105], [225, 204, 85], [254, 232, 56],
    ]
)  # fmt: skip

Format = Callable[[float], str]


def ticks(low: float, high: float, count: float) -> list[float]:
    """At most about `count` round numbers from `low` to `high`."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    unit = power * next(step for step in (1, 2, 5, 10) if span / (power * step) <= count or step == 10)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [at * unit for at in range(first, last + 1)]


class Axes:
    """A chart: its size, and the places of steps and values."""

    def __init__(self, x: Array, width: int, height: int, scale: tuple[float, float] = (0.0, 1.0)) -> None:
        self.width = width
        self.height = height
        self.scale = scale
        half = (x[1] - x[0]) / 2 if len(x) > 1 else 0.5
        self.first: float = float(x[0] - half)
        self.last: float = float(x[-1] + half)

    def x(self, step: Array | float) -> Array:
        """Pixels from the left edge."""
        part = (np.asarray(step) - self.first) / max(self.last - self.first, 1e-9)
        return np.asarray(LEFT + part * (self.width - LEFT - RIGHT))

    def y(self, value: Array | float) -> Array:
        """Pixels from the upper edge, within the chart."""
        part = (np.asarray(value) - self.scale[0]) / (self.scale[1] - self.scale[0])
        return np.asarray(TOP + (1 - np.clip(part, 0, 1)) * (self.height - TOP - BOTTOM))

    def svg(self, title: str, content: Sequence[str], shown: Format | None) -> str:
        """The full picture, with grid lines and numbers. `title` is for those who cannot see it."""
        found = []
        if shown:
            for value in ticks(*self.scale, max(2, self.height / 34)):
                y = float(self.y(value))
                found.append(
                    f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
                    f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="end">{escape(shown(value))}</text>'
                )
        bottom = self.height - 6
        found.append(f'<text x="{LEFT - 8}" y="{bottom}" class="end">step</text>')
        for step in ticks(max(1.0, self.first), self.last, max(2, (self.width - LEFT) / 75)):
            x = float(self.x(step))
            if step == int(step) and LEFT <= x <= self.width - 4:
                place = "end" if x > self.width - 25 else "middle"
                found.append(f'<text x="{x:.1f}" y="{bottom}" class="{place}">{_step(int(step))}</text>')
        size = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {size} role="img"><title>{escape(title)}</title>{"".join([*found, *content])}</svg>'


def _step(step: int) -> str:
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if step >= max(limit, 100_000):
            return f"{step / limit:.6g}{unit}"
    return f"{step:,}"


def _points(x: Array, y: Array) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _pair(text: str) -> list[str]:
    return text.split(",")


def _runs(known: Array) -> list[slice]:
    """The ranges in which `known` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(int)))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def without_peaks(known: Array, high: float) -> float:
    """The end of an axis for durations: a few very long ones, such as a first step, do not flatten the rest."""
    usual = float(np.quantile(known, 0.9, method="lower"))
    return 1.5 * usual if len(known) >= 5 and high > 3 * usual > 0 else high


def line(
    title: str,
    x: Array,
    curve: Curve,
    shown: Format,
    width: int,
    height: int,
    zero: bool = False,
    peaks: bool = False,
) -> str:
    """A curve in front of the area between its extremes. `peaks`: a few high values may leave the picture."""
    known = curve.mean[np.isfinite(curve.mean)]
    ends = [values[np.isfinite(values)] for values in (curve.low, curve.high)]
    low = min(float(np.quantile(known, 0.005)), float(np.quantile(ends[0], 0.02)) if len(ends[0]) else math.inf)
    high = max(float(np.quantile(known, 0.995)), float(np.quantile(ends[1], 0.97)) if len(ends[1]) else -math.inf)
    high = without_peaks(known, high) if peaks else high
    low = min(0.0, low) if zero else low
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    axes = Axes(x, width, height, (low if zero and low == 0 else low - pad, high + pad))
    content = []
    for part in _runs(np.isfinite(curve.low) & np.isfinite(curve.high) & (curve.high > curve.low)):
        around = np.concatenate([axes.y(curve.high[part]), axes.y(curve.low[part])[::-1]])
        both = np.concatenate([axes.x(x[part]), axes.x(x[part])[::-1]])
        content.append(f'<polygon points="{_points(both, around)}" class="band"/>')
    for part in _runs(np.isfinite(curve.mean)):
        places = _points(axes.x(x[part]), axes.y(curve.mean[part]))
        content.append(f'<polyline points="{places}" class="curve"/>')
        # A value of its own has no line.
        if part.stop - part.start == 1 or len(x) <= width / 24:
            content += [
                f'<circle cx="{cx}" cy="{cy}" r="2.5" class="point"/>' for cx, cy in map(_pair, places.split())
            ]
    return axes.svg(title, content, shown)


def stack(title: str, x: Array, areas: dict[str, Array], shown: Format, width: int, height: int) -> str:
    """Areas on top of each other; `areas` are in the order from the axis upwards, with the names of their colours."""
    total = np.sum(list(areas.values()), axis=0)
    known = total[np.isfinite(total)]
    high = without_peaks(known, min(float(np.quantile(known, 0.98)) * 1.3, float(known.max()))) or 1.0
    axes, base, content = Axes(x, width, height, (0.0, high * 1.04)), np.zeros(len(x)), []
    edges = np.repeat(axes.x(np.append(x - (x[1] - x[0]) / 2 if len(x) > 1 else x - 0.5, axes.last)), 2)[1:-1]
    for name, values in areas.items():
        upper = base + values
        both = np.concatenate([np.repeat(axes.y(upper), 2), np.repeat(axes.y(base), 2)[::-1]])
        points = _points(np.concatenate([edges, edges[::-1]]), both)
        content.append(f'<polygon points="{points}" style="fill:var(--{name})"/>')
        base = upper
    return axes.svg(title, content, shown)


def heat(
    title: str, x: Array, rows: Sequence[tuple[int, int]], values: Array, slow: Array, named: set[int], width: int
) -> tuple[str, tuple[float, float]]:
    """A row of cells for each rank, with a line below slow steps. Rows with a rank in `named` have a mark.

    Returns:
        The picture, and the values of its first and last colour.
    """
    known = values[np.isfinite(values)]
    low = float(np.quantile(known, 0.02))
    high = max(without_peaks(known, float(np.quantile(known, 0.98))), low * 1.25)
    each = min(22.0, max(2.0, 360 / len(rows)))
    axes = Axes(x, width, round(TOP + BOTTOM + each * len(rows)))
    part = np.nan_to_num(np.clip((values - low) / max(high - low, 1e-12), 0, 1)) * (len(RAMP) - 1)
    at = np.minimum(part.astype(int), len(RAMP) - 2)
    colors = RAMP[at] + (RAMP[at + 1] - RAMP[at]) * (part - at)[..., None]
    pixels = np.dstack([np.rint(colors), np.where(np.isfinite(values), 255, 0)]).astype("u1")
    content = [
        f'<image x="{LEFT}" y="{TOP}" width="{width - LEFT - RIGHT}" height="{each * len(rows):.1f}" '
        f'preserveAspectRatio="none" class="cells" href="data:image/png;base64,{_png(pixels)}"/>'
    ]
    skip = math.ceil(14 / each)
    skip = next((step for step in (1, 2, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128) if step >= skip), skip)
    is_slow = [any(first <= rank <= last for rank in named) for first, last in rows]
    # The names of slow ranks come first, and others where there is space.
    labels: list[int] = []
    for row in sorted(range(len(rows)), key=lambda row: (not is_slow[row], row)):
        if (is_slow[row] or row % skip == 0) and all(abs(other - row) * each >= 13 for other in labels):
            labels.append(row)
    half = (x[1] - x[0]) / 2 if len(x) > 1 else 0.5
    for row, (first, last) in enumerate(rows):
        bottom = TOP + each * (row + 1)
        if each > 8:
            content.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{bottom:.1f}" y2="{bottom:.1f}" class="gap"/>')
        for found in _runs(slow[row]):
            left, right = float(axes.x(x[found][0] - half)), float(axes.x(x[found][-1] + half))
            thick = min(4.0, each / 3)
            content.append(
                f'<rect x="{left:.1f}" y="{bottom - thick:.1f}" width="{max(1.0, right - left):.1f}" '
                f'height="{thick:.1f}" class="slow"/>'
            )
        if row in labels:
            name = str(first) if first == last else f"{first}–{last}"
            mark = ' class="end slow"' if is_slow[row] else ' class="end"'
            label = ("▲ " if is_slow[row] else "") + name
            content.append(f'<text x="{LEFT - 8}" y="{bottom - each / 2 + 4:.1f}"{mark}>{label}</text>')
    return axes.svg(title, content, None), (low, high)


def _png(pixels: Array) -> str:
    """An image of 8-bit red, green, blue and opacity as base64 text."""
    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(raw, 9)), chunk(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
