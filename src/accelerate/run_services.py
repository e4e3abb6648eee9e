# SPDX-License-Identifier: Apache-2.0
"""The facade's part around the training: checkpoints, trackers, profile."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpointing import layout
from .checkpointing.commit import can_restore
from .checkpointing.going_on import GoingOn
from .checkpointing.gradients import OpenWindow, PendingGradients, RankState
from .checkpointing.loading import LoadReport, load_newest, load_run
from .checkpointing.loading import resume as resume_run
from .checkpointing.preemption import DEFAULT_SIGNALS
from .checkpointing.run_lock import RunLocks, claim_directory
from .checkpointing.saving import DamagedCheckpoint, Options, save_run
from .checkpointing.session import ModelPart, OptimizerPart, RunState, check_custom
from .checkpointing.weights import save, save_model
from .checkpointing.writer import Writer
from .config.training import ProfileKwargs, ProjectConfiguration
from .core.errors import CheckpointError, ConfigurationError
from .core.files import user_path
from .logging import get_logger
from .state import AcceleratorState, PartialState
from .telemetry.profile import profile
from .tracking import GeneralTracker, filter_trackers, start_trackers

if TYPE_CHECKING:
    import torch

    from .checkpointing.sharded import FullyShardedState
    from .optimizer import AcceleratedOptimizer
    from .parallel.base import Strategy
    from .precision.base import Precision
    from .resolve import Plan

logger = get_logger(__name__)


class HookHandle:
    """What registering a hook returns: `remove()` takes it out again."""

    def __init__(self, hooks: OrderedDict[str, Callable[..., None]], key: str) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        self._hooks.pop(self._key, None)


class RunServices:
    """Saving and loading a run, logging to trackers, profiling a block."""

    state: AcceleratorState
    strategy: Strategy
    precision: Precision
    plan: Plan
    step: int
    _models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    def _start_services(
        self, log_with: Any, project_dir: str | None, project: ProjectConfiguration | None, resume: str | None = None
    ) -> None:
        if project is not None and not isinstance(project, ProjectConfiguration):
            raise ConfigurationError(f"project_config takes a ProjectConfiguration, not {type(project).__name__}")
        self.project_configuration = project or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.log_with = filter_trackers(log_with, self.logging_dir)
        self.trackers: list[GeneralTracker] = []
        self._custom_objects: list[Any] = []
        self._save_hooks: OrderedDict[str, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[str, Callable[..., None]] = OrderedDict()
        self._writer: Writer | None = None
        self._locks = RunLocks()
        self._damaged: list[DamagedCheckpoint] = []  # skipped by a load: their numbers are the next ones
        self._started_in = _current_folder()
        self._shards: FullyShardedState | None = None
        self._steps_before = 0  # optimizer steps of the run before the checkpoint that was loaded
        self._former_trackers: dict[str, str] = {}
        self._going_on = GoingOn(self._load_newest_if_any, self._save_and_leave, self._in_training_mode)
        if resume is not None:
            if resume != "auto":
                raise ConfigurationError(f"resume={resume!r}: it is 'auto', or None for a run that starts anew")
            self._checkpoints_dir("Accelerator(resume='auto')")
            self._listen(DEFAULT_SIGNALS)
            self._going_on.at_first_use()

    # -- folders

    @property
    def project_dir(self) -> str | None:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    # -- checkpoints

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        layout: str = "native",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, generators and registered objects; returns the folder.

        Every process calls it. The folder appears whole or not at all. With automatic naming the folder is
        `<project_dir>/checkpoints/checkpoint_<iteration>`.

        Args:
            output_dir: the folder; may be left out with automatic naming.
            safe_serialization: weights in safetensors, else in torch's own format.
            blocking: False returns when the state is copied; the disk is written meanwhile.
            layout: `native`, or `compat` for the API's own file names and formats.
        """
        if save_model_func_kwargs:
            names = ", ".join(sorted(save_model_func_kwargs))
            raise ConfigurationError(f"save_state got arguments that nothing here takes: {names}")
        self._going_on.resume_if_asked()
        project = self.project_configuration
        folder, rotation = self._checkpoint_folder(output_dir)
        taken = rotation is not None and all(folder.name != damaged.name for damaged in self._damaged)
        if taken and folder.exists():
            raise ConfigurationError(
                f"{folder} exists already (save_iteration is {project.iteration}). Resume with load_state() first, "
                "set ProjectConfiguration.iteration, or use another project_dir: nothing is overwritten."
            )
        options = Options(
            layout=layout,
            safe_serialization=safe_serialization,
            save_on_each_node=project.save_on_each_node,
            checkpoints=rotation,
            total_limit=project.total_limit,
            locks=self._locks,
            damaged=self._damaged if rotation is not None else (),
        )
        writer = None if blocking else self._background_writer()
        if writer is None and self._writer is not None:
            self._writer.wait()
        with self._run_shown() as run:
            saved = save_run(run, folder, process=PartialState(), options=options, writer=writer)
        if rotation is not None:
            self._damaged = []
        project.iteration += 1
        return str(saved)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        """Load what `save_state` saved, on any number of processes; every process calls it.

        Args:
            input_dir: the folder; left out, the newest valid checkpoint of the project.
            load_kwargs: as for `torch.load`. Of these, `weights_only=False` trusts a folder in the API's own format
                that holds pickled objects; tensors go to where the run has them, whatever `map_location` says.
            load_model_func_kwargs: `strict`, `models_only`, `allow_pickle` of `accelerate.checkpointing.load_run`.
        """
        if self._writer is not None:
            self._writer.wait()
        options = {**_load_options(load_kwargs), **load_model_func_kwargs}
        with self._run_shown() as run:
            if input_dir is None:
                report = load_newest(run, self._checkpoints_dir("load_state()"), process=PartialState(), **options)
            else:
                folder = user_path(input_dir, "load_state")
                if folder.is_file():
                    raise CheckpointError(f"load_state: {folder} is a file: give the folder of a checkpoint")
                if not folder.is_dir() and not can_restore(folder):
                    raise CheckpointError(f"load_state: there is no folder {folder}")
                report = load_run(run, folder, process=PartialState(), **options)
        self._take_up(report)
        if input_dir is None:
            self._note_damaged(report)
        return report

    def resume(self, signals: Sequence[str] = DEFAULT_SIGNALS) -> LoadReport | None:
        """Go on from the project's newest valid checkpoint, if there is one; None where the run starts anew.

        Loaders then go on behind the last batch that was trained on; `report.epoch` is the epoch that they are in.
        From here on the run also saves when it is asked to stop: at the next batch after one of `signals` has
        reached any process, all of them save and exit with code 0. An empty list listens to none. Call it when all
        objects are prepared and registered; `Accelerator(resume="auto")` calls it at the first pass over a loader.

        Example:
            start = accelerator.resume()
            for epoch in range(start.epoch if start else 0, epochs):
                ...
        """
        self._checkpoints_dir("resume()")
        self._listen(signals)
        return self._going_on.resume()

    @property
    def resumed(self) -> LoadReport | None:
        """What `resume` has loaded; None where the run starts anew. With `resume="auto"` it is loaded by now."""
        return self._going_on.report

    def _listen(self, signals: Sequence[str]) -> None:
        if signals and not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigurationError(
                "a run that is asked to stop saves under the next number: set "
                "ProjectConfiguration(automatic_checkpoint_naming=True), or resume(signals=()) to listen to none"
            )
        self._going_on.listen(PartialState(), signals)
        self._attend_steps()

    def _attend_steps(self) -> None:
        """Where signals are listened to, each step tells which loader is trained on."""
        for optimizer in self._optimizers if self._going_on.is_listening else ():
            if self._going_on.note_step not in optimizer._after_step:
                optimizer._after_step.append(self._going_on.note_step)

    def _check_resumed(self) -> None:
        if self._going_on.is_asked:
            raise ConfigurationError(
                "resume='auto' loads when a prepared loader is first read, and an optimizer steps before any was: "
                "read `accelerator.resumed` before the loop"
            )

    def _in_training_mode(self) -> bool:
        return any(model.training for model in self._models)

    def _load_newest_if_any(self) -> LoadReport | None:
        if self._writer is not None:
            self._writer.wait()
        directory = self._checkpoints_dir("resume()")
        claim_directory(directory, self._locks, PartialState())
        with self._run_shown() as run:
            report = resume_run(run, directory, process=PartialState())
        if report is not None:
            self._take_up(report)
            self._note_damaged(report)
            self._former_trackers = report.trackers
        return report

    def _save_and_leave(self, why: str) -> None:
        folder = self.save_state()
        logger.warning(f"asked to stop ({why}): saved {folder}")
        self.end_training()
        raise SystemExit(0)

    def _take_up(self, report: LoadReport) -> None:
        # Of another layout each rank has taken a state that its neighbours need not share.
        self.strategy.draw_alike()
        self.step = int(report.progress.get("accumulation_step", 0))
        self._steps_before = report.step
        for optimizer in self._optimizers:
            optimizer.steps_made = 0
        self._going_on.take_main(report.progress.get("training_loader"))
        if "iteration" in report.progress and self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = int(report.progress["iteration"]) + 1

    def _note_damaged(self, report: LoadReport) -> None:
        """Let the next automatically named save rename what the load has skipped. A load itself moves nothing."""
        self._damaged = [DamagedCheckpoint.found(folder, reason) for folder, reason in report.skipped]

    def _checkpoints_dir(self, caller: str) -> Path:
        if self.project_dir is None:
            raise ConfigurationError(f"{caller} needs a folder: give one, or set project_dir in ProjectConfiguration")
        project = user_path(self.project_dir, "project_dir")
        if self._started_in not in (None, _current_folder()) and not project.is_absolute():
            # A relative project_dir counts from where the run started, wherever the script goes after that.
            project = self._started_in / project
        return layout.checkpoints_dir(project)

    def _checkpoint_folder(self, output_dir: str | os.PathLike[str] | None) -> tuple[Path, Path | None]:
        """The folder of the next checkpoint, and the directory to rotate in when it is named automatically."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            directory = self._checkpoints_dir("save_state()")
            return layout.checkpoint_folder(directory.parent, project.iteration), directory
        if output_dir is None:
            raise ConfigurationError(
                "save_state() needs a folder: give output_dir, or set "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return user_path(output_dir, "save_state: output_dir"), None

    def _background_writer(self) -> Writer:
        if self._writer is None:
            self._writer = Writer()
        return self._writer

    @contextlib.contextmanager
    def _run_shown(self) -> Iterator[RunState]:
        """The run as a checkpoint has it: masters in the place of lowered parameters."""
        own = self._rank_state()
        optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        with self.precision.shown(self._models, optimizers, self.strategy.others_in_place):
            yield self._run_state(own)

    def _run_state(self, own: RankState) -> RunState:
        """References to all that a checkpoint holds."""
        return RunState(
            models=[self._model_part(model) for model in self._models],
            optimizers=[self._optimizer_part(optimizer) for optimizer in self._optimizers],
            schedulers=list(self._schedulers),
            dataloaders=list(self._dataloaders),
            scaler=self.scaler,  # type: ignore[attr-defined]
            custom=list(self._custom_objects),
            progress=self._progress(),
            mesh=self._mesh_sizes(),
            rank_state=own,
            save_hooks=list(self._save_hooks.values()),
            load_hooks=list(self._load_hooks.values()),
            sharded=self._sharded_state(),
        )

    def _epoch(self) -> int:
        """The epoch of the loader that is trained on; of the first one before the first step."""
        return int(getattr(self._going_on.main_loader, "iteration", 0))

    def _progress(self) -> dict[str, Any]:
        steps = max((optimizer.steps_made for optimizer in self._optimizers), default=0)
        return {
            "step": self._steps_before + steps,
            "epoch": self._epoch(),
            "accumulation_step": self.step,
            "iteration": self.save_iteration,
            "training_loader": self._going_on.main_index,
            "trackers": {tracker.name: tracker.run_key for tracker in self.trackers if tracker.run_key is not None},
        }

    def _mesh_sizes(self) -> dict[str, int]:
        mesh = self.state.device_mesh
        names = getattr(mesh, "mesh_dim_names", None)
        return dict(zip(names, mesh.shape, strict=True)) if names else {}

    def _rank_state(self) -> RankState:
        """What is this process's alone: its unfinished accumulation window, and what its layout keeps beside."""
        return RankState(self.strategy, self._models, self._mesh_sizes(), self._open_window())

    def _open_window(self) -> OpenWindow | None:
        """The unfinished accumulation window of this process; none where its gradients cannot be had."""
        held = [self.strategy.open_gradients(model) for model in self._models]
        if self.strategy.holds_parts and None in held:
            return None
        models = [
            gradients or self.unwrap_model(model, keep_torch_compile=False)  # type: ignore[attr-defined]
            for gradients, model in zip(held, self._models, strict=True)
        ]
        open_now = not self.gradient_state.sync_gradients  # type: ignore[attr-defined]
        return OpenWindow(PendingGradients(models, lambda: open_now), self._items)  # type: ignore[attr-defined]

    def _model_part(self, model: torch.nn.Module) -> ModelPart:
        strategy: Any = self.strategy
        inner = strategy.plain(model) or self.unwrap_model(model, keep_torch_compile=False)  # type: ignore[attr-defined]
        part = ModelPart(model, inner=inner, sharded=strategy.is_sharded)
        if strategy.holds_parts:
            part.load_state_dict = functools.partial(strategy.load_state_dict, model)
            if not strategy.is_sharded:
                part.state_dict = functools.partial(strategy.save_state_dict, model)
        return part

    def _optimizer_part(self, optimizer: AcceleratedOptimizer) -> OptimizerPart:
        strategy: Any = self.strategy
        part = OptimizerPart(optimizer, sharded=strategy.is_sharded)
        if strategy.holds_parts:
            model = self._trained_by(optimizer)
            part.groups = strategy.plain_groups(model, optimizer)
            part.load_state_dict = functools.partial(strategy.load_optimizer_state_dict, model, optimizer)
            if not strategy.is_sharded:
                part.state_dict = functools.partial(strategy.optimizer_state_dict, model, optimizer)
        return part

    def _sharded_state(self) -> FullyShardedState | None:
        """How what no process holds whole is saved, each process its parts."""
        if not self.strategy.is_sharded:
            return None
        # torch.distributed.checkpoint takes longer to import than all the rest; whole states do without it.
        from .checkpointing.sharded import FullyShardedState

        models = [(index, self.strategy.unwrap(model)) for index, model in enumerate(self._models)]
        optimizers = [
            (index, self.strategy.unwrap(self._trained_by(optimizer)), optimizer.optimizer)
            for index, optimizer in enumerate(self._optimizers)
        ]
        if self._shards is None:
            self._shards = FullyShardedState(models, optimizers)
        # One object for the run: it owns the group on which it writes in the background.
        self._shards.models, self._shards.optimizers = models, optimizers
        plain = [(index, self.strategy.plain(model)) for index, model in enumerate(self._models)]
        self._shards.wholes = {index: whole for index, whole in plain if whole is not None}
        return self._shards

    def _trained_by(self, optimizer: AcceleratedOptimizer) -> torch.nn.Module:
        """The prepared model whose parameters an optimizer holds."""
        found = self.strategy.trained_by(optimizer, self._models)
        if found is not None:
            return found
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in held for parameter in model.parameters()):
                return model
        raise CheckpointError(f"{type(optimizer.optimizer).__name__} holds parameters of no prepared model")

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that `save_state` and `load_state` shall include."""
        check_custom(objects)
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> HookHandle:
        """`hook(models, weights, output_dir)` is called before `save_state` writes; `weights` may be changed."""
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> HookHandle:
        """`hook(models, input_dir)` is called before `load_state` loads; models it takes out are not loaded."""
        return _register(self._load_hooks, hook)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """The weights of a prepared model in files of at most `max_shard_size` (bytes, or "10GB"), with an index."""
        state = self.get_state_dict(model)  # type: ignore[attr-defined]
        save_model(
            state,
            save_directory,
            max_shard_size,
            safe_serialization,
            process=PartialState(),
            save_on_each_node=self.project_configuration.save_on_each_node,
        )
        self.state.wait_for_everyone()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """`torch.save` (or safetensors) on one process of the run, or of each machine with `save_on_each_node`."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    # -- trackers

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """`init_trackers(project_name, config=None, init_kwargs={})`: start the trackers of `log_with`.

        `config` are the run's hyperparameters; `init_kwargs` the arguments of each tracker under its name.
        """
        self._init_trackers(*args, **kwargs)

    def _init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        if self.state.is_main_process:  # one run of each, so that the others log nothing and get blank trackers
            self.trackers = start_trackers(
                self.log_with, project_name, self.logging_dir, config, init_kwargs, self._former_trackers
            )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name (its client object with `unwrap`); a blank one where this process does not log."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers:
            known = ", ".join(tracker.name for tracker in self.trackers)
            raise ValueError(f"{name} is not a tracker that this run has started (there is: {known})")
        return GeneralTracker(_blank=True)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """`log(values, step=None, log_kwargs={})`: hand a dict of values to every tracker."""
        self._log(*args, **kwargs)

    def _log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish what runs in the background, close the trackers, leave the process group."""
        if self._writer is not None:
            self._writer.wait()
            self._writer.release()
            self._writer = None
        self._locks.release()
        self._shards = None
        self._going_on.close()
        for tracker in self.trackers:
            tracker.finish()
        self.state.destroy_process_group()

    # -- profile

    def profile(self, profile_handler: ProfileKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """A block under torch's profiler; with `output_trace_dir` each process writes its trace there."""
        options = profile_handler or self.plan.handlers.profile
        return profile(options, self.state.process_index, self.state.wait_for_everyone)


def _current_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


def _load_options(load_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of `torch.load` as arguments of `load_run`."""
    known = dict(load_kwargs or {})
    known.pop("map_location", None)
    if not known.pop("weights_only", True):
        known["allow_pickle"] = True
    return known


def _register(hooks: OrderedDict[str, Callable[..., None]], hook: Callable[..., None]) -> HookHandle:
    key = uuid.uuid4().hex
    hooks[key] = hook
    return HookHandle(hooks, key)
