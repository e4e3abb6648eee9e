# SPDX-License-Identifier: Apache-2.0
"""Write `docs/comparison.md`, its pictures and the table of the README from the newest figures of `make bench`.

    python tools/comparison.py              the newest JSON file of benchmarks/results
    python tools/comparison.py --check      fail if the page is not that of the newest file

The pictures are SVG, written here: the page needs no plotting library, and a change of a figure is a change of a line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
IMAGES = PROJECT / "docs/images"
# The table of the README is between these lines.
START, END = "<!-- written by tools/comparison.py -->", "<!-- end of the table -->"
FONT = 'font-family="sans-serif" font-size="13"'
OURS, PEER, RAW = "#2b6cb0", "#b7b7b7", "#c05621"
RANKS = {
    "fsdp step": "FSDP2",
    "tensor step": "tensor parallel",
    "pipeline step, gpipe": "pipeline, GPipe",
    "pipeline step, 1f1b": "pipeline, 1F1B",
}

# What the README shows: what one has, what one gets, the benchmark, and how its figure is shown.
CLAIMS = (
    ("a training loop in plain PyTorch", "the same loop in every layout; added to a step", "step", "added"),
    ("`torchrun` on two CPU processes", "time to the first line of the script, relative to it", "launch two", "ratio"),
    ("a `DataLoader`", "a shard for each process, a position to resume at", "loader: samples, batch 64", "ratio"),
    ("`gather` of one flat tensor", "`gather` of a nested batch of 8 tensors", "gather nested", "ratio"),
    ("`fully_shard` by hand, 2 ranks", "FSDP2 by an option", "fsdp step, 2 ranks", "ratio"),
    ("`parallelize_module` by hand, 2 ranks", "tensor parallelism by an option", "tensor step, 2 ranks", "ratio"),
    ("stages and schedule by hand, 2 ranks", "a pipeline by an option", "pipeline step, gpipe, 2 ranks", "ratio"),
    ("`torch.save` and fsync, 1.2 GB", "a checkpoint that is complete or absent", "checkpoint save", "ratio"),
    ("reading the 1.2 GB from disk", "a load that checks everything before", "checkpoint load", "ratio"),
)


def claims(figures: dict[str, Any], date: str) -> str:
    """Return the table of the README."""
    files = {name: script.file for script in scripts() for name in script.rows}
    lines = [f"| you have | you get | measured on {date} | command |", "|---|---|---|---|"]
    for have, get, name, metric in CLAIMS:
        if name in figures and "ours" in figures[name]:
            command = f"`python benchmarks/run.py --only {files[name]}`"
            lines.append(f"| {have} | {get} | {value(figures[name]['ours'], metric)} | {command} |")
    return "\n".join(lines)


def scripts() -> list[Any]:
    """Return the table of benchmarks of `benchmarks/run.py`."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", PROJECT / "benchmarks/run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.SCRIPTS)


def newest() -> Path:
    """Return the newest file of figures, by the date in its name."""
    return max((PROJECT / "benchmarks/results").glob("20*.json"), key=lambda path: path.name)


def svg(width: int, height: int, parts: list[str]) -> str:
    """Return a picture on a white background, with the text in the page's size."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def text(x: float, y: float, content: str, anchor: str = "start", color: str = "#222") -> str:
    """Return a line of text; `anchor` is start, middle or end."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{escape(content)}</text>'


def bars(rows: list[tuple[str, float, float | None]], largest: float = 2.0) -> str:
    """Draw ratios to plain PyTorch: ours, and the peer's where it has one. Longer bars end at `largest`."""
    left, scale, step = 330, 340 / largest, 38
    height = 34 + step * len(rows)
    parts = [text(left, 16, "ours", color=OURS), text(left + 45, 16, "peer", color="#777")]
    parts.append(text(left + scale, 16, "plain PyTorch = 1", "middle", RAW))
    for number, (title, own, peer) in enumerate(rows):
        y = 28 + step * number
        parts.append(text(left - 8, y + 18, title, "end"))
        for offset, value, color in ((0, own, OURS), (15, peer, PEER)):
            if value is not None:
                length = max(scale * min(value, largest), 1)
                parts.append(f'<rect x="{left}" y="{y + offset}" width="{length:.1f}" height="13" fill="{color}"/>')
                parts.append(text(left + length + 5, y + offset + 11, f"{value:.2f}x"))
    x = left + scale
    parts.append(f'<line x1="{x:g}" y1="22" x2="{x:g}" y2="{height - 4}" stroke="{RAW}" stroke-dasharray="4 3"/>')
    return svg(740, height, parts)


