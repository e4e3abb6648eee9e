# SPDX-License-Identifier: Apache-2.0
"""Whether a run is recorded, and into which folder; the recorder and the profile of an `Accelerator`."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..config.training import ProjectConfiguration
from ..core import devices, env, messages
from ..core.device_kinds import PUBLISHED, known_name
from ..core.errors import ConfigurationError
from ..core.files import user_path
from ..core.option import parse_bool
from ..runtime.agreement import Agreement, first
from ..state import PartialState
from .profile import StepProfile
from .recorder import RunRecorder
from .status import open_status
from .writer import TelemetryWriter

# Seconds in which every rank must have made its Accelerator.
_ARRIVAL = 120.0


def start_recorder(
    telemetry: bool | str | os.PathLike[str] | None, project: ProjectConfiguration, shards: int
) -> RunRecorder | None:
    """The recorder of a run; None where nothing is recorded, and neither a launcher nor a TrainJob shows its state.

    Args:
        telemetry: the argument of `Accelerator`.
        project: whose folder is used if none is given.
        shards: the number of shards of the data.
    """
    state = PartialState()
    rank = state.process_index
    status = open_status(env.get("ACCELERATE_STATUS_DIR"), rank)
    url = env.get("KUBEFLOW_TRAINER_SERVER_URL")
    if rank == 0 and url:
        from .job_status import JobStatus

        status = JobStatus(url, status)
    folder = run_folder(telemetry, project)
    writer = None
    if folder is not None:
        writer = TelemetryWriter.shared(
            folder,
            rank,
            world_size=state.num_processes,
            data_shards=shards,
            host=socket.gethostname(),
            device=str(state.device),
            started=time.time(),
        )
    if writer is None and status is None:
        return None
    return RunRecorder(state.device, shards / state.num_processes, writer, status)


def declared_work(
    per_token: float | None, per_sample: float | None, peak: float | None, device: torch.device
) -> dict[str, Any]:
    """The fields of the event that states what training computes; see `Accelerator.record_work`."""
    if (per_token is None) == (per_sample is None):
        raise ConfigurationError("record_work takes either flops_per_token or flops_per_sample")
    unit, flops = "token", per_token
    if flops is None:
        unit, flops = "sample", per_sample
    for name, value in ((f"flops_per_{unit}", flops), ("peak", peak)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigurationError(f"record_work({name}={value!r}): use a positive number")
    read_name = getattr(devices.module_of(device), "get_device_name", None)
    if peak is None and read_name is not None:
        speeds = PUBLISHED.get(known_name(read_name(device)) or "")
        if speeds is not None:
            peak = speeds.tflops * 1e12
    return {"unit": unit, "flops": flops, "peak": peak}


def run_folder(
    telemetry: bool | str | os.PathLike[str] | None, project: ProjectConfiguration
) -> Path | None:
    """The folder of the run; None where it is not recorded."""
    if telemetry is None:
        telemetry = env.get("ACCELERATE_TELEMETRY") or False
        if isinstance(telemetry, str):
            with contextlib.suppress(
                ConfigurationError
            ):  # a folder of any name that is no truth value
                telemetry = parse_bool(telemetry)
    if isinstance(telemetry, bool):
        if not telemetry:
            return None
        project_folder = project.logging_dir or project.project_dir
        if project_folder:
            return user_path(project_folder, "logging_dir")
        return _folder_of_start()
    return user_path(telemetry, "telemetry")


def start_profile(
    project: ProjectConfiguration, recorder: RunRecorder | None
) -> StepProfile | None:
    """The profile of the steps that ACCELERATE_PROFILE requests of this rank; None where it requests none."""
    text = env.get("ACCELERATE_PROFILE")
    if not text:
        return None
    folder = None if recorder is None else recorder.folder
    if folder is None:
        # Every rank takes part in the choice.
        folder = run_folder(True, project)
    assert folder is not None
    state = PartialState()
    rank = state.process_index
    first, last, *ranks = text.split(":")
    chosen = [rank]
    if ranks:
        chosen = [int(number) for number in ranks[0].split(",")]
    absent = sorted({number for number in chosen if number >= state.num_processes})
    if absent and state.is_main_process:
        processes = "1 process"
        if state.num_processes > 1:
            processes = f"{state.num_processes} processes"
        messages.show(
            f"--profile={text}: this run of {processes} does not have rank "
            f"{', '.join(map(str, absent))}"
        )
    if rank not in chosen:
        return None

    def ended(step: int, path: Path | None) -> None:
        fields = {}
        if path is None:
            message = (
                f"nothing was profiled on rank {rank}: the run ended after {step} steps, "
                f"before step {first}"
            )
        else:
            message = f"the profile of steps {first} to {step} of rank {rank} is in {path}"
            fields["path"] = str(path)
        if recorder is not None:
            recorder.event("profile", message=message, **fields)
        messages.show(message)

    trace = folder.absolute() / "profile" / f"rank_{rank:05d}.json"
    return StepProfile(trace, int(first), int(last), ended)


def _folder_of_start() -> Path:
    """`runs/<script>-<time>`, the same on all ranks, and the same after a restart by one launcher."""
    script = "python"
    if sys.argv:
        script = Path(sys.argv[0]).stem.strip("-") or script
    started = env.get("ACCELERATE_LAUNCH_TIME") or time.strftime("%Y%m%d-%H%M%S")
    name = f"{script}-{started}"
    state = PartialState()
    if state.num_processes > 1:
        hint = "Create the Accelerator on every process with the same `telemetry`."
        name = Agreement(state, "telemetry").exchange("telemetry", name, _ARRIVAL, hint, first)
    return Path("runs").absolute() / name
