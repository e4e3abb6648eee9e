# SPDX-License-Identifier: Apache-2.0
"""Whether a run is recorded, and into which folder; the meter of an `Accelerator`."""

from __future__ import annotations

import functools
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..config.training import ProjectConfiguration
from ..core import devices, env
from ..core.device_speeds import PUBLISHED, known_name
from ..core.errors import ConfigurationError
from ..core.files import user_path
from ..core.option import parse_bool
from ..runtime.agreement import Agreement
from ..state import PartialState
from .memory_dump import dump_memory
from .meter import StepMeter, memory_reader
from .recorder import StepRecorder
from .status import open_status
from .step_profile import StepProfile
from .writer import TelemetryWriter

# Seconds in which every rank must have made its Accelerator.
_ARRIVAL = 120.0


def start_meter(
    telemetry: bool | str | os.PathLike[str] | None, project: ProjectConfiguration, shards: int
) -> StepMeter | None:
    """The meter of a run; None where nothing is recorded and no launcher shows its state.

    Args:
        telemetry: the argument of `Accelerator`.
        project: whose folder is used if none is given.
        shards: the number of shards of the data.
    """
    state = PartialState()
    rank = state.process_index
    status = open_status(env.get("ACCELERATE_STATUS_DIR"), rank)
    folder = run_folder(telemetry, project)
    share = shards / state.num_processes
    if folder is None:
        return None if status is None else StepMeter(status, state.device, share)
    details: dict[str, Any] = {
        "world_size": state.num_processes,
        "data_shards": shards,
        "host": socket.gethostname(),
        "device": str(state.device),
        "started": time.time(),
    }
    writer = TelemetryWriter.shared(
        folder,
        rank,
        device_memory=memory_reader(state.device),
        dump_memory=functools.partial(dump_memory, state.device),
        **details,
    )
    return StepRecorder(writer, status, state.device, share, waits=state.num_processes > 1)


def declared_work(
    per_token: float | None, per_sample: float | None, peak: float | None, device: torch.device
) -> dict[str, Any]:
    """The fields of the event that states what training computes; see `Accelerator.record_work`."""
    given = {"token": per_token, "sample": per_sample}
    found = [(unit, flops) for unit, flops in given.items() if flops is not None]
    if len(found) != 1:
        raise ConfigurationError("record_work takes one of flops_per_token and flops_per_sample")
    (unit, flops), *_ = found
    for name, value in ((f"flops_per_{unit}", flops), ("peak", peak)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigurationError(f"record_work({name}={value!r}): it is a positive number")
    if peak is None:
        names = getattr(devices.module_of(device), "get_device_name", None)
        known = None if names is None else known_name(names(device))
        peak = None if known is None else PUBLISHED[known].tflops * 1e12
    return {"unit": unit, "flops": flops, "peak": peak}


def run_folder(telemetry: bool | str | os.PathLike[str] | None, project: ProjectConfiguration) -> Path | None:
    """The folder of the run; None where it is not recorded."""
    if telemetry is None:
        telemetry = _of_variable(env.get("ACCELERATE_TELEMETRY"))
    if isinstance(telemetry, bool):
        if not telemetry:
            return None
        known = project.logging_dir or project.project_dir
        return user_path(known, "project_dir") if known else _folder_of_start()
    if not isinstance(telemetry, (str, os.PathLike)) or not os.fspath(telemetry):
        raise ConfigurationError(f"telemetry={telemetry!r}: give True, False or a folder")
    return user_path(telemetry, "telemetry")


def start_profile(project: ProjectConfiguration, meter: StepMeter | None) -> StepProfile | None:
    """The profile of the steps that ACCELERATE_PROFILE requests of this rank; None where it requests none."""
    text = env.get("ACCELERATE_PROFILE")
    if not text:
        return None
    # Every rank takes part in the choice of the folder.
    folder = (None if meter is None else meter.folder) or run_folder(True, project)
    assert folder is not None
    state = PartialState()
    rank = state.process_index
    first, last, *ranks = text.split(":")
    chosen = {int(one) for one in ranks[0].split(",")} if ranks else {rank}
    if (absent := sorted(one for one in chosen if one >= state.num_processes)) and state.is_main_process:
        processes = "1 process" if state.num_processes == 1 else f"{state.num_processes} processes"
        _print(f"--profile={text}: there is no rank {', '.join(map(str, absent))} in this run of {processes}")
    if rank not in chosen:
        return None

    def ended(step: int, path: Path | None) -> None:
        if path is None:
            message = f"nothing is profiled on rank {rank}: the run has ended after {step} steps, before step {first}"
        else:
            message = f"steps {first} to {step} of rank {rank} are profiled in {path}"
        if meter is not None:
            meter.event("profile", message=message, **({} if path is None else {"path": str(path)}))
        _print(message)

    return StepProfile(folder.absolute() / "profile" / f"rank_{rank:05d}.json", int(first), int(last), ended)


def _print(message: str) -> None:
    print(f"accelerate: {message}", file=sys.stderr, flush=True)


def _of_variable(text: str | None) -> bool | str:
    """A truth value, or a folder of any other name."""
    if not text:
        return False
    try:
        return parse_bool(text)
    except ConfigurationError:
        return text


def _folder_of_start() -> Path:
    """`runs/<script>-<time>`, the same on all ranks, and the same after a restart by one launcher."""
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python").stem.strip("-") or "python"
    started = env.get("ACCELERATE_LAUNCH_TIME") or time.strftime("%Y%m%d-%H%M%S")
    name = f"{script}-{started}"
    state = PartialState()
    if state.num_processes > 1:
        hint = "Make the Accelerator on every process, with the same `telemetry`."
        name = Agreement(state, "telemetry").exchange("telemetry", name, _ARRIVAL, hint)[0]
    return Path("runs").absolute() / name
