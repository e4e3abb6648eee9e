# SPDX-License-Identifier: Apache-2.0
"""A run in one file: HTML with pictures that need no script, Markdown, or JSON."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from . import svg
from .findings import STANDS_OUT, Summary, duration, size, summarize
from .run import Run
from .server import described, grouped_events
from .view import Curve, View, heat_rows, view

FORMATS = ("html", "md", "json")
# Buckets of the wide pictures, and of the others.
_WIDE, _NARROW = 1000, 400
_MOST_EVENTS = 200
_TITLES: dict[str, tuple[str, str]] = {
    "loss": ("Loss", ""),
    "learning_rate": ("Learning rate", ""),
    "gradient_norm": ("Gradient norm", ""),
    "throughput": ("Throughput", "{unit} / s, all ranks"),
    "seconds": ("Step time", "all ranks"),
    "device_memory": ("Device memory", "allocated, all ranks"),
    "host_memory": ("Host memory", "resident, all ranks"),
}
_FROM_ZERO = ("learning_rate", "throughput", "seconds", "device_memory", "host_memory")

_STYLE = """
main { max-width: 1240px; }
#charts { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
svg {
  display: block; width: 100%; max-width: 520px; height: auto; overflow: visible;
  font: 12px system-ui, "DejaVu Sans", sans-serif;
}
svg text { fill: var(--soft); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--grid); }
svg .gap { stroke: var(--card); }
svg .curve { fill: none; stroke: var(--run0); stroke-width: 1.6; stroke-linejoin: round; }
svg .point { fill: var(--run0); }
svg .band { fill: var(--run0); opacity: 0.18; }
svg .slow { fill: var(--slow); }
svg .cells { image-rendering: pixelated; }
/* On a narrow screen wide pictures are scrolled, with larger numbers, because they are smaller. */
.wide .picture { overflow-x: auto; }
.wide svg { min-width: 620px; max-width: none; }
@media (max-width: 820px) { .wide svg { font-size: 19px; } .wide .picture { padding-left: 8px; } }
.ramp { display: inline-block; width: 70px; height: 9px; border-radius: 3px; }
"""


def read_all(run: Run) -> None:
    """Read a run to its present end."""
    before = -1
    while before != (before := run.refresh()):
        pass


def html(run: Run) -> str:
    """The report as a page in one file."""
    summary = summarize(run)
    wide, narrow = view(run, pixels=_WIDE), view(run, pixels=_NARROW)
    body = [
        f"<header><h1>{escape(run.name)} <span>report</span></h1><div id=status>{escape(_when(run))}</div></header>"
    ]
    body.append("<main>" + _tiles(run, summary))
    items = [f'<li class="slow">{escape(note)}</li>' for note in run.notes()]
    for text in _sentences(summary):
        items.append(f"<li{' class=slow' if STANDS_OUT.match(text) else ''}>{escape(text)}</li>")
    items += [f'<li class="try">Try: {escape(text)}</li>' for text in summary.advice()]
    body.append(f"<section id=findings><div class=card><h2>Summary</h2><ul>{''.join(items)}</ul></div></section>")
    body.append(
        f"<section id=charts>{''.join([*_curves(narrow), *_ranks(wide, summary), *_parts(wide, summary)])}</section>"
    )
    body.append(_events(run) + "</main>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} – report</title><style>{_style()}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def markdown(run: Run) -> str:
    """The summary as Markdown."""
    summary = summarize(run)
    lines = [f"# {run.name}", "", _when(run), ""]
    lines += [f"- {text}" for text in [*run.notes(), *_sentences(summary)]]
    if advice := summary.advice():
        lines += ["", "## What to try", "", *(f"- {text}" for text in advice)]
    if summary.shares:
        lines += ["", "## Where the time went", "", "| phase | seconds of a step | share |", "|---|---|---|"]
        for phase, share in summary.shares.items():
            if share > 0:
                lines.append(f"| {phase} | {share * summary.seconds:.4g} | {share * 100:.1f} % |")
    if summary.stragglers:
        lines += [
            "",
            "## Slow ranks",
            "",
            "| rank | host | steps | excess per step | phase |",
            "|---|---|---|---|---|",
        ]
        for found in summary.stragglers:
            lines.append(
                f"| {found.rank} | {found.host} | {found.first:,} to {found.last:,} | {found.excess:.4g} s "
                f"({(found.ratio - 1) * 100:.0f} %) | {found.phase} |"
            )
    if events := grouped_events(run, _MOST_EVENTS):
        lines += ["", "## Events", "", "| time | ranks | event | |", "|---|---|---|---|"]
        for event in events:
            cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in _event_cells(event, run)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def to_json(run: Run) -> str:
    """The summary, and all curves, as JSON."""
    summary = summarize(run)
    shown = view(run, pixels=_WIDE)
    found = {
        "run": run.name,
        "folder": str(run.folder),
        "notes": run.notes(),
        "summary": {**asdict(summary), "sentences": summary.sentences(), "advice": summary.advice()},
        "ranks": [{"rank": rank, **run.ranks[rank].header.details} for rank in shown.ranks],
        **described(shown),
        "events": run.events,
    }
    return json.dumps(_plain(found), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return (
            float(f"{value:.7g}")
            if math.isfinite(value) and abs(value) < 1e9
            else value
            if math.isfinite(value)
            else None
        )
    return value


def _style() -> str:
    """The style of the page, whose dark colours follow the system."""
    text = resources.files(__package__).joinpath("page", "page.css").read_text(encoding="utf-8")
    light, _, rest = text.partition(':root[data-theme="dark"] {')
    dark, _, rest = rest.partition("}")
    return f"{light}@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}{rest}{_STYLE}"


def _when(run: Run) -> str:
    last = run.last_time
    state = "" if last is None else f"last step {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last))}, "
    return f"{state}{'ended' if run.has_ended else 'not ended'}, {run.folder}"


def _sentences(summary: Summary) -> list[str]:
    if summary.ranks:
        return summary.sentences()
    return [*summary.incidents, "Only logged values are shown: no steps were recorded, as with `--telemetry`."]


def _card(title: str, unit: str, content: str, wide: bool = False, legend: str = "") -> str:
    return (
        f'<div class="card{" wide" if wide else ""}"><div class=head><h2>{escape(title)}</h2>'
        f"<span class=unit>{escape(unit)}</span><div class=legend>{legend}</div></div>"
        f"<div class=picture>{content}</div></div>"
    )


def _tiles(run: Run, summary: Summary) -> str:
    found = [("Step", f"{run.last_step:,}", "")]
    if summary.ranks:
        found.append(("Step time, mean", _seconds(summary.seconds), ""))
        if summary.throughput and summary.unit != "steps":
            found.append((f"{summary.unit} / s", _number(summary.throughput), ""))
        if math.isfinite(summary.utilization):
            found.append(("Utilization (MFU)", f"{summary.utilization * 100:.1f} %", ""))
        if math.isfinite(summary.loss[1]):
            found.append(("Loss", _number(summary.loss[1]), ""))
        found += [(f"{kind.title()} memory", size(most), "") for kind, most in summary.memory.items()]
        if summary.ranks > 1:
            slow = ", ".join(str(straggler.rank) for straggler in summary.stragglers[:3])
            slow += f" + {len(summary.stragglers) - 3}" if len(summary.stragglers) > 3 else ""
            found.append((f"Slow ranks of {summary.ranks}", slow or "none", " slow" if slow else ""))
    tiles = "".join(
        f'<div class="card tile{kind}"><small>{title}</small><b>{text}</b></div>' for title, text, kind in found
    )
    return f"<section id=runs><div class=tiles>{tiles}</div></section>"


def _curves(shown: View) -> list[str]:
    found = []
    formats = {"seconds": _seconds, "device_memory": _bytes, "host_memory": _bytes}
    values = [(name, *_TITLES[name], shown.x, shown.curves[name]) for name in _TITLES if name in shown.curves]
    for name, logged in shown.logged.items():
        values.append((name, name, "logged", logged.x, Curve(logged.mean, logged.low, logged.high)))
    for name, title, unit, x, curve in values:
        if np.isfinite(curve.mean).any():
            shape = formats.get(name, _number)
            picture = svg.line(title, x, curve, shape, 400, 190, name in _FROM_ZERO, peaks=name == "seconds")
            found.append(_card(title, unit.format(unit=shown.unit), picture))
    return found


def _ranks(shown: View, summary: Summary) -> list[str]:
    rows, own, _, slow = heat_rows(shown)
    if not np.isfinite(own).any():
        return []
    title = "Step time of each rank"
    named = {straggler.rank for straggler in summary.stragglers}
    picture, (low, high) = svg.heat(title, shown.x, rows, own, slow, named, 1180)
    stops = ",".join(f"rgb({r:.0f},{g:.0f},{b:.0f})" for r, g, b in svg.RAMP.tolist())
    legend = (
        f'{_seconds(low)} <span class=ramp style="background:linear-gradient(90deg,{stops})"></span> {_seconds(high)}'
    )
    marks = " &nbsp; ▲ slow rank" * bool(named)
    marks += ' &nbsp; <span class=swatch style="background:var(--slow)"></span>slow steps' * bool(slow.any())
    legend = f"<span>{legend}{marks}</span>"
    return [_card(title, "without communication and waiting", picture, True, legend)]


def _parts(shown: View, summary: Summary) -> list[str]:
    seconds_of = {
        name: values for name, values in described(shown)["phases"].items() if summary.shares.get(name, 0) > 0
    }
    if not seconds_of:
        return []
    legend = "".join(
        f'<span><span class=swatch style="background:var(--{name})"></span>{name} {share * 100:.0f} %</span>'
        for name, share in summary.shares.items()
        if name in seconds_of
    )
    picture = svg.stack("Phases of a step", shown.x, seconds_of, _seconds, 1180, 230)
    return [_card("Phases of a step", "mean over ranks", picture, True, legend)]


def _event_cells(event: dict[str, Any], run: Run) -> tuple[str, str, str, str]:
    ranks = sorted(event["ranks"])
    who = "all ranks" if len(ranks) == len(run.ranks) > 1 else ", ".join(map(str, ranks))
    facts = [f"step {event['step']:,}"] if "step" in event else []
    facts += [duration(event["seconds"])] if "seconds" in event else []
    facts += [event["message"]] if "message" in event else []
    facts += [event["path"]] if event.get("path", "") not in event.get("message", "") else []
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event["time"])))
    return when, who, event["event"].replace("_", " "), ", ".join(facts)


def _linked_cells(event: dict[str, Any], run: Run) -> list[str]:
    """The cells as HTML, with a link to the file of the event."""
    *cells, facts = map(escape, _event_cells(event, run))
    file = run.file(event["path"]) if event["file"] else None
    if file is not None:
        path = escape(event["path"])
        facts = facts.replace(path, f'<a href="{escape(file.as_uri())}">{path}</a>')
    return [*cells, facts]


def _events(run: Run) -> str:
    events = grouped_events(run, _MOST_EVENTS)
    if not events:
        return ""
    rows = ["".join(f"<td>{cell}</td>" for cell in _linked_cells(event, run)) for event in events]
    head = "".join(f"<th>{title}</th>" for title in ("Time", "Ranks", "Event", ""))
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    return f'<section id="events-all"><div class="card scroll"><h2>Events</h2>{table}</div></section>'


def _seconds(value: float) -> str:
    if value == 0:
        return "0"
    scaled, unit = (value * 1e6, "µs") if value < 1e-3 else (value * 1e3, "ms") if value < 1 else (value, "s")
    return f"{scaled:.4g} {unit}"


def _bytes(value: float) -> str:
    return size(value) if value else "0"


def _number(value: float) -> str:
    magnitude = abs(value)
    if magnitude and not 0.0009999 <= magnitude < 1e15:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")
    for limit, scale, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if magnitude >= limit:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"