def growth(figures: dict[str, Any]) -> str | None:
    """Draw the time of a step on 2 and on 4 ranks, of each layout that was measured on both."""
    series = []
    for name, title in RANKS.items():
        found = [figures.get(f"{name}, {ranks} ranks", {}).get("ours") for ranks in (2, 4)]
        if all(found):
            series.append((title, [(item["raw"], item["own"]) for item in found]))
    if not series:
        return None
    largest = max(value for _, points in series for pair in points for value in pair)
    parts = [text(60, 18, "ms per step: by hand with plain PyTorch", color=RAW), text(330, 18, "ours", color=OURS)]
    for number, (title, points) in enumerate(series):
        x = 60 + number * 165
        parts += [text(x + 60, 232, title, "middle"), text(x + 20, 213, "2 ranks", "middle", "#777")]
        parts.append(text(x + 100, 213, "4 ranks", "middle", "#777"))
        for which, color in ((0, RAW), (1, OURS)):
            y = [195 - 150 * pair[which] / largest for pair in points]
            parts.append(
                f'<polyline points="{x + 20},{y[0]:.1f} {x + 100},{y[1]:.1f}" fill="none" '
                f'stroke="{color}" stroke-width="2"/>'
            )
            for place, pair, height in zip((x + 20, x + 100), points, y, strict=True):
                parts.append(f'<circle cx="{place}" cy="{height:.1f}" r="3" fill="{color}"/>')
                above = pair[which] >= pair[1 - which]
                parts.append(text(place, height + (-8 if above else 17), f"{pair[which]:.0f}", "middle", color))
    return svg(740, 245, parts)


