# SPDX-License-Identifier: Apache-2.0
"""Write `docs/comparison.md`, its pictures, and the table of the README.

    python tools/comparison.py              from the JSON files of benchmarks/results, which `make bench` writes
    python tools/comparison.py --check      fail if a page does not have the newest figures

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

# What the README shows: a benchmark and how it is described.
CLAIMS = {
    "checkpoint wait": "time that a save of 1.1 GiB blocks the loop (ours continues in the background)",
    "big model load half": "load of 384 MiB of weights, half of them to stay on disk",
    "step": "added to a training step",
}
# Figures of a page of its own: those of one H100.
ON_GPU = (
    ("time that a save of 0.8 GB blocks the loop, on an H100", "1.42 s", "46 ms"),
    ("a batch from a loader to an H100, relative to plain PyTorch", "1.03x", "0.21x"),
)
# The peer's cell and ours: what `benchmarks/failures.py` shows. `{two}` is the time that the launcher needs.
SITUATIONS = (
    (
        "`kill -9` while a checkpoint is saved over an older one",
        "an unreadable file, or new weights that load with the old moments of Adam",
        "the older checkpoint or the new one, complete",
    ),
    (
        "`kill -9` of a rank",
        "the exit codes of the ranks, below torchrun's traceback",
        "the rank, the signal and its step; the line where the others waited",
    ),
    (
        "a rank never reaches a collective",
        "silence until torch's timeout of 30 minutes",
        "after 50 s (`--hang_report`): the function and line of each rank, and who computes",
    ),
    (
        "one byte of a checkpoint has changed",
        "it loads: a weight is 1.9e+38",
        "an error with the file and the range of bytes",
    ),
    (
        "an index of weights names `../elsewhere.safetensors`",
        "loads it",
        "an error with the name, and nothing is opened",
    ),
    (
        '`save_state("s3://bucket/run")`',
        "a local folder named `s3:`, without a message",
        "a checkpoint in the bucket, complete or absent (S3, GCS, Azure)",
    ),
    (
        "one rank calls `gather`, the other `reduce`",
        "silence until torch's timeout, with `ACCELERATE_DEBUG_MODE=1` too",
        "at once, on every rank (gloo): an error with both calls and their lines",
    ),
    (
        "`launch --num_processes 2` on CPUs",
        "one process, without a message",
        "two processes, in the script after {two}",
    ),
)
# Rows that are not in the table of the page: variants of others, and those that its pictures show.
LEFT_OUT = re.compile(
    r"telemetry.* (twice without|both|status)|telemetry of given batches|import a name|growth: .*"
    r"|.*, 4 ranks|pipeline step, 1f1b.*|gather_object large|big model (written|memory)"
    r"|device map: (.*split|nested|.* all).*|loader: .* batch 8"
)
# Where a reader of the README finds more.
MORE = (
    "`make bench` measures them again. Sources: [more figures](docs/comparison.md), "
    "[the H100](benchmarks/results/2026-11-26-h100.md), and what each failure prints "
    "([here](benchmarks/results/2026-11-28-failures.md), [earlier](benchmarks/results/2026-11-25-failures.md))."
)
# Rows in which the peer is faster: how the README describes them, and why.
SLOWER = {
    "checkpoint save": (
        "`save_state` of 1.1 GiB, relative to `torch.save` and fsync",
        ": slower, since each file and folder is synced to the disk before the checkpoint counts as saved",
    )
}


def claims(figures: dict[str, Any], dates: dict[str, str]) -> str:
    """Return the table of the README: what the peer does and what this package does, also where the peer is faster."""
    metrics = {name: row for script in scripts() for name, row in script.rows.items()}
    lines = ["| | Hugging Face Accelerate 1.15 | this package |", "|---|---|---|"]
    two = short(figures.get("launch two", {}).get("ours"), "time")
    lines += [f"| {title} | {peer} | {ours.format(two=two)} |" for title, peer, ours in SITUATIONS]
    lines += [f"| {title} | {peer} | {ours} |" for title, peer, ours in ON_GPU]
    for name, title in CLAIMS.items():
        if "ours" in figures.get(name, {}):
            cells = (
                short(figures[name].get(package), metrics[name].metric)
                for package in ("peer", "ours")
            )
            lines.append(f"| {title} | {' | '.join(cells)} |")
    for name, row in metrics.items():
        ours, peer = figures.get(name, {}).get("ours"), figures.get(name, {}).get("peer")
        if ours and peer and rank(peer, row.metric) < 0.95 * rank(ours, row.metric):
            title, why = SLOWER.get(name, (row.title, ": slower"))
            lines.append(
                f"| {title} | {short(peer, row.metric)} | {short(ours, row.metric)}{why} |"
            )
    shown = sorted({dates[name] for name in (*CLAIMS, "launch two") if name in dates})
    when = f"measured on {' and '.join(shown)} on two CPU cores" if shown else "not measured yet"
    lines += [
        "",
        "`x`: the time relative to plain PyTorch; below 1 is faster. "
        f"Other figures than the H100's were {when}. {MORE}",
    ]
    return "\n".join(lines)


def rank(result: dict[str, Any], metric: str) -> float:
    """Return the figure by which two packages are compared."""
    return float(result["own" if metric == "time" else metric])


def short(result: dict[str, Any] | None, metric: str) -> str:
    """Return a figure in three digits, in seconds from one second on."""
    if result is None:
        return "-"
    if metric == "ratio":
        return f"{result['ratio']:.2f}x"
    number, unit = in_binary(rank(result, metric), result["unit"])
    if unit == "ms" and number >= 1000:
        number, unit = number / 1000, "s"
    return f"{number:+.3g} {unit}" if metric == "added" else f"{number:.3g} {unit}"


def scripts() -> list[Any]:
    """Return the table of benchmarks of `benchmarks/run.py`."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", PROJECT / "benchmarks/run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.SCRIPTS)


