# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: what is saved and loaded, automatic names, resuming."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from ..checkpointing import layout
from ..checkpointing.commit import RunLocks, can_restore
from ..checkpointing.layout import DamagedCheckpoint, is_taken
from ..checkpointing.loading import LoadReport, load_newest, load_options, load_run
from ..checkpointing.loading import resume as resume_run
from ..checkpointing.pending import COMPLETION, Options
from ..checkpointing.preemption import DEFAULT_SIGNALS
from ..checkpointing.run_state import (
    PendingGradients,
    RankState,
    RunState,
    StateOf,
)
from ..checkpointing.saving import save_run
from ..checkpointing.writer import Writer
from ..config.training import ProjectConfiguration
from ..core.bucket_path import BucketPath
from ..core.buckets import Bucket, is_bucket
from ..core.errors import (
    BucketAccessError,
    BucketUnreachableError,
    CheckpointError,
    ConfigurationError,
    MissingCheckpointError,
)
from ..core.files import location
from ..core.observers import RunLoop
from ..data_loader.loader import PreparedLoader
from ..logging import MultiProcessAdapter, get_logger, print_or_log
from ..parallel.base import Strategy
from ..parallel.items import ItemWindow
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..parallel.registry import strategy_key
from ..parallel.unwrap import extract_model_from_parallel, is_peft_model
from ..precision.base import Precision
from ..runtime.agreement import Agreement, RankErrors
from ..runtime.step_exchange import StepExchange
from ..state import AcceleratorState, GradientState, PartialState
from ..tracking.group import TrackerGroup
from .accumulation import Accumulation
from .objects import RunObjects
from .preemption import StopController

if TYPE_CHECKING:
    from ..checkpointing.adapters import AdapterLayout
    from ..checkpointing.sharded import ShardedState

logger: MultiProcessAdapter = get_logger(__name__)

# Seconds that a rank waits for the others when it first can stop in an evaluation: until they know of the signal.
_PATIENCE = 0.5
# The time that has to be left for a save: a multiple of that of the last one, and seconds.
_SAFETY, _LEAST = 1.5, 1.5
# Seconds between two looks at the time that is left.
_LOOK = 0.1


