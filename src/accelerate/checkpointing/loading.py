# SPDX-License-Identifier: Apache-2.0
"""Loading a run: read and check everything first, agree with the other ranks, then change the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, MissingCheckpointError
from ..parallel.prepared import PreparedModel
from ..runtime.agreement import Agreement, Process
from .commit import restore
from .kinds import StateKind, Written, kinds, loading
from .layout import candidates, list_checkpoints
from .manifest import CorruptCheckpoint, Manifest
from .matching import CheckpointMismatch
from .run_state import RunState
from .source import CheckpointReader, ModelWeights, open_checkpoint

logger: logging.Logger = logging.getLogger(__name__)

ARRIVAL = 30.0  # seconds within which every rank must have called
COMPLETION = 1800.0  # seconds within which every rank must have read and checked its files
_ABSENT = "Every process must call it, at the same place: not under `if accelerator.is_main_process`."
_ERRORS: dict[str, type[CheckpointError]] = {"corrupt": CorruptCheckpoint, "mismatch": CheckpointMismatch}
_PARTLY_LOADED = "The run is partly loaded: load another checkpoint, or start it again."


@dataclass(repr=False)
class LoadReport:
    """What a load has done.

    Fields:
        folder: the checkpoint.
        progress: the run's position when it was saved.
        world_size: how many processes saved it; 0 if the folder has no manifest.
        skipped: newer checkpoints that were skipped, and why.
        notes: what could not be restored exactly, one line each.
        manifest: the checkpoint's manifest; None for a folder of another library.
    """

    folder: Path
    progress: dict[str, Any]
    world_size: int
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    manifest: Manifest | None = None

    def __repr__(self) -> str:
        words = [f"epoch {self.epoch}", f"step {self.step}"]
        if self.world_size:
            words.append(f"saved by {self.world_size} process{'es' if self.world_size > 1 else ''}")
        if self.skipped:
            words.append(f"skipped {len(self.skipped)} damaged")
        if self.notes:
            words.append(f"{len(self.notes)} note{'s' if len(self.notes) > 1 else ''}")
        return f"<LoadReport of {self.folder}: {', '.join(words)}>"

    @property
    def epoch(self) -> int:
        """The epoch to continue in: that of the training loader, or the next one if it had ended."""
        return int(self.progress.get("epoch", 0))

    @property
    def step(self) -> int:
        """The optimizer steps that the run had made."""
        return int(self.progress.get("step", 0))

    @property
    def trackers(self) -> dict[str, str]:
        """The run that each tracker was logging to, by the tracker's name."""
        return dict(self.progress.get("trackers", {}))


@dataclass
class _LoadPlan:
    """The content of a checkpoint, read and checked, except for the weights. Applying it reads only their files."""

    models: list[tuple[PreparedModel, ModelWeights]]
    progress: dict[str, Any]
    notes: list[str]
    files: list[tuple[StateKind, int, object, Callable[[], object]]] = field(default_factory=list)
    states: dict[str, list[object]] = field(default_factory=dict)


