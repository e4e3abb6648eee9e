# SPDX-License-Identifier: Apache-2.0
"""A process of a replay: it loads a checkpoint, whatever the script asks for, and ends after a step."""

from __future__ import annotations

import atexit
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..certify.settings import ProcessSettings, read_as
from ..checkpointing.loading import LoadReport, load_run
from ..core import messages
from ..core.observers import RunObserver
from ..core.trees import leaves, map_leaves
from ..optimizer import AcceleratedOptimizer
from ..parallel.gradients import local
from ..parallel.prepared import PreparedModel
from ..run.checkpoints import RunCheckpoints
from ..state import PartialState
from ..torch_internals.compiled import uncompiled

# A file with the settings of a replay, in the environment of its processes.
VARIABLE = "ACCELERATE_REPLAY_FILE"
# What is searched, in the order of a step.
_ORDER = ("output of", "loss", "gradient of")


@dataclass(frozen=True)
class ReplaySettings(ProcessSettings):
    """What a process of a replay does.

    Fields:
        folder: of its records.
        step: after which it ends.
        checkpoint: that it loads; None begins as the script does.
        debugs: open the debugger before the step.
        dump: folder for the tensors of the step.
        find: what is searched, "nan" or "spike".
        perturb: move the parameters that are loaded by one unit in the last place.
    """

    folder: str
    step: int
    checkpoint: str | None = None
    debugs: bool = False
    dump: str | None = None
    find: str | None = None
    perturb: bool = False


def read() -> ReplaySettings | None:
    """The settings of this process; None in a run that is not a replay. Raises as `read_as`."""
    return read_as(ReplaySettings, VARIABLE, "accelerate replay")


