# SPDX-License-Identifier: Apache-2.0
"""Reports the progress of a run to the status of the Kubeflow TrainJob that it is part of."""

from __future__ import annotations

import json
import math
import mmap
import ssl
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from ..core import env, messages
from .status import SIZE, TRAINING, Status, StatusFile

# Seconds between two reports. Each of them is a write to the cluster's database.
_INTERVAL = 10.0
# A script that imports one of these reports itself what only it knows, such as the number of steps of a `Trainer`.
_OTHER_REPORTERS = ("transformers.trainer", "kubeflow.trainer")


class JobStatus(StatusFile):
    """The status of rank 0, which a thread also sends to the server of the TrainJob.

    A server that cannot be reached, or that refuses a report, is mentioned once, and the next report is tried.

    Args:
        url: of the server.
        file: what the launcher reads, which is written as well; None where there is no launcher.
    """

    def __init__(self, url: str, file: StatusFile | None) -> None:
        self._map = mmap.mmap(-1, SIZE) if file is None else file._map
        self._url = url
        self._newest: Status | None = None  # of a training step
        threading.Thread(target=self._report_until_end, name="accelerate-job-status").start()

    def write(self, *fields: Any) -> None:
        """Publish the first ten fields of `Status`: those before the checkpoint."""
        super().write(*fields)
        if fields[0] == TRAINING:
            self._newest = Status._make((*fields, "", 0.0))

    def _report_until_end(self) -> None:
        main = threading.main_thread()
        first = reported = None
        mentioned = False
        running = True
        while running:
            main.join(_INTERVAL)
            running = main.is_alive()
            newest = self._newest
            is_reported_elsewhere = any(name in sys.modules for name in _OTHER_REPORTERS)
            if newest is None or newest is reported or is_reported_elsewhere:
                continue
            first = first or newest
            status = trainer_status(newest, reported or first, first)
            try:
                data = json.dumps({"trainerStatus": status}).encode()
                # Kubernetes replaces the token and the certificate while the run goes on.
                token = Path(env.get("KUBEFLOW_TRAINER_SERVER_TOKEN") or "").read_text().strip()
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                context = ssl.create_default_context(
                    cafile=env.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
                )
                # The last report holds up the end of the process until the server has answered.
                urlopen(Request(self._url, data, headers), timeout=5.0, context=context).close()
            # nothing that happens here may end in a traceback among the run's output
            except Exception as error:
                if not mentioned:
                    messages.show(f"the TrainJob's status is not updated: {self._url}: {error}")
                mentioned = True
            reported = newest


def trainer_status(newest: Status, reported: Status, first: Status) -> dict[str, Any]:
    """The `trainerStatus` of a TrainJob.

    The percentage and the remaining time are those of the run if ACCELERATE_TRAINJOB_EPOCHS is set, and otherwise
    those of the pass over the loader.

    Args:
        newest: the step to report.
        reported: the one that was reported last.
        first: the one that was reported first.
    """
    metrics = {"step": newest.step, "epoch": newest.epoch, "loss": newest.loss}
    seconds = newest.time - reported.time
    if newest.step > reported.step:
        metrics["step_seconds"] = seconds / (newest.step - reported.step)
    rows = [
        {"name": name, "value": f"{value:.6g}"}
        for name, value in metrics.items()
        if not math.isnan(value)
    ]
    updated = datetime.fromtimestamp(newest.time, UTC).isoformat(timespec="seconds")
    status: dict[str, Any] = {"lastUpdatedTime": updated, "metrics": rows}
    if not newest.batches:
        return status
    total = newest.batches
    done = newest.batch
    epochs = env.get_int("ACCELERATE_TRAINJOB_EPOCHS")
    if epochs:
        total *= epochs
        done += newest.batches * newest.epoch
    left = max(0, total - done)
    status["progressPercentage"] = 100 * (total - left) // total
    batches_timed = newest.batches * (newest.epoch - first.epoch) + newest.batch - first.batch
    if batches_timed > 0:
        seconds_each = (newest.time - first.time) / batches_timed
        status["estimatedRemainingSeconds"] = round(left * seconds_each)
    return status