def load_run(
    run: RunState,
    folder: str | Path,
    *,
    process: Process,
    strict: bool = True,
    allow_pickle: bool = False,
    models_only: bool = False,
    arrival_timeout: float = ARRIVAL,
    timeout: float = COMPLETION,
) -> LoadReport:
    """Load a checkpoint into a run. Every rank calls it. Any number of processes may have saved it.

    Before the run changes, every file is compared with its checksum, and models and optimizers with what was saved.
    With `strict=False` models load what fits, and the report's notes list what does not. `models_only` loads nothing
    else. Folders in the API's own format (without a manifest) have no checksums. `allow_pickle` accepts pickled
    objects in them, which can run any code.

    Raises on every rank: CorruptCheckpoint with the bad files' names, CheckpointMismatch with the lists of missing,
    unexpected and differently shaped entries, CheckpointError for anything else.
    """
    folder = Path(folder)
    agreement = Agreement(process)
    rows = agreement.exchange("load_state", str(folder), arrival_timeout, _ABSENT)
    if len(set(rows)) > 1:
        reports = "; ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
        raise CheckpointError(f"load_state was called with another folder on other ranks: {reports}. Use one on all.")
    source: CheckpointReader | None = None
    try:
        if process.local_process_index == 0 and not folder.exists():
            restore(folder)
        agreement.exchange("load_state: open", None, timeout)
        plan: _LoadPlan | None = None
        error: Exception | None = None
        try:
            source = open_checkpoint(folder, run, process, allow_pickle)
            plan = _read(run, source, process, strict, models_only)
        except FileNotFoundError as caught:
            error = CorruptCheckpoint(f"{folder} has no {Path(caught.filename or '').name}")
        except Exception as caught:
            error = caught
        _agree(agreement, error, folder, timeout)
        assert source is not None and plan is not None
        try:
            _apply(run, source, plan, strict, models_only)
        except Exception as caught:
            # Other ranks may wait for this one in a collective: it does not wait for them.
            agreement.refuse(f"load_state: rank {process.process_index} failed: {type(caught).__name__}: {caught}")
            if isinstance(caught, CheckpointError) and not isinstance(caught, CheckpointMismatch):
                raise type(caught)(f"{caught}. {_PARTLY_LOADED}") from caught
            raise
        agreement.exchange("load_state: apply", None, timeout)
        for note in plan.notes if process.process_index == 0 else ():
            logger.warning("%s: %s", folder, note)
        return LoadReport(folder, plan.progress, source.world_size, notes=plan.notes, manifest=source.manifest)
    finally:
        if source is not None:
            source.close()


def _agree(agreement: Agreement, error: Exception | None, folder: Path, timeout: float) -> None:
    """Raise on every rank when one could not read its files, with the class of the first rank's error."""
    kind = next((name for name, one in _ERRORS.items() if isinstance(error, one)), "")
    mine = None if error is None else {"kind": kind, "text": f"{error}" or type(error).__name__}
    reports = agreement.exchange("load_state: read", mine, timeout)
    failed = [(rank, row) for rank, row in enumerate(reports) if row is not None]
    if not failed:
        return
    if error is not None and isinstance(error, CheckpointError):
        raise error
    rank, row = failed[0]
    raise _ERRORS.get(row["kind"], CheckpointError)(
        f"{folder} was not loaded: rank {rank}: {row['text']}. Nothing was changed."
    ) from error


def _read(run: RunState, source: CheckpointReader, process: Process, strict: bool, models_only: bool) -> _LoadPlan:
    """Read and check everything. Changes nothing."""
    notes: list[str] = []
    source.check_sizes()
    if not models_only:
        source.check_counts(source.counts())
    plan = _LoadPlan([], source.progress, notes)
    if not run.load_hooks:
        plan.models = _match(run.models, source, strict, notes)
    if process.local_process_index == 0:
        # One rank of each machine checks what is not read into new memory below; the others share its file cache.
        source.check_weights()
    if run.sharded is not None and not source.is_unsharded:
        notes.extend(run.sharded.check(source.folder, strict, models_only))
    if models_only:
        return plan
    for kind in kinds(Written.FILE):
        for index, item in enumerate(kind.objects(run)):
            # `run.sharded` reads what is sharded.
            read = dict if kind.in_shards(item) and not source.is_unsharded else source.read_file(kind, index, item)
            if kind.check_fit is not None:
                kind.check_fit(index, item, read, source.about(kind, index), source.folder)
            if read is not dict:
                plan.files.append((kind, index, item, read))
    plan.states, plan.progress = source.states(notes)
    return plan


def _match(
    models: Sequence[PreparedModel], source: CheckpointReader, strict: bool, notes: list[str]
) -> list[tuple[PreparedModel, ModelWeights]]:
    models = [model for model in models if source.is_unsharded or not model.saves_shards]
    matched = [(model, source.model(index)) for index, model in enumerate(models)]
    for index, (model, weights) in enumerate(matched):
        notes.extend(weights.compare(index, model, strict))
    return matched