def measured() -> tuple[dict[str, Any], dict[str, str], Path, dict[str, Any]]:
    """Return the figures of runs on CPUs: of each benchmark the newest one.

    Returns:
        The figures by benchmark, the date of each, the newest file, and the machine of that file.
    """
    figures: dict[str, Any] = {}
    dates: dict[str, str] = {}
    for path in sorted((PROJECT / "benchmarks/results").glob("20*.json")):
        content = json.loads(path.read_text())
        if content["machine"]["gpu"] is None:
            figures.update(content["figures"])
            dates.update(dict.fromkeys(content["figures"], path.name[:10]))
            newest, machine = path, content["machine"]
    return figures, dates, newest, machine


def svg(width: int, height: int, parts: list[str]) -> str:
    """Return a picture on a white background, with the text in the page's size."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>'
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""]
    )


def text(x: float, y: float, content: str, anchor: str = "start", color: str = "#222") -> str:
    """Return a line of text; `anchor` is start, middle or end."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{escape(content)}</text>'
    )


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
                parts.append(
                    f'<rect x="{left}" y="{y + offset}" width="{length:.1f}" height="13" fill="{color}"/>'
                )
                parts.append(text(left + length + 5, y + offset + 11, f"{value:.2f}x"))
    x = left + scale
    parts.append(
        f'<line x1="{x:g}" y1="22" x2="{x:g}" y2="{height - 4}" stroke="{RAW}" stroke-dasharray="4 3"/>'
    )
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
    parts = [
        text(60, 18, "ms per step: by hand with plain PyTorch", color=RAW),
        text(330, 18, "ours", color=OURS),
    ]
    for number, (title, points) in enumerate(series):
        x = 60 + number * 165
        parts += [
            text(x + 60, 232, title, "middle"),
            text(x + 20, 213, "2 ranks", "middle", "#777"),
        ]
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
                parts.append(
                    text(
                        place, height + (-8 if above else 17), f"{pair[which]:.0f}", "middle", color
                    )
                )
    return svg(740, 245, parts)


def sizes(figures: dict[str, Any]) -> str | None:
    """Draw how the time relative to plain PyTorch changes with parameters, samples and tensors."""
    parts, shown = [], 0
    for what, unit in (("step", "parameters"), ("first batch", "samples"), ("gather", "tensors")):
        found = [
            (re.fullmatch(rf"growth: {what}, (\d+) {unit}", name), item)
            for name, item in figures.items()
        ]
        points = sorted(
            (int(match[1]), item["ours"]["ratio"])
            for match, item in found
            if match and "ours" in item
        )
        if not points:
            continue
        x = 30 + 235 * shown
        shown += 1
        parts.append(text(x + 100, 222, f"{what}: number of {unit}", "middle"))
        one = 190 - 80
        parts.append(
            f'<line x1="{x}" y1="{one}" x2="{x + 200}" y2="{one}" stroke="{RAW}" stroke-dasharray="4 3"/>'
        )
        places = [
            (x + 20 + 80 * n, 190 - 80 * min(ratio, 2.0)) for n, (_, ratio) in enumerate(points)
        ]
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
    number, unit = in_binary(result["added" if metric == "added" else "own"], result["unit"])
    return f"{number:+.1f} {unit}" if metric == "added" else f"{number:.1f} {unit}"


