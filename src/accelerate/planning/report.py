# SPDX-License-Identifier: Apache-2.0
"""The table of a plan, its JSON, and the files that a run of one of its layouts takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config import launch_file
from ..core import json_text
from ..core.errors import ConfigurationError
from ..core.files import atomic_write
from ..core.objects import size_of
from .estimate import Estimate
from .ledger import KINDS
from .machine import Machine
from .trace import PlannedTraining

# The titles of the cells. "other" is messages and rounding.
HEADERS = ("layout", "memory", "weights", "grads", "optim", "activ", "other", "sent", "step")
# Half-widths with one measured run, and the least with several.
_ONE_RUN = (0.05, 0.2)
_LEAST = (0.02, 0.05)


class Unit(NamedTuple):
    """A unit for all bytes of a table."""

    name: str
    size: int

    def text(self, count: float) -> str:
        """A number of bytes in this unit, with about three digits."""
        number = count / self.size
        if number < 10:
            return f"{number:.2f}"
        if number < 100:
            return f"{number:.1f}"
        return f"{number:.0f}"


def unit_of(rows: Sequence[Estimate]) -> Unit:
    """The unit for the memory of these rows."""
    largest = max((row.memory.high for row in rows if row.failure is None), default=0.0)
    for unit in (Unit("GiB", 1 << 30), Unit("MiB", 1 << 20)):
        if largest >= unit.size:
            return unit
    return Unit("KiB", 1 << 10)


def table_rows(rows: Sequence[Estimate], unit: Unit) -> list[tuple[str, ...]]:
    """The cells of layouts with an estimate."""
    cells = []
    for row in rows:
        *kinds, communication, rounding = ((row.kinds or {})[kind] for kind in KINDS)
        sizes = [
            unit.text(size) for size in (*row.memory, *kinds, communication + rounding, row.sent)
        ]
        cells.append((row.layout.name, "-".join(sizes[:2]), *sizes[2:], _time(row)))
    return cells


def _time(row: Estimate) -> str:
    low, high = row.seconds
    if low >= 1:
        return f"{low:.2f}-{high:.2f} s"
    return f"{low * 1e3:.1f}-{high * 1e3:.1f} ms"


def in_a_line(row: Estimate) -> str:
    """The estimate of a layout in one short line."""
    if row.failure is not None:
        return f"{row.layout.name}, not estimated"
    low, high = row.memory
    return f"{row.layout.name}, {size_of(low)} to {size_of(high)} per rank, step {_time(row)}"


def failures(rows: Sequence[Estimate]) -> list[tuple[str, str]]:
    """The names of the layouts without an estimate for each reason, and the reason."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.failure is not None:
            names.setdefault(row.failure, []).append(row.layout.name)
    return [(", ".join(layouts), reason) for reason, layouts in names.items()]


def shortage(rows: Sequence[Estimate], machine: Machine) -> str | None:
    """How much is missing in the layout that comes nearest; None if one fits or none has an estimate."""
    estimated = [row for row in rows if row.failure is None]
    if not estimated or any(row.fits for row in estimated):
        return None
    nearest = min(estimated, key=lambda row: row.memory.high)
    kinds = nearest.kinds or {}
    most = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"no layout fits in {size_of(machine.memory)} per rank: the closest, "
        f"{nearest.layout.name}, needs up to {size_of(nearest.memory.high)}, which is "
        f"{size_of(nearest.memory.high - machine.memory)} more. Its largest part is {most}, "
        f"{size_of(kinds[most])}. More ranks or a smaller --batch reduce it"
    )


def to_json(rows: Sequence[Estimate], training: PlannedTraining, machine: Machine) -> str:
    """The plan as JSON."""
    plan = {
        "model": type(training.model).__name__,
        "batch": str(training.batch),
        "precision": training.precision,
        "optimizer": training.optimizer,
        "machine": asdict(machine),
        "layouts": [row.to_json() for row in rows],
    }
    return json.dumps(plan, indent=2)


def write(path: str | Path, row: Estimate, training: PlannedTraining, machine: Machine) -> Path:
    """Write the configuration file of a layout, and its estimate next to it; returns the path of the latter."""
    path = Path(path).expanduser()
    planned = path.with_suffix(".plan.json").absolute()
    configuration = training.configuration(row.layout) | {"plan_file": str(planned)}
    launch_file.write(path, configuration)
    with atomic_write(planned, "w") as file:
        json.dump(
            {**row.to_json(), "device": machine.device, "ranks": machine.ranks}, file, indent=2
        )
    return planned


def calibrate(machine: Machine, paths: Sequence[str | Path]) -> Machine:
    """The machine with the figures of measured runs, which their `plan_file` has since they ran.

    Memory is calibrated by runs on accelerators only: on the CPU a run measures its process, not its tensors.
    """
    memory = []
    times = []
    for path in paths:
        plan = _measured(Path(path).expanduser())
        if (plan["device"], plan["ranks"]) != (machine.device, machine.ranks):
            raise ConfigurationError(
                f"--calibrate {path}: it ran on {plan['ranks']} x {plan['device']}, but this plan "
                f"is for {machine.ranks} x {machine.device}"
            )
        measured = plan["measured"]
        times.append(measured["step_seconds"] / (sum(plan["step_seconds"]) / 2))
        if measured["memory_of"] == "tensors":
            memory.append(measured["memory_bytes"] / (sum(plan["memory_bytes"]) / 2))
    time_scale, spread = _fit(times, 1)
    machine = replace(
        machine,
        time_scale=time_scale,
        spread=spread,
        origin=f"{machine.origin}; calibrated by {len(times)}",
    )
    if memory:
        memory_scale, memory_spread = _fit(memory, 0)
        machine = replace(machine, memory_scale=memory_scale, memory_spread=memory_spread)
    return machine


def _measured(path: Path) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml"):
        path = path.with_suffix(".plan.json")
    try:
        plan = json_text.read(path, limit=1 << 20, numbers=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"--calibrate {path} cannot be read: {reason}") from None
    if not isinstance(plan, dict) or "step_seconds" not in plan or "device" not in plan:
        raise ConfigurationError(
            f"--calibrate {path} is not a plan that `accelerate plan --write` wrote"
        )
    if "measured" not in plan:
        raise ConfigurationError(
            f"--calibrate {path}: this plan has not been measured by a run yet. Start one with "
            "`accelerate launch --config_file`, for at least 6 optimizer steps"
        )
    return plan


def _fit(ratios: Sequence[float], which: int) -> tuple[float, float]:
    """(measured over estimated, half-width of the interval around it)."""
    middle = sorted(ratios)[len(ratios) // 2]
    if len(ratios) == 1:
        return middle, _ONE_RUN[which]
    return middle, max(_LEAST[which], 1.5 * max(abs(ratio / middle - 1) for ratio in ratios))