def _apply(run: RunState, source: CheckpointReader, plan: _LoadPlan, strict: bool, models_only: bool) -> None:
    if run.load_hooks:
        # As in the API, a hook removes the models that it has loaded itself from the list.
        left = [part.module for part in run.models]
        for hook in run.load_hooks:
            hook(left, str(source.folder))
        kept = {id(module) for module in left}
        remaining = [part for part in run.models if id(part.module) in kept]
        plan.models = _match(remaining, source, strict, plan.notes)
    folder = source.folder
    for index, (part, weights) in enumerate(plan.models):
        with loading(f"model {index}", weights.path):
            weights.load(part, strict)
    if run.sharded is not None and not source.is_unsharded:
        with loading("the sharded models and optimizers", folder):
            run.sharded.load(folder, strict, models_only)
    for kind, index, item, read in plan.files:
        with loading(kind.title(index, item), folder):
            state = read()
        plan.notes.extend(kind.load(index, item, state, folder))
    # Generators last: what is loaded before may draw from them.
    for kind in sorted(kinds(Written.ONCE, Written.RANK), key=lambda kind: kind.name == "rng"):
        states = plan.states.get(kind.name, ())
        for index, (item, state) in enumerate(zip(kind.objects(run), states, strict=False)):
            plan.notes.extend(kind.load(index, item, state, folder))


def load_newest(
    run: RunState,
    directory: str | Path,
    *,
    process: Process,
    arrival_timeout: float = ARRIVAL,
    timeout: float = COMPLETION,
    **options: Any,
) -> LoadReport:
    """Load the newest valid `checkpoint_N` of a directory; every rank calls it. `options` as in `load_run`.

    Damaged checkpoints are skipped and listed in the report. Raises CheckpointError when none is left.
    """
    directory = Path(directory)
    agreement = Agreement(process)
    mine = None
    if process.process_index == 0:
        folders, unfit = candidates(directory)
        mine = [[str(folder) for folder in folders], [[str(folder), why] for folder, why in unfit]]
    names, skipped = agreement.exchange("load_state", mine, arrival_timeout, _ABSENT)[0]
    passed = [(Path(name), why) for name, why in skipped]
    for name in names:
        try:
            report = load_run(run, name, process=process, arrival_timeout=arrival_timeout, timeout=timeout, **options)
        except CorruptCheckpoint as error:
            passed.append((Path(name), str(error)))
            continue
        newest = int(name.rpartition("_")[2])
        report.skipped = [(path, why) for path, why in passed if int(path.name.rpartition("_")[2]) > newest]
        for path, why in report.skipped if process.process_index == 0 else ():
            logger.warning("checkpoint %s was skipped: %s", path, why)
        return report
    raise (CheckpointError if passed else MissingCheckpointError)(_none_left(directory, passed))


def _none_left(directory: Path, passed: list[tuple[Path, str]]) -> str:
    if not passed:
        return f"there is no checkpoint in {directory}: it has no folder named checkpoint_N"
    reports = "; ".join(f"{path.name}: {why}" for path, why in passed)
    return (
        f"no valid checkpoint is left in {directory}: {reports}. Nothing was moved or removed: restore one of them, "
        "or move them away to start anew"
    )


def resume(
    run: RunState,
    directory: str | Path,
    *,
    process: Process,
    **options: Any,
) -> LoadReport | None:
    """Load the newest valid checkpoint of a directory. Returns None if it has no checkpoint.

    Raises CheckpointError if there are checkpoints and none is valid: starting over would hide the loss.
    """
    agreement = Agreement(process)
    here = bool(list_checkpoints(directory)) if process.process_index == 0 else None
    present = agreement.exchange("resume", here, options.get("arrival_timeout", ARRIVAL), _ABSENT)[0]
    return load_newest(run, directory, process=process, **options) if present else None