def in_binary(number: float, unit: str) -> tuple[float, str]:
    """A figure and its unit; sizes, which the files have in MB, in MiB."""
    return (number * 1e6 / 2**20, "MiB") if unit == "MB" else (number, unit)


def write() -> dict[Path, str]:
    """Return the contents of the pages and of their pictures, by file."""
    figures, dates, path, machine = measured()
    table, ratios = [], []
    for script in scripts():
        for name, row in script.rows.items():
            by_package = figures.get(name)
            if not by_package or "ours" not in by_package:
                continue
            ours, peer = by_package["ours"], by_package.get("peer")
            raw = "-" if ours["raw"] is None else f"{ours['raw']:.1f} {ours['unit']}"
            earlier = "" if dates[name] == path.name[:10] else f" ({dates[name]})"
            cells = (
                row.title + earlier,
                raw,
                value(peer, row.metric),
                value(ours, row.metric),
            )
            if not LEFT_OUT.fullmatch(name):
                table.append(f"| {' | '.join(cells)} |")
            if row.metric == "ratio" and not name.startswith(
                ("import", "growth", "checkpoint verify")
            ):
                ratios.append((name, ours["ratio"], peer["ratio"] if peer else None))
    date = path.name[:10]
    about = ", ".join(f"{key} {item}" for key, item in machine.items() if item is not None)
    pictures = {IMAGES / "ratios.svg": bars(ratios)}
    lines = [
        "# Comparison",
        "",
        "<!-- Written by tools/comparison.py from the JSON files of benchmarks/results. -->",
        "",
        f"These figures were measured on {date} ({about}); rows with another date are from an earlier run.",
        "*Plain PyTorch* is the same work without this package. The *peer* is Hugging Face's accelerate 1.15.0. Each",
        "package takes turns with plain PyTorch in one process, so compare ratios, not times.",
        "",
        "Other pages have the [figures of one H100](../benchmarks/results/2026-11-26-h100.md), and",
        "[what happens](../benchmarks/results/2026-11-28-failures.md) when a process is killed, hangs or",
        "makes a different call from the others ([earlier](../benchmarks/results/2026-11-25-failures.md)).",
        "",
        "## Time relative to plain PyTorch",
        "",
        "Less is faster. The number at each bar is the ratio.",
        "",
        "![Bars: the ratio of each benchmark to plain PyTorch, for this package and for the peer](images/ratios.svg)",
        "",
    ]
    if (picture := growth(figures)) is not None:
        pictures[IMAGES / "ranks.svg"] = picture
        lines += [
            "## More ranks",
            "",
            "The time of a training step on 2 and on 4 ranks, which share the",
            f"{machine['cores']} cores of the machine.",
            "",
            "![Lines: milliseconds per step on 2 and 4 ranks, by hand and with this package](images/ranks.svg)",
            "",
        ]
    if (picture := sizes(figures)) is not None:
        pictures[IMAGES / "sizes.svg"] = picture
        lines += [
            "## More parameters, samples and tensors",
            "",
            "Time relative to plain PyTorch (the dashed line) for a step, for the first batch of a shuffled epoch,",
            "and for a `gather` on two ranks.",
            "",
            "![Lines: ratios to plain PyTorch by number of parameters, samples and tensors](images/sizes.svg)",
            "",
        ]
    lines += [
        "## Figures",
        "",
        "`+` marks the time that a package adds to plain PyTorch, `x` its time divided by that of plain PyTorch, and",
        "`-` what was not measured. In the names, the text after `/` or `over` is what the time is compared with, and",
        "*raw* is plain PyTorch.",
        "",
        "`make bench` measures all rows again ([method](../benchmarks/README.md)). The",
        f"[files of results](../benchmarks/results/{path.stem}.md) have more rows, and the targets.",
        "",
        "| benchmark | plain PyTorch | peer | ours |",
        "|---|---|---|---|",
        *table,
    ]
    pages = {PROJECT / "docs/comparison.md": "\n".join(lines) + "\n"}
    readme = PROJECT / "README.md"
    before, after = readme.read_text().split(START)
    pages[readme] = f"{before}{START}\n\n{claims(figures, dates)}\n\n{END}{after.split(END)[1]}"
    return {**pages, **pictures}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or compare them with those that exist.

    Returns:
        0, or 1 if `--check` finds a difference.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file differs"
    )
    args = parser.parse_args(arguments)
    stale = 0
    for path, content in write().items():
        if path.exists() and path.read_text() == content:
            continue
        print(f"{'differs' if args.check else 'written'}: {path.relative_to(PROJECT)}")
        stale = 1
        if not args.check:
            path.write_text(content)
    return stale if args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