class ReplayedCheckpoints(RunCheckpoints):
    """Loads the checkpoint of a replay in place of any other, and saves nothing."""

    replay: ReplaySettings

    def save(
        self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> str:
        """The name that the checkpoint would have."""
        folder, _ = self._checkpoint_folder(output_dir, False)
        self.project.iteration += 1
        return str(folder)

    def load(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> LoadReport:
        """Load the checkpoint of the replay."""
        self.controller.is_pending = False
        return super().load(self.replay.checkpoint or input_dir, load_kwargs, **options)

    def load_newest_if_any(self) -> LoadReport | None:
        """Load the checkpoint of the replay, if it begins with one."""
        if self.replay.checkpoint is None:
            return None
        begin = time.perf_counter()
        self._before_load()
        with self._run_state(is_saved=False) as run:
            report = load_run(run, self.replay.checkpoint, process=PartialState())
        self._apply(report, "resumed", begin)
        return report


class ReplayedRun(RunObserver):
    """Watches the steps of a replay, and ends it.

    Args:
        settings: of the replay.
        run: with the prepared objects.
    """

    def __init__(self, settings: ReplaySettings, run: RunCheckpoints) -> None:
        self._settings = settings
        self._run = run
        self._rank = PartialState().process_index
        self._base = 0  # steps before the checkpoint
        self._step = 1  # the present one
        self._batches: list[Any] = []
        self._losses: list[Any] = []
        # What is searched: the first value that is not finite, and the norms of each gradient.
        self._note: dict[str, Any] = {}
        self._norms: dict[str, list[float]] = {}
        if isinstance(run, ReplayedCheckpoints):
            run.replay = settings
            # Also for a script that does not resume.
            run.controller.is_pending = settings.checkpoint is not None

    def loaded(self, path: str, step: int, seconds: float) -> None:
        """Count from the checkpoint."""
        self._base = step
        self._step = step + 1
        if self._settings.perturb:
            # It imports torch's distributed tensors.
            from ..certify.reference import perturb

            for prepared in self._run.objects.models:
                perturb(prepared.module)

    def after_prepare(self, prepared: Any) -> None:
        """Watch what the modules of a model return."""
        if self._settings.find != "nan" or not isinstance(prepared, PreparedModel):
            return
        if uncompiled(prepared.module) is prepared.module:
            for name, module in prepared.inner.named_modules():
                module.register_forward_hook(functools.partial(self._after_forward, name))

    def _after_forward(self, name: str, module: Any, args: Any, output: Any) -> None:
        for tensor in leaves(output):
            self._check("output of", name, tensor)

    def batch(self, loader: Any, data: Any) -> None:
        """Open the debugger at the first batch of the step."""
        if self._step != self._settings.step:
            return
        if self._settings.debugs and self._rank == 0 and not self._batches:
            import pdb

            messages.show(f"step {self._step} begins with this batch; `c` continues with the step")
            # It stops at the next line of the script.
            pdb.Pdb(skip=["accelerate.*", "torch.*", "contextlib"]).set_trace()
        self._batches.append(data)

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Note the loss."""
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
            self._check("loss", "", loss)

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> None:
        """Look at the gradients."""
        is_last = self._base + optimizer.steps_made + 1 == self._settings.step
        is_dumped = is_last and self._settings.dump is not None
        if not (is_dumped or self._settings.find):
            return
        # It imports torch's distributed tensors.
        from ..certify.contents import gradients

        optimizer.unscale()
        tensors = gradients(self._run.objects, optimizer)
        # A backward begins with the last one.
        for name in reversed(tensors):
            values = local(tensors[name])
            self._check("gradient of", name, values)
            if self._settings.find == "spike":
                norm = torch.linalg.vector_norm(values, dtype=torch.float64)
                self._norms.setdefault(name, []).append(float(norm))
        if is_dumped:
            self._dump(Path(str(self._settings.dump)), tensors)

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """End the run after the last step."""
        step = self._base + optimizer.steps_made
        if step < self._step:
            return
        self._batches, self._losses = [], []
        self._step = step + 1
        if step >= self._settings.step:
            if self._norms:
                self._note_spike()
            path = Path(self._settings.folder) / f"note_{self._rank}.json"
            path.write_text(json.dumps(self._note))
            self._run.loop.remove(self)
            # Blocks that the exception leaves may still communicate.
            atexit.register(self._run.end_training)
            raise SystemExit(0)

    def _check(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Note the first tensor that is not finite, and its rows that are not."""
        if self._settings.find != "nan" or self._note or not tensor.is_floating_point():
            return
        is_finite = local(tensor.detach()).isfinite()
        if is_finite.all():
            return
        self._note = {
            "order": [self._step, _ORDER.index(kind)],
            "kind": kind,
            "name": name,
        }
        if kind == "output of" and tensor.ndim > 1:
            is_row_finite = is_finite.flatten(1).all(dim=1)
            positions = torch.nonzero(~is_row_finite)
            self._note["rows"] = positions.flatten().tolist()

    def _note_spike(self) -> None:
        """Note the gradient that has grown most."""
        factors = {}
        for name, norms in self._norms.items():
            usual = statistics.median(norms[:-1] or norms)
            factors[name] = norms[-1] / (usual or 1.0)
        largest = max(factors, key=lambda name: factors[name])
        self._note = {
            "order": [self._settings.step, -factors[largest]],
            "kind": "gradient of",
            "name": largest,
            "factor": factors[largest],
        }

    def _dump(self, folder: Path, gradients: dict[str, torch.Tensor]) -> None:
        # It imports torch's distributed tensors.
        from ..certify.joining import join

        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "batches": [map_leaves(torch.Tensor.cpu, batch) for batch in self._batches],
            "losses": [float(loss) for loss in self._losses],
        }
        torch.save(content, folder / f"rank_{self._rank:05d}.pt")
        full = join(gradients)
        if self._rank:
            return
        torch.save(full, folder / "gradients.pt")
        norms = {}
        for name, gradient in full.items():
            norm = torch.linalg.vector_norm(gradient.double())
            norms[name] = float(norm)
        (folder / "norms.json").write_text(json.dumps(norms, indent=1))