@dataclass(eq=False, repr=False)
class RunCheckpoints:
    """Saves and loads the objects of a run.

    Fields:
        objects: the prepared objects. strategy, precision, state: what `resolve` decided.
        accumulation, items: the unfinished accumulation window.
        project: folders and automatic naming. trackers: whose run keys are saved.
        exchange: by which the ranks agree to stop.
    """

    objects: RunObjects
    strategy: Strategy
    precision: Precision
    state: AcceleratorState
    accumulation: Accumulation
    items: ItemWindow
    project: ProjectConfiguration
    trackers: TrackerGroup
    exchange: StepExchange

    def __post_init__(self) -> None:
        self.save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.controller: ResumeController = ResumeController(self)
        self.stopper: StopController = StopController(self)
        # Its observers are told of saves and loads. `Accelerator` makes it, after this.
        self.loop: RunLoop = RunLoop()
        # The user's own `get_state_dict`, if there is one. `Accelerator` sets it.
        self.replaced_state_dict: Callable[[], StateOf | None] = lambda: None
        # Whether checkpoints are in the project, with automatic names. `Accelerator` sets it.
        self.saves_in_project: bool = False
        # The last save or load that is complete: the folder, and the step. And the seconds of the last save.
        self._newest: tuple[str, int] | None = None
        self.save_seconds: float = 0.0
        # Whether the main thread saves. It stays so after an error.
        self.is_saving: bool = False
        # Of the save in the background.
        self._in_background: tuple[str, int] | None = None
        self._writer: Writer | None = None
        self._locks = RunLocks()
        # skipped by a load: their numbers are the next ones
        self._damaged: list[DamagedCheckpoint] = []
        self._started_in = _current_folder()
        self._shards: ShardedState | None = None
        self._adapters: weakref.WeakKeyDictionary[PreparedModel, AdapterLayout] = (
            weakref.WeakKeyDictionary()
        )
        self._strategy_key = strategy_key(self.strategy)
        self._steps_before = 0  # optimizer steps of the run before the checkpoint that was loaded

    # -- save and load

    def save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        layout: str = "native",
        is_numbered: bool = False,
        is_brief: bool = False,
    ) -> str:
        """See `Accelerator.save_state`.

        `is_numbered`: under the next number, also in a run that names its folders. `is_brief`: as in `_run_state`.
        """
        self.controller.resume_if_pending()
        project = self.project
        folder, rotation = self._checkpoint_folder(output_dir, is_numbered)
        if rotation is not None and self._is_of_another_run(folder):
            raise ConfigurationError(
                f"{folder} already exists (save_iteration is {project.iteration}) and would be "
                "overwritten. Resume with load_state() first, set "
                "ProjectConfiguration.iteration, or use another project_dir."
            )
        options = Options(
            layout=layout,
            safe_serialization=safe_serialization,
            save_on_each_node=project.save_on_each_node,
            checkpoints=rotation,
            total_limit=project.total_limit,
            locks=self._locks if rotation is not None else None,
            damaged=self._damaged if rotation is not None else (),
        )
        begin = time.perf_counter()
        for average in self.objects.averages:
            average.check_not_applied()
        for observer in self.loop.active:
            observer.before_save()
        if blocking:
            self.wait_for_writer(for_save=True)
        else:
            self._writer = self._writer or Writer()
        writer = None if blocking else self._writer
        self.is_saving = True
        with self._run_state(is_saved=True, is_brief=is_brief) as run:
            state_of = self.replaced_state_dict()
            if run.entire is not None and (layout == "compat" or run.save_hooks or state_of):
                run = run.entire
            run.state_of = state_of
            saved = save_run(run, folder, process=PartialState(), options=options, writer=writer)
        self.is_saving = False
        if rotation is not None:
            self._damaged = []
        project.iteration += 1
        done = "saved" if writer is None else "saving in the background:"
        print_or_log(
            logger, f"{done} {saved}: epoch {run.progress['epoch']}, step {run.progress['step']}"
        )
        for observer in self.loop.active:
            observer.saved(str(saved), run.progress["step"], time.perf_counter() - begin)
        if writer is None:
            self._newest = str(saved), run.progress["step"]
            self.save_seconds = time.perf_counter() - begin
        else:
            self._in_background = str(saved), run.progress["step"]
        return str(saved)

    def save_adapters(
        self, prepared: PreparedModel, folder: str | os.PathLike[str], safe: bool
    ) -> bool:
        """Save the adapters of a peft model into a folder; False for a model that has to be saved entirely."""
        if not is_peft_model(prepared.module):
            return False
        from ..checkpointing.adapters import AdapterModel, save_adapters

        part = AdapterModel.of(prepared, self._adapters.get(prepared))
        if part is None:
            return False
        with self.precision.swap_in_master_weights([prepared.module], [], [prepared.swappable()]):
            save_adapters(part, folder, safe, self.project.save_on_each_node)
        print_or_log(logger, f"saved the adapters ({', '.join(part.names)}) in {folder}")
        return True

    def load(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> LoadReport:
        """See `Accelerator.load_state`."""
        begin = time.perf_counter()
        self._before_load()
        map_location = options.pop("map_location", None)
        options = {**load_options(load_kwargs, map_location), **options}
        with self._run_state(is_saved=False) as run:
            if input_dir is None:
                report = load_newest(
                    run, self._checkpoints_dir("load_state()"), process=PartialState(), **options
                )
            else:
                folder = location(input_dir, "load_state")
                if not is_taken(folder) and not can_restore(folder):
                    what = "folder"
                    if isinstance(folder, BucketPath):
                        what = "complete checkpoint at"
                        # An error if there is no such bucket.
                        folder.bucket.children(folder.key)
                    raise MissingCheckpointError(f"load_state: there is no {what} {folder}")
                report = load_run(run, folder, process=PartialState(), **options)
        self._leave_ended_epochs(report)
        self._apply(report, "loaded", begin)
        if input_dir is None:
            self._record_damaged(report)
        return report

    def _before_load(self) -> None:
        for average in self.objects.averages:
            average.check_not_applied()
        for observer in self.loop.active:
            observer.before_load()
        self.wait_for_writer()

    def _leave_ended_epochs(self, report: LoadReport) -> None:
        """After a save in the last batch of an epoch, the loop that counts its steps begins with the next epoch."""
        main = report.progress.get("training_loader") or 0
        for index, loader in enumerate(self.objects.dataloaders):
            leave = getattr(loader, "leave_ended_epoch", None)
            if leave is not None and leave() and index == main:
                report.progress["epoch"] = loader.iteration

    def load_newest_if_any(self) -> LoadReport | None:
        """Load the newest valid checkpoint of the project; None where there is none."""
        begin = time.perf_counter()
        self._before_load()
        directory = self._checkpoints_dir("resume()")
        with self._run_state(is_saved=False) as run:
            report = resume_run(run, directory, process=PartialState(), locks=self._locks)
        if report is not None:
            self._apply(report, "resumed", begin)
            self._record_damaged(report)
            self.trackers.resumed_keys = report.trackers
        return report

    def _apply(self, report: LoadReport, done: str, begin: float) -> None:
        """Continue where the loaded run was."""
        skipped = ""
        if report.skipped:
            skipped = f", skipped {len(report.skipped)} damaged"
        print_or_log(
            logger, f"{done} {report.folder}: epoch {report.epoch}, step {report.step}{skipped}"
        )
        # Saved under another layout, each rank has loaded a generator state that its neighbours need not share.
        self.strategy.sync_rng_state()
        saved = report.progress
        window = saved.get("window")
        if window is None:
            steps = int(
                saved.get("accumulation_steps") or self.accumulation.gradient_state.num_steps
            )
            window = {"step": int(saved.get("accumulation_step", 0)) % steps, "steps": steps}
        # The gradients of another layout or number of processes have no place here: a window begins.
        present_layout = self._window_layout()
        if saved.get("window_layout", present_layout) == present_layout:
            self.accumulation.load_state_dict(window)
        else:
            self.accumulation.load_state_dict({})
        self.controller.set_main_loader(report.progress.get("training_loader"))
        samples, samples_here = saved.get("step_samples"), self._step_sizes()["step_samples"]
        if samples and samples_here and samples != samples_here:
            note = (
                f"an optimizer step had {samples} samples when this was saved but has "
                f"{samples_here} here: learning rates and schedules are not adjusted"
            )
            report.notes.append(note)
            logger.warning(f"{report.folder}: {note}")
        elif samples and samples == samples_here:
            # Other ranks that read as many samples together: the schedule goes on at its speed.
            steps_per_call = saved.get("scheduler_steps", [])
            for scheduler, steps in zip(self.objects.schedulers, steps_per_call, strict=False):
                scheduler.steps_per_call = steps
        self._steps_before = report.step
        self._newest = str(report.folder), report.step
        for optimizer in self.objects.optimizers:
            optimizer.steps_made = 0
        for observer in self.loop.active:
            observer.loaded(str(report.folder), report.step, time.perf_counter() - begin)
        # A signal has a resumed run save under the next number, also where the run names its folders.
        is_numbered = self.project.automatic_checkpoint_naming or done == "resumed"
        if is_numbered and "iteration" in report.progress:
            self.project.iteration = int(report.progress["iteration"]) + 1

    def _step_sizes(self) -> dict[str, int]:
        """The batches of an optimizer step, and its samples over all processes; 0 if they are not known."""
        batches = int(self.accumulation.gradient_state.num_steps)
        samples = getattr(self.controller.main_loader, "total_batch_size", 0)
        return {"accumulation_steps": batches, "step_samples": samples * batches}

    def _record_damaged(self, report: LoadReport) -> None:
        """Let the next automatically named save rename what the load has skipped. A load itself moves nothing."""
        self._damaged = [
            DamagedCheckpoint.found(folder, reason) for folder, reason in report.skipped
        ]

    # -- resume and stop

    def check_bucket(self) -> None:
        """Find out whether each machine can save in the bucket of the project: the first save may be hours away.

        Every rank calls it, and raises what another one has found. A run that only loads has no optimizer, and perhaps
        no right to write.
        """
        is_first = self.saves_in_project and len(self.objects.optimizers) == 1
        if not is_first or not is_bucket(self.project.project_dir):
            return
        error: CheckpointError | None = None
        if self.state.is_local_main_process:
            bucket, folder = Bucket.of(str(self.project.project_dir))
            try:
                bucket.check_access(folder)
            except CheckpointError as caught:
                error = caught
        try:
            Agreement(PartialState(), "bucket").exchange("prepare", None, COMPLETION, error=error)
        except RankErrors as failed:
            kind: type[CheckpointError] = BucketUnreachableError
            if BucketAccessError.__name__ in failed.classes:
                kind = BucketAccessError
            raise kind(failed.common or str(failed)) from None

    def foreign_checkpoint(self) -> Path | None:
        """The checkpoint that has the name of the run's next one, and that no save of this run may replace."""
        if not self.saves_in_project:
            return None
        folder, _ = self._checkpoint_folder(None, is_numbered=True)
        if self._is_of_another_run(folder):
            return folder
        return None

    def _is_of_another_run(self, folder: Path) -> bool:
        """Whether there is a checkpoint that was neither loaded nor skipped: its number is none of this run's."""
        is_skipped = any(folder.name == damaged.name for damaged in self._damaged)
        return not is_skipped and is_taken(folder)

    def resume_at_first_use(self) -> None:
        """Resume when a prepared loader is first read, and stop on the default signals."""
        self._checkpoints_dir("Accelerator(resume='auto')")
        self.stopper.watch_signals(PartialState(), DEFAULT_SIGNALS)
        self.controller.is_pending = True

    def resume(self, signals: Sequence[str], exit_code: int | None) -> LoadReport | None:
        """See `Accelerator.resume`."""
        self.stopper.exit_code = exit_code
        self._checkpoints_dir("resume()")
        self.stopper.watch_signals(PartialState(), signals)
        return self.controller.resume()

    def age_of_newest(self) -> str:
        """A sentence about the newest checkpoint."""
        newest = self._newest
        if self._in_background is not None and self._writer is not None and self._writer.is_done:
            newest = self._in_background
        if newest is None:
            return "This run has not saved a checkpoint."
        folder, step = newest
        return f"The latest checkpoint, {folder}, is {self.step - step} steps old."

    @property
    def can_interrupt(self) -> bool:
        """Whether a save needs no collective of the groups by which a forward communicates: each rank has shards."""
        models = self.objects.models
        if not any(prepared.is_partial for prepared in models):
            return True
        if self.save_hooks or self.objects.averages or self.replaced_state_dict() is not None:
            return False
        # They import DTensors, which such a run has imported.
        from ..parallel.sharded import ShardedModel
        from ..parallel.sharded_optimizer import has_own_form

        for prepared in models:
            # Not stages of a pipeline.
            if not isinstance(prepared, ShardedModel) or prepared.template is not None:
                return False
        return not any(has_own_form(optimizer.optimizer) for optimizer in self.objects.optimizers)

    def end_training(self) -> None:
        """Finish what runs in the background, close observers and trackers, leave the process group."""
        # A profile that ends is an event of the recorder, which was added before it.
        for observer in reversed(self.loop.active):
            observer.close()
        if self._writer is not None:
            self._writer.release()
            self._writer = None
        self._locks.release()
        self._shards = None
        self.stopper.close()
        self.trackers.finish()
        self.state.destroy_process_group()

    # -- folders

    def _checkpoints_dir(self, caller: str) -> Path:
        if self.project.project_dir is None:
            raise ConfigurationError(
                f"{caller} needs a folder: pass one, or set project_dir in ProjectConfiguration"
            )
        project = location(self.project.project_dir, "project_dir")
        if self._started_in not in (None, _current_folder()) and not project.is_absolute():
            # A relative project_dir counts from where the run started, wherever the script goes after that.
            project = self._started_in / project
        return layout.checkpoints_dir(project)

    def _checkpoint_folder(
        self, output_dir: str | os.PathLike[str] | None, is_numbered: bool
    ) -> tuple[Path, Path | None]:
        """The folder of the next checkpoint, and the directory to rotate in when it is named automatically."""
        project = self.project
        if project.automatic_checkpoint_naming or is_numbered:
            directory = self._checkpoints_dir("save_state()")
            damaged = {checkpoint.name for checkpoint in self._damaged}
            folder = layout.checkpoint_folder(directory.parent, project.iteration)
            while isinstance(folder, BucketPath) and folder.name in damaged:
                # Nothing can be renamed there.
                project.iteration += 1
                folder = layout.checkpoint_folder(directory.parent, project.iteration)
            return folder, directory
        if output_dir is None:
            raise ConfigurationError(
                "save_state() needs a folder: pass output_dir, or set "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return location(output_dir, "save_state: output_dir"), None

    def wait_for_writer(self, for_save: bool = False) -> None:
        """Wait for the save in the background, if there is one. `for_save`: before another one."""
        if self._writer is not None:
            self._writer.wait(for_save)
            if self._in_background is not None:
                self._newest = self._in_background
                self._in_background = None
                self.save_seconds = self._writer.seconds

    # -- contents

    @contextlib.contextmanager
    def _run_state(self, *, is_saved: bool, is_brief: bool = False) -> Iterator[RunState]:
        """The run as a checkpoint has it: with master weights instead of parameters that were cast.

        `is_brief`: without averages and the gradients of an unfinished window.
        """
        objects = self.objects
        self.loop.update_scale()
        gradients = None
        averages: list[Any] = []
        if not is_brief:
            averages = list(objects.averages)
            if not self.stopper.is_interrupting:
                gradients = self._pending_gradients()
        if is_saved:
            progress = self._progress(gradients is not None)
        else:
            progress = {}
        layout: dict[str, str | int] = {
            "strategy": self._strategy_key,
            **self._mesh_sizes(),
        }
        rank_state = RankState(layout, objects.models, gradients, self.items)
        models = [prepared.module for prepared in objects.models]
        optimizers = [optimizer.optimizer for optimizer in objects.optimizers]
        contexts = [prepared.swappable() for prepared in objects.models]
        with self.precision.swap_in_master_weights(models, optimizers, contexts):
            trained = objects.prepared_optimizers()
            run = RunState(
                models=list(objects.models),
                optimizers=trained,
                schedulers=list(objects.schedulers),
                dataloaders=list(objects.dataloaders),
                scaler=self.precision.scaler,
                custom=list(objects.custom),
                averages=averages,
                progress=progress,
                mesh=self._mesh_sizes(),
                rank_state=rank_state,
                save_hooks=list(self.save_hooks.values()),
                load_hooks=list(self.load_hooks.values()),
                sharded=self._sharded_state(trained),
            )
            yield self._with_adapters(run) or run

    def _with_adapters(self, run: RunState) -> RunState | None:
        """The run with the adapters instead of models of peft whose base is frozen; None where it has none."""
        if not any(is_peft_model(part.module) for part in run.models):
            return None
        # Imports DTensors.
        from ..checkpointing.adapters import with_adapters

        return with_adapters(run, self._adapters)

    @property
    def step(self) -> int:
        """Optimizer steps that the run has made."""
        steps = max((optimizer.steps_made for optimizer in self.objects.optimizers), default=0)
        return self._steps_before + steps

    def _progress(self, has_gradients: bool) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": int(getattr(self.controller.main_loader, "iteration", 0)),
            "accumulation_step": self.accumulation.step,
            "window": self.accumulation.state_dict() if has_gradients else {},
            "window_layout": self._window_layout(),
            **self._step_sizes(),
            "scheduler_steps": [each.steps_per_call for each in self.objects.schedulers],
            "iteration": self.project.iteration,
            "training_loader": self.controller.main_index,
            "trackers": self.trackers.run_keys(),
        }

    def _window_layout(self) -> dict[str, Any]:
        """Under what a window can be continued."""
        return {
            "strategy": self._strategy_key,
            "processes": PartialState().num_processes,
            **self._mesh_sizes(),
        }

    def _mesh_sizes(self) -> dict[str, int]:
        mesh = self.state.device_mesh
        if mesh is None or not mesh.mesh_dim_names:
            return {}
        return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))

    def _pending_gradients(self) -> PendingGradients | None:
        """The gradients of an unfinished accumulation window of this process; none where they cannot be had."""
        models = self.objects.models
        gradients = [prepared.accumulated_gradients() for prepared in models]
        window = self.accumulation
        is_open = window.is_unfinished
        if any(
            found is None and prepared.is_partial
            for found, prepared in zip(gradients, models, strict=True)
        ):
            if is_open:
                logger.warning(
                    f"{self.strategy.name}: the gradients of the unfinished accumulation window are not in this "
                    "checkpoint, and a resumed run continues without them. Save when accelerator.sync_gradients is "
                    "True."
                )
            return None
        holders = [
            found or extract_model_from_parallel(prepared.module, keep_torch_compile=False)
            for found, prepared in zip(gradients, models, strict=True)
        ]
        return PendingGradients(holders, lambda: is_open)

    def _sharded_state(self, optimizers: list[PreparedOptimizer]) -> ShardedState | None:
        """How shards are saved, each process its own; None where no model saves shards."""
        models = self.objects.models
        is_interrupting = self.stopper.is_interrupting
        if is_interrupting:
            for prepared in models:
                prepared.saves_shards = prepared.is_partial
        if not any(prepared.saves_shards for prepared in models):
            return None
        # torch.distributed.checkpoint takes longer to import than all the rest; full states do without it.
        from ..checkpointing.sharded import ShardedState
        from ..parallel.sharded_optimizer import has_own_form

        if any(has_own_form(optimizer.inner) for optimizer in optimizers):
            # A checkpoint has shards of all models and optimizers, or of none.
            for prepared in models:
                prepared.saves_shards = False
            return None

        if self._shards is None:
            self._shards = ShardedState(models, optimizers)
        # One object for the run: it owns the group on which it writes in the background.
        self._shards.update(models, optimizers)
        if is_interrupting:
            self._shards.separate()
        return self._shards