def sizes(figures: dict[str, Any]) -> str | None:
    """Draw how the time relative to plain PyTorch changes with parameters, samples and tensors."""
    parts, shown = [], 0
    for what, unit in (("step", "parameters"), ("first batch", "samples"), ("gather", "tensors")):
        found = [(re.fullmatch(rf"growth: {what}, (\d+) {unit}", name), item) for name, item in figures.items()]
        points = sorted((int(match[1]), item["ours"]["ratio"]) for match, item in found if match and "ours" in item)
        if not points:
            continue
        x = 30 + 235 * shown
        shown += 1
        parts.append(text(x + 100, 222, f"{what}: number of {unit}", "middle"))
        one = 190 - 80
        parts.append(f'<line x1="{x}" y1="{one}" x2="{x + 200}" y2="{one}" stroke="{RAW}" stroke-dasharray="4 3"/>')
        places = [(x + 20 + 80 * n, 190 - 80 * min(ratio, 2.0)) for n, (_, ratio) in enumerate(points)]
        line = " ".join(f"{left},{top:.1f}" for left, top in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="2"/>')
        for (left, top), (count, ratio) in zip(places, points, strict=True):
            parts.append(f'<circle cx="{left}" cy="{top:.1f}" r="3" fill="{OURS}"/>')
            parts += [
                text(left, top - 8, f"{ratio:.2f}x", "middle", OURS),
                text(left, 205, f"{count:,}", "middle", "#777"),
            ]
    return svg(740, 235, parts) if parts else None


def value(result: dict[str, Any] | None, metric: str) -> str:
    """Return a figure as the table shows it."""
    if result is None:
        return "-"
    if metric == "ratio":
        return f"{result['ratio']:.2f}x"
    return f"{result['added']:+.1f} {result['unit']}" if metric == "added" else f"{result['own']:.1f} {result['unit']}"


def write(path: Path) -> dict[Path, str]:
    """Return the contents of the page and of its pictures, by file."""
    content = json.loads(path.read_text())
    figures, machine = content["figures"], content["machine"]
    table, ratios, seen = [], [], set()
    for script in scripts():
        command = f"`python benchmarks/run.py --only {script.file}`"
        for name, row in script.rows.items():
            by_package = figures.get(name)
            if not by_package or "ours" not in by_package:
                continue
            ours, peer = by_package["ours"], by_package.get("peer")
            raw = "-" if ours["raw"] is None else f"{ours['raw']:.1f} {ours['unit']}"
            cells = (
                row.title,
                raw,
                value(peer, row.metric),
                value(ours, row.metric),
                "" if command in seen else command,
            )
            table.append(f"| {' | '.join(cells)} |")
            seen.add(command)
            if row.metric == "ratio" and not name.startswith(("import", "growth", "checkpoint verify")):
                ratios.append((name, ours["ratio"], peer["ratio"] if peer else None))
    date = path.name[:10]
    about = ", ".join(f"{key} {item}" for key, item in machine.items() if item is not None)
    pictures = {IMAGES / "ratios.svg": bars(ratios)}
    lines = [
        "# Comparison",
        "",
        "<!-- Written by tools/comparison.py from the newest JSON file of benchmarks/results. -->",
        "",
        f"These figures were measured on {date} ({about}). The file is",
        f"[`{path.stem}.md`](../benchmarks/results/{path.stem}.md). `make bench` measures all of them again, and",
        "`python tools/comparison.py` writes this page. [Benchmarks](../benchmarks/README.md) describes the method.",
        "",
        "*Plain PyTorch* is the same work without this package. The *peer* is Hugging Face's accelerate 1.15.0. Each",
        "package takes turns with plain PyTorch in one process, so compare ratios, not times.",
        "",
        "## Time relative to plain PyTorch",
        "",
        "Less is faster. Bars that are longer than the picture are cut; the number is the ratio.",
        "",
        "![Bars: the ratio of each benchmark to plain PyTorch, for this package and for the peer](images/ratios.svg)",
        "",
    ]
    if (picture := growth(figures)) is not None:
        pictures[IMAGES / "ranks.svg"] = picture
        lines += [
            "## More ranks",
            "",
            "The time of a training step on 2 and on 4 ranks. All ranks share the cores of the machine above, so",
            "a step with twice the ranks takes longer. Between the lines is what this package adds or saves.",
            "",
            "![Lines: milliseconds per step on 2 and 4 ranks, by hand and with this package](images/ranks.svg)",
            "",
        ]
    if (picture := sizes(figures)) is not None:
        pictures[IMAGES / "sizes.svg"] = picture
        lines += [
            "## More parameters, samples and tensors",
            "",
            "Time relative to plain PyTorch (the dashed line) for a step of a model with more parameters, for the",
            "first batch of a shuffled epoch over more samples, and for a `gather` of more tensors on two ranks.",
            "",
            "![Lines: ratios to plain PyTorch by number of parameters, samples and tensors](images/sizes.svg)",
            "",
        ]
    lines += [
        "## All figures",
        "",
        "A figure with `+` is the time that a package adds to plain PyTorch. A figure with `x` is its time divided by",
        "that of plain PyTorch. Other figures are the time or the size itself. `-` means that it was not measured. In",
        "the names, the text after `/` or `over` is what the time is compared with, and *raw* is plain PyTorch.",
        "",
        "The command in the last column also measures the rows below it, up to the next command. To measure the peer,",
        "add `--peer PYTHON`, where `PYTHON` is an interpreter with that package.",
        "",
        "| benchmark | plain PyTorch | peer | ours | command |",
        "|---|---|---|---|---|",
        *table,
    ]
    readme = PROJECT / "README.md"
    before, rest = readme.read_text().split(START)
    after = rest.split(END)[1]
    shown = f"{before}{START}\n\n{claims(figures, date)}\n\n{END}{after}"
    return {PROJECT / "docs/comparison.md": "\n".join(lines) + "\n", readme: shown, **pictures}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or compare them with those that exist.

    Returns:
        0, or 1 if `--check` finds a difference.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    args = parser.parse_args(arguments)
    stale = 0
    for path, content in write(newest()).items():
        if path.exists() and path.read_text() == content:
            continue
        print(f"{'differs' if args.check else 'written'}: {path.relative_to(PROJECT)}")
        stale = 1
        if not args.check:
            path.write_text(content)
    return stale if args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
