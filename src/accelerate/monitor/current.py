# SPDX-License-Identifier: Apache-2.0
"""The state of a run now, for programs: as an object of JSON, and in the text format of Prometheus."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from .goodput import Goodput, goodput
from .page_data import plain
from .run import NEWEST_RECORDS, Run
from .slow_ranks import slow_ranks
from .steps import SUMS
from .view import view

# Rates and slow ranks are those of so many of the newest steps.
_STEPS = NEWEST_RECORDS // 2
# Seconds between two looks at a run.
_INTERVAL = 1.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRICS = {
    "step": "Optimizer steps that the run has taken.",
    "epoch": "Complete passes over the data.",
    "loss": "Loss of the latest step, averaged over ranks.",
    "steps_per_second": "Optimizer steps per second.",
    "samples_per_second": "Samples of all ranks per second.",
    "tokens_per_second": "Tokens of all ranks per second.",
    "ranks": "Ranks that have recorded steps.",
    "slow_rank": "1 if the rank was slow in the latest steps, otherwise 0.",
    "age_seconds": "Seconds since the end of the latest step.",
    "ended": "1 if every rank has ended, otherwise 0.",
    "goodput": "Share of the time since the first launch that went into steps that count.",
    "badput": "Share of the time since the first launch that went elsewhere, by cause.",
    "logged": "Latest value of each logged name.",
}


@dataclass(frozen=True)
class CurrentState:
    """The newest figures of a run. NaN where a figure is not known."""

    name: str
    folder: str
    state: str
    """`waiting` before the first step, then `running`, then `ended`. A run that was killed stays `running`."""
    step: int
    epoch: int
    loss: float
    """At the newest step, the mean over ranks."""
    steps_per_second: float
    samples_per_second: float
    """Of all ranks, like the tokens."""
    tokens_per_second: float
    ranks: int
    slow_ranks: list[int]
    age_seconds: float
    """Seconds since the end of the newest step."""
    goodput: float
    """The share of the time of the whole run that went into steps that count."""
    badput: dict[str, float]
    """The other shares, by cause."""
    logged: dict[str, float]
    """The newest value of each name that was logged."""


def current_state(run: Run) -> CurrentState:
    """The state of a run, as far as it was read."""
    with run.lock, np.errstate(all="ignore"):
        last_step = run.last_step
        shown = view(run, max(run.first_step, last_step - _STEPS + 1), last_step, _STEPS // 2)
        seconds = shown.buckets.sum("seconds").sum(axis=1, keepdims=True)
        rates = {}
        for unit in SUMS:
            amounts = shown.buckets.sum(unit).sum(axis=1, keepdims=True)
            rates[unit] = float(np.sum(shown.shares * amounts / seconds)) or math.nan
        newest = [rank.last for rank in run.ranks.values() if rank.last is not None]
        loss = math.nan
        if newest:
            loss = float(np.mean([record["loss"] for record in newest]))
        if run.is_empty:
            state = "waiting"
        elif run.has_ended:
            state = "ended"
        else:
            state = "running"
        age = math.nan
        if run.last_time is not None:
            age = max(0.0, time.time() - run.last_time)
        shares = goodput(run) or Goodput(0.0, math.nan, {})
        return CurrentState(
            name=run.name,
            folder=str(run.folder),
            state=state,
            step=last_step,
            epoch=max((int(record["epoch"]) for record in newest), default=0),
            loss=loss,
            steps_per_second=float(shown.weight.sum() / seconds.sum()),
            samples_per_second=rates["samples"],
            tokens_per_second=rates["tokens"],
            ranks=len(shown.ranks),
            slow_ranks=sorted(straggler.rank for straggler in slow_ranks(run, shown)),
            age_seconds=age,
            goodput=shares.share,
            badput=shares.badput,
            logged={name: series.values[-1] for name, series in run.series.items()},
        )


def print_states(run: Run, once: bool) -> None:
    """Print the state of a run as an object of JSON: once, or in a line for each change until the run has ended."""
    shown = None
    while True:
        run.read_all()
        if run.version != shown:
            shown = run.version
            print(
                json.dumps(plain(asdict(current_state(run)), list), ensure_ascii=False), flush=True
            )
        if once or run.has_ended:
            return
        time.sleep(_INTERVAL)


def metrics(runs: Iterable[Run]) -> str:
    """The states of runs in the text format of Prometheus. A figure that is not known has no sample."""
    lines = []
    states = [(run, current_state(run)) for run in runs]
    for name, description in _METRICS.items():
        lines += [f"# HELP accelerate_{name} {description}", f"# TYPE accelerate_{name} gauge"]
        for run, state in states:
            samples: list[tuple[dict[str, str], float]] = []
            if name == "slow_rank":
                for rank in sorted(run.ranks):
                    samples.append(({"rank": str(rank)}, float(rank in state.slow_ranks)))
            elif name == "logged":
                samples = [({"name": key}, value) for key, value in state.logged.items()]
            elif name == "badput":
                samples = [({"cause": key}, value) for key, value in state.badput.items()]
            elif name == "ended":
                samples = [({}, float(state.state == "ended"))]
            else:
                samples = [({}, float(getattr(state, name)))]
            for labels, value in samples:
                if math.isnan(value):
                    continue
                labels = {"run": run.name, **labels}
                text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
                lines.append(f"accelerate_{name}{{{text}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
