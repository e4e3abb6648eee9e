# SPDX-License-Identifier: Apache-2.0
"""`LedgerRecorder`, the observer that writes the ledger of a run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import env
from ..core.files import O_BINARY, open_regular
from ..core.observers import RunObserver
from ..core.version import __version__
from ..data_loader.steps import total_of
from ..parallel.gradients import local
from ..run.checkpoints import RunCheckpoints
from ..state import PartialState
from ..telemetry.recorder import RunRecorder, on_host, scalar
from ..telemetry.records import FLAG_SKIPPED, STEP
from ..telemetry.writer import DeviceValues, TelemetryWriter, append_all
from . import rows

# Types of words of which a digest is made, and how many a cache holds.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_PIECE = 1 << 15
# The beginnings of variables that decide what a script computes.
ENVIRONMENT = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MIXED_PRECISION", "CUBLAS_")
_FIELDS = STEP.names or ()


class LedgerRecorder(RunObserver):
    """Adds each optimizer step to the ledger.

    A batch belongs to the step whose backward follows it. Rank 0 writes all but digests, as each rank knows what all
    ranks read.

    Args:
        recorder: of the run, which was told of the event before. The thread of its writer writes the ledger too.
        run: with the prepared objects. The reference is weak, since they refer to the observers.
    """

    def __init__(self, recorder: RunRecorder, run: RunCheckpoints) -> None:
        assert recorder.writer is not None
        self._recorder = recorder
        self._writer: TelemetryWriter = recorder.writer
        self._run = weakref.ref(run)
        # Steps between two digests of the parameters, beside those at saves.
        self._digest_steps = env.get_int("ACCELERATE_DIGEST_STEPS") or 0
        state = PartialState()
        self._world_size = state.num_processes
        self._is_main = state.process_index == 0
        self._path = rows.rows_file(self._writer.folder, state.process_index)
        self._descriptor = -1
        # Rows, and the loss and gradient norm of the first one if a device still computes them.
        self._waiting: deque[tuple[list[rows.Row], DeviceValues | None]] = deque()
        self._writer.also_write.append(self.write)
        self._attempt = 0
        self._record: list[float] | None = None
        self._passes: dict[Any, _Pass] = {}
        # A pass that ended before any backward.
        self._left: _Pass | None = None
        self._begin_step()
        if self._is_main:
            self._begin(run)

    def _begin(self, run: RunCheckpoints) -> None:
        path = rows.attempts_file(self._writer.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", opener=open_regular) as file:
            file.seek(0)
            lines = file.read().count(b"\n")
            self._attempt = lines + 1
            description = {"attempt": self._attempt, **_description(run)}
            line = json.dumps(description, default=str)
            file.write(f"{line}\n".encode())
        self._add(rows.START.row(0))

    def _add(self, row: rows.Row) -> None:
        self._waiting.append(([row], None))

    def _begin_step(self) -> None:
        self._ranges: list[rows.Row] = []
        self._backwards = 0

    # -- loaders

    def begin_pass(self, loader: Any) -> None:
        """Note where the pass begins."""
        run = self._run()
        if self._is_main and run is not None:
            self._passes[loader] = _Pass(loader, run.objects.dataloaders)

    def batch(self, loader: Any, data: Any) -> None:
        """Note what was read."""
        if loader in self._passes:
            self._passes[loader].read(loader)
            self._left = None

    def end_pass(self, loader: Any) -> None:
        """Forget the pass, unless its last batch is the one that is trained next."""
        ended = self._passes.pop(loader, None)
        if ended is not None and not ended.trains:
            self._left = ended

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """What was read last belongs to this step."""
        self._backwards += 1
        passes = list(self._passes.values())
        if self._left is not None:
            passes.append(self._left)
            self._left = None
        for current in passes:
            for unused in current.pending[:-1]:
                unused["flags"] |= rows.SKIPPED
            for row in current.pending:
                is_part = bool(self._ranges) and _extend(self._ranges[-1], row)
                if not is_part:
                    self._ranges.append(row)
                current.trains = True
            current.pending = []

    # -- the step

    def after_step(self, optimizer: Any) -> None:
        """Add the rows of a step. It ends with the first of several optimizers that steps."""
        newest = self._recorder.newest
        run = self._run()
        if newest is None or newest[0] is self._record or run is None:
            return
        self._record, values = newest
        record = dict(zip(_FIELDS, self._record, strict=True))
        step = int(record["step"])
        if self._is_main:
            self._waiting.append((self._rows_of(run, record), values))
            self._begin_step()
        if self._digest_steps and step % self._digest_steps == 0:
            self._add_digests(run, step)

    def _rows_of(self, run: RunCheckpoints, record: dict[str, float]) -> list[rows.Row]:
        """The row of a step, from its record, and those of its parts."""
        step = int(record["step"])
        parts = self._ranges
        for part in parts:
            part["step"] = step
        for index, optimizer in enumerate(run.objects.optimizers):
            rates = [on_host(scalar(group["lr"])) for group in optimizer.param_groups]
            part = rows.OPTIMIZER.row(step)
            part["index"] = index
            part["rate"] = rates[0]
            part["lowest"] = min(rates)
            part["highest"] = max(rates)
            part["steps"] = optimizer.steps_made
            parts.append(part)
        row = rows.STEP.row(step)
        row["index"] = self._attempt
        row["rows"] = len(parts)
        row["world_size"] = self._world_size
        row["backwards"] = self._backwards
        for name in ("epoch", "time", "loss", "gradient_norm", "tokens"):
            row[name] = record[name]
        if int(record["flags"]) & FLAG_SKIPPED:
            row["flags"] = rows.SKIPPED
        return [row, *parts]

    def _add_digests(self, run: RunCheckpoints, step: int) -> None:
        for index, prepared in enumerate(run.objects.models):
            row = rows.DIGEST.row(step)
            row["index"] = index
            row["world_size"] = self._world_size
            row["digest"], row["bytes"] = digest_of(prepared.module)
            self._add(row)

    # -- the run

    def before_save(self) -> None:
        """Have on the disk what the checkpoint contains."""
        self._writer.flush(wait=True)
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def saved(self, path: str, step: int, seconds: float) -> None:
        """Add digests of what was saved."""
        run = self._run()
        if run is not None:
            self._add_digests(run, step)
        self._writer.flush(wait=True)

    def loaded(self, path: str, step: int, seconds: float) -> None:
        """Steps after this one are done again."""
        self._begin_step()
        self._add(rows.LOADED.row(step))

    def close(self) -> None:
        """Write everything."""
        self._writer.flush(wait=True)
        self._writer.also_write.remove(self.write)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    # -- the file

    def write(self, wait: bool) -> None:
        """Append the rows to the file, which the first ones make; the thread of the writer calls it.

        Args:
            wait: also for the loss of a step that a device still computes.
        """
        data = b""
        while self._waiting:
            group, values = self._waiting[0]
            if values is not None:
                if not (wait or values.is_ready()):
                    break
                loss, norm = values.read()
                group[0]["loss"] = loss
                group[0]["gradient_norm"] = norm
            self._waiting.popleft()
            for row in group:
                kind = rows.KINDS[row["kind"]]
                data += kind.pack(row)
        if not data:
            return
        if self._descriptor < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY
            self._descriptor = open_regular(self._path, flags)
            size = os.fstat(self._descriptor).st_size
            # A killed process may have written a part of a row.
            os.ftruncate(self._descriptor, size - size % rows.SIZE)
            if size < rows.SIZE:
                data = rows.HEADER + data
        append_all(self._descriptor, data)


class _Pass:
    """A pass over a loader.

    Attributes:
        pending: rows of the batches that no backward has followed so far.
        trains: a backward has followed.
    """

    def __init__(self, loader: Any, loaders: list[Any]) -> None:
        plan = loader.plan()
        self.pending: list[rows.Row] = []
        self.trains = False
        self._position = max(loader.consumed, plan.skip)
        self._repeats = plan.cut.repeats
        # What the rows of all batches have.
        self._row = rows.RANGE.row(0)
        self._row["epoch"] = loader.iteration
        self._row["batches"] = 1
        self._row["total"] = _or_nan(total_of(plan))
        if loader.drops_last:
            self._row["flags"] = rows.DROPS
        for index, prepared in enumerate(loaders):
            if prepared is loader.origin:
                self._row["index"] = index
        self._has_order = False

    def read(self, loader: Any) -> None:
        """Add a batch."""
        if not self._has_order:
            self._has_order = True
            self._row["order"] = loader.order_key
        row = dict(self._row)
        row["first"] = self._position
        self._position = loader.consumed
        row["last"] = self._position
        row["weight"] = loader.batch_weight
        samples = None
        if loader.batch_counts is not None:
            samples = sum(loader.batch_counts)
        row["samples"] = _or_nan(samples)
        if loader.end_of_dataloader:
            row["flags"] |= rows.LAST
            size = loader.last_step_size
            if self._repeats and size is not None and samples is not None:
                row["repeated"] = max(0, size - samples)
        self.pending.append(row)


def _or_nan(number: int | None) -> float:
    if number is None:
        return math.nan
    return number


def _extend(row: rows.Row, following: rows.Row) -> bool:
    """Add the batches of a row to those of the one before it. Returns whether they follow them."""
    for name in ("index", "epoch", "order"):
        if row[name] != following[name]:
            return False
    if row["last"] != following["first"]:
        return False
    if (row["flags"] ^ following["flags"]) & rows.SKIPPED:
        return False
    row["last"] = following["last"]
    row["weight"] = following["weight"]
    row["flags"] |= following["flags"]
    for name in ("samples", "batches", "repeated"):
        row[name] += following[name]
    return True


@torch.no_grad()
def digest_of(module: nn.Module) -> tuple[int, int]:
    """A number that depends on each bit of the parameters that this process has, and their bytes.

    It is made of sums of words and of their squares, which a device computes where the parameters are.
    """
    sums = [torch.zeros((), dtype=torch.int64)]
    size = 0
    for parameter in module.parameters():
        shard = local(parameter.detach())
        if shard.is_meta:
            continue
        size += shard.nbytes
        words = _as_words(shard.reshape(-1))
        for piece in words.split(_PIECE):
            piece = piece.to(torch.int64)
            sums.append(piece.sum())
            sums.append((piece * piece).sum())
    device = sums[-1].device
    sums = [each.to(device) for each in sums]
    numbers = torch.stack(sums).cpu().numpy()
    digest = hashlib.blake2b(numbers.tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little"), size


def _as_words(values: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as the largest integers that it consists of."""
    offset = int(values.storage_offset()) * values.itemsize
    for kind in _WORDS:
        if values.nbytes % kind.itemsize == offset % kind.itemsize == 0:
            return values.view(kind)
    raise AssertionError


def _description(run: RunCheckpoints) -> dict[str, Any]:
    """What a replay needs in order to start the run again."""
    state = PartialState()
    script = Path(sys.argv[0]).absolute()
    digest = None
    if script.is_file():
        digest = hashlib.sha256(script.read_bytes()).hexdigest()
    # A script that is run by its path has no name.
    module = None
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
    environment: dict[str, str] = {}
    for prefix in ENVIRONMENT:
        environment.update(env.all_with_prefix(prefix))
    return {
        "time": time.time(),
        "command": [str(script), *sys.argv[1:]],
        "module": module,
        "script_sha256": digest,
        "folder": os.getcwd(),
        "versions": {
            "accelerate": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "world_size": state.num_processes,
        "shards": run.strategy.data_shard[1],
        "layout": run.strategy.name,
        "device": state.device.type,
        "threads": torch.get_num_threads(),
        "project": run.project.project_dir,
        "environment": environment,
    }
