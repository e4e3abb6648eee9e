# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: the same pictures as on the page, drawn with characters."""

from __future__ import annotations

import contextlib
import time

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..core.objects import size_of
from .page_data import grouped_events
from .run import Run
from .sentences import STANDS_OUT, duration, sentences
from .steps import Array
from .summary import Summary, summarize
from .verdict import Finding, advice, verdict
from .view import ALL_PHASES, View, heat_rows, view

# Seconds between two pictures.
INTERVAL = 0.5
_BARS = "▁▂▃▄▅▆▇█"
_SHADES = "·░▒▓█"
_COLORS = {
    "data": "yellow", "transfer": "bright_yellow", "forward": "bright_cyan", "backward": "blue",
    "communication": "magenta", "optimizer": "green", "checkpoint": "red", "other": "bright_black",
}  # fmt: skip
_MOST_RANKS = 16


def show(run: Run, console: Console | None = None) -> None:
    """Show a run until Ctrl-C. Without a terminal it is printed once."""
    console = console or Console()
    run.refresh()
    if not console.is_terminal:
        console.print(picture(run, console.width))
        return
    with Live(
        picture(run, console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(INTERVAL)
                run.refresh()
                live.update(picture(run, console.width), refresh=True)


def picture(run: Run, width: int = 100) -> RenderableType:
    """One picture of a run, for a terminal of `width` columns."""
    notes = [Text(note.replace("`", ""), "red") for note in run.notes()]
    if run.is_empty:
        return Group(
            Panel(f"Waiting for the first step of {run.name} in {run.folder}."),
            *notes,
        )
    with run.lock:
        # The bars of a chart are about a third of the terminal wide, those of the ranks nearly all of it.
        wide = max(16, width - 26)
        narrow = max(16, (width - 12) // 3)
        shown = view(run, pixels=wide)
        summary = summarize(run)
        curves = view(run, pixels=narrow)
        # What stands out comes first: a small terminal shows no more than the upper part.
        # Names of code have no marks in a terminal.
        finding = verdict(summary)
        lines = [text.replace("`", "") for text in sentences(summary) if text != finding.evidence]
        tips = [f"Try: {text.replace('`', '')}" for text in advice(summary)]
        alarms = [text for text in lines if STANDS_OUT.match(text)]
        renderables: list[RenderableType] = [
            _title(run, summary),
            *notes,
            _verdict(finding),
            *(Text(text, "red") for text in alarms),
        ]
        renderables.append(_curves(curves, narrow))
        if shown.ranks:
            renderables += [_ranks(shown, summary, wide), _phases(summary, wide)]
            others = [text for text in lines if text not in alarms]
            renderables.append(Panel(Text("\n".join([*others, *tips]))))
        events = _events(run)
        if events:
            renderables.append(events)
    return Group(*renderables)


def _title(run: Run, summary: Summary) -> Text:
    if run.last_time is None:
        age = ""
    else:
        age = f"last step {duration(max(0.0, time.time() - run.last_time))} ago"
    state = "ended" if run.has_ended else age
    text = Text.assemble((run.name, "bold"), f"  step {run.last_step:,}  ", (state, "dim"))
    if summary.memory:
        memory = ", ".join(
            f"{kind} memory {size_of(size)}" for kind, size in summary.memory.items()
        )
        text.append(f"  {memory}", "dim")
    return text


def _verdict(finding: Finding) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for label, text in finding.lines().items():
        table.add_row(Text(f"{label}:", "bold"), Text(text.replace("`", "")))
    return table


def _curves(shown: View, width: int) -> RenderableType:
    panels = []
    titles = {
        "loss": "loss",
        "learning_rate": "lr",
        "gradient_norm": "gradient norm",
        "throughput": f"{shown.unit}/s",
        "seconds": "ms/step",
    }
    values = [(title, shown.curves[name]) for name, title in titles.items() if name in shown.curves]
    values += list(shown.logged.items())[:7]
    for title, curve in values:
        mean = curve.mean[np.isfinite(curve.mean)] * (1e3 if title == titles["seconds"] else 1)
        if len(mean):
            if 1e3 <= mean[-1] < 1e9:
                newest = f"{mean[-1]:,.0f}"
            else:
                newest = f"{mean[-1]:.4g}"
            text = Text(bars(stretched(curve.mean, width)), "cyan", no_wrap=True, overflow="crop")
            panels.append(
                Panel(text, title=f"{title} {newest}", title_align="left", width=width + 4)
            )
    return Columns(panels, padding=(0, 0))


def bars(values: Array) -> str:
    """Values as bars of one line between their minimum and maximum; a space where there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    # What is equal but for rounding is flat.
    low = finite.min()
    span = max(float(finite.max() - finite.min()), 1e-4 * float(np.abs(finite).max()), 1e-300)
    return "".join(_BARS[int((v - low) / span * 7.999)] if np.isfinite(v) else " " for v in values)


def stretched(values: Array, width: int) -> Array:
    """Values repeated to fill `width` columns."""
    if len(values):
        return values[np.arange(width) * len(values) // width]
    return values


def _ranks(shown: View, summary: Summary, width: int) -> RenderableType:
    """The heat map, a line for each rank."""
    rows, own, _, slow = heat_rows(shown)
    finite = own[np.isfinite(own)]
    if len(finite):
        low, usual, high = np.quantile(finite, (0.02, 0.9, 0.98)).tolist()
    else:
        low = 0.0
        usual = 0.0
        high = 0.0
    span = max(min(high, 1.5 * usual) - low, 0.25 * low, 1e-9)
    table = Table.grid(padding=(0, 1))
    order = sorted(range(len(rows)), key=lambda row: (-int(slow[row].sum()), row))[:_MOST_RANKS]
    for row in sorted(order):
        line = Text(no_wrap=True, overflow="crop")
        for value, marked in zip(
            stretched(own[row], width), stretched(slow[row], width), strict=True
        ):
            if np.isfinite(value):
                shade = _SHADES[int(min(max((value - low) / span, 0), 0.999) * 5)]
            else:
                shade = " "
            line.append(shade, "red" if marked else "cyan")
        first, last = rows[row]
        name = Text(f"ranks {first}-{last}", "dim")
        if first == last:
            name = Text(f"rank {first}", "dim")
        if any(first <= straggler.rank <= last for straggler in summary.stragglers):
            name = Text(f"{name} slow", "red")
        table.add_row(name, line)
    left_out = ""
    if len(order) < len(rows):
        left_out = f", {len(order)} of {len(rows)} shown"
    return Panel(
        table,
        title=f"step time without communication, one line for each rank{left_out}",
        title_align="left",
    )


def _phases(summary: Summary, width: int) -> RenderableType:
    bar = Text(no_wrap=True, overflow="crop")
    legend = list[Text]()
    for phase in ALL_PHASES:
        share = summary.shares.get(phase, 0)
        if share > 0:
            bar.append("█" * max(1, round(share * width)), _COLORS[phase])
            if share >= 0.005:
                legend.append(
                    Text("█ ", _COLORS[phase]).append(f"{phase} {share * 100:.0f}%", "none")
                )
    return Panel(
        Group(bar, Columns(legend, padding=(0, 2))), title="phases of a step", title_align="left"
    )


def _events(run: Run) -> RenderableType | None:
    table = Table.grid(padding=(0, 2))
    for event in reversed(grouped_events(run)[-6:]):
        if len(event["ranks"]) == len(run.ranks) > 1:
            ranks = "all ranks"
        else:
            ranks = f"rank {event['ranks'][0]}"
        facts = [str(event[name]).replace("`", "") for name in ("message", "path") if name in event]
        if "step" in event:
            facts.insert(0, f"step {event['step']:,}")
        when = time.localtime(float(event["time"]))
        table.add_row(
            time.strftime("%H:%M:%S", when),
            ranks,
            event["event"].replace("_", " "),
            Text(", ".join(facts), no_wrap=True, overflow="ellipsis"),
        )
    if table.rows:
        return Panel(table, title="events", title_align="left")
    return None