def _current_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


def register_hook(
    hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]
) -> RemovableHandle:
    """Add a hook of saving or loading. Its handle removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class ResumeController:
    """Resumes before the first pass over a loader, and knows the loaders that the run trains on.

    References to the checkpoints and the loaders are weak, so that a run is freed with its last reference.

    Args:
        checkpoints: loads the newest checkpoint.
    """

    def __init__(self, checkpoints: RunCheckpoints) -> None:
        self._checkpoints = weakref.ref(checkpoints)
        self._report: LoadReport | None = None
        # Whether to resume when a loader is first read, or the report is first requested: all objects are known then.
        self.is_pending: bool = False
        # Whether the run has made a step since it was loaded.
        self.has_stepped: bool = False
        self._loaders: list[weakref.ref[PreparedLoader]] = []
        self._trained: list[weakref.ref[PreparedLoader]] = []

    @property
    def report(self) -> LoadReport | None:
        """What was resumed; None where nothing was found. A pending resume is done now."""
        self.resume_if_pending()
        return self._report

    def resume(self) -> LoadReport | None:
        """Load the newest checkpoint now."""
        self.is_pending = False
        checkpoints = self._checkpoints()
        if checkpoints is not None:
            self._report = checkpoints.load_newest_if_any()
            self.has_stepped = False
        return self._report

    def resume_if_pending(self) -> None:
        """Do now what waits for the first use."""
        if self.is_pending:
            self.resume()

    # -- the loaders

    def add_loader(self, loader: Any) -> None:
        """Take a prepared loader in."""
        self._loaders.append(weakref.ref(loader))

    def record_step(self) -> bool:
        """An optimizer steps: the loader that is being read is trained on. Whether it was not known to be."""
        self.has_stepped = True
        loader = getattr(GradientState().active_dataloader, "origin", None)
        if loader is None or self.is_trained(loader):
            return False
        self._trained.append(weakref.ref(loader))
        return True

    def is_trained(self, loader: object) -> bool:
        """Whether the run trains on a loader."""
        # The rest of an epoch (`skip_first_batches`) is read for the loader that the user prepared.
        loader = getattr(loader, "origin", loader)
        return any(loader is trained for trained in self.trained_loaders)

    @property
    def trained_loaders(self) -> list[PreparedLoader]:
        """The loaders that were read at an optimizer's step."""
        return _alive(self._trained)

    @property
    def main_loader(self) -> PreparedLoader | None:
        """The loader whose epoch is the run's: the first that was trained on, or the first of all before a step."""
        return next(iter(self.trained_loaders or _alive(self._loaders)), None)

    @property
    def main_index(self) -> int | None:
        """Its place among the loaders, where the run has trained."""
        for trained in self.trained_loaders:
            for i, loader in enumerate(_alive(self._loaders)):
                if loader is trained:
                    return i
            break
        return None

    def set_main_loader(self, index: int | None) -> None:
        """The main loader of the run that was loaded, until this one has stepped."""
        if index is not None and index < len(self._loaders):
            self._trained = [self._loaders[index]]

    def clear(self) -> None:
        """Forget the loaders."""
        self._loaders.clear()
        self._trained.clear()


def _alive(references: list[weakref.ref[PreparedLoader]]) -> list[PreparedLoader]:
    loaders = [reference() for reference in references]
    return [loader for loader in loaders if loader is not None]
