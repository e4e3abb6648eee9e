# SPDX-License-Identifier: Apache-2.0
"""A run in one file: the page with its data inside, a summary as Markdown, or everything as JSON."""

from __future__ import annotations

import base64
import json
import re
import time
from html import escape
from importlib import resources

from .goodput import BADPUT
from .page_data import grouped_events, packed, plain, run_data
from .run import Run
from .sentences import duration, sentences
from .summary import summarize
from .verdict import advice, verdict
from .view import view

# Buckets of the charts: a zoom into a report has no finer ones.
_PIXELS = 1000
_MOST_EVENTS = 200


def html(run: Run) -> str:
    """The page of `accelerate monitor` in one file, with the data that a server would send."""
    folder = resources.files(__package__).joinpath("page")
    page, style, charts, script = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("index.html", "page.css", "charts.js", "page.js")
    )
    # Within one script the functions of the other file need no import.
    script = re.sub("^export ", "", charts, flags=re.M) + re.sub(
        "^import .*\n", "", script, flags=re.M
    )
    data = base64.b64encode(
        packed("", [run_data(run, view(run, pixels=_PIXELS), summarize(run))])
    ).decode()
    for tag, content in {
        "<title>accelerate monitor</title>": f"<title>{escape(run.name)} – accelerate report</title>",
        '<link rel="stylesheet" href="page.css">': f"<style>\n{style}</style>",
        '<script type="module" src="page.js"></script>': f'<script type="application/octet-stream" id="data">{data}'
        f'</script>\n<script type="module">\n{script}</script>',
    }.items():
        page = page.replace(tag, content)
    return page


def markdown(run: Run) -> str:
    """The summary as Markdown."""
    summary = summarize(run)
    if run.last_time is None:
        ended = ""
    else:
        ended = f"last step {_date(run.last_time)}, "
    state = f"{ended}{'ended' if run.has_ended else 'not ended'}, {_escaped(str(run.folder))}"
    lines = [f"# {_escaped(run.name)}", "", state, ""]
    finding = verdict(summary)
    lines += [f"- {label}: {_escaped(text)}" for label, text in finding.lines().items()]
    lines += ["", "## Summary", ""]
    texts = [*run.notes(), *sentences(summary)]
    lines += [f"- {_escaped(text)}" for text in texts if text != finding.evidence]
    tips = advice(summary)
    if tips:
        lines += ["", "## What else to try", "", *(f"- {_escaped(text)}" for text in tips)]
    if summary.shares:
        lines += [
            "",
            "## Where the time went",
            "",
            "| phase | time of a step | share |",
            "|---|---|---|",
        ]
        for phase, share in summary.shares.items():
            if share > 0:
                lines.append(
                    f"| {phase} | {duration(share * summary.seconds)} | {share * 100:.1f}% |"
                )
    goodput = summary.goodput
    if goodput is not None:
        lines += ["", "## Goodput", "", "| time | seconds | share |", "|---|---|---|"]
        shares = {"steps that count": goodput.share}
        for cause, share in goodput.badput.items():
            shares[f"{cause}: {BADPUT[cause]}"] = share
        for name, share in shares.items():
            lines.append(f"| {name} | {share * goodput.seconds:.1f} | {share * 100:.1f}% |")
    if summary.stragglers:
        lines += [
            "",
            "## Slow ranks",
            "",
            "| rank | host | steps | excess per step | phase |",
            "|---|---|---|---|---|",
        ]
        for slow in summary.stragglers:
            lines.append(
                f"| {slow.rank} | {_escaped(slow.host)} | {slow.first:,} to {slow.last:,} | {duration(slow.excess)} "
                f"({(slow.ratio - 1) * 100:.0f}%) | {slow.phase} |"
            )
    events = grouped_events(run, _MOST_EVENTS)
    if events:
        lines += ["", "## Events", "", "| time | ranks | event | |", "|---|---|---|---|"]
        for event in events:
            ranks = sorted(event["ranks"])
            if len(ranks) == len(run.ranks) > 1:
                who = "all ranks"
            else:
                who = ", ".join(map(str, ranks))
            facts = [f"step {event['step']:,}"] if "step" in event else []
            facts += [duration(event["seconds"])] if "seconds" in event else []
            facts += [event[name] for name in ("message", "path") if name in event]
            cells = [_date(event["time"]), who, event["event"].replace("_", " "), ", ".join(facts)]
            lines.append("| " + " | ".join(map(_escaped, cells)) + " |")
    return "\n".join(lines) + "\n"


def to_json(run: Run) -> str:
    """All figures, curves and events as JSON."""
    data = plain(
        run_data(run, view(run, pixels=_PIXELS), summarize(run)),
        lambda values: plain(values.tolist(), list),
    )
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _escaped(text: str) -> str:
    """Names and messages as text in one line: no HTML, links, images or cells of a table."""
    return re.sub(r"([\\<\[\]|])", r"\\\1", " ".join(text.split()))


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
