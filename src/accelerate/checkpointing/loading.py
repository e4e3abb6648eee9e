# SPDX-License-Identifier: Apache-2.0
"""Loading a run: read and check everything first, agree with the other ranks, then change the run."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from ..core.bucket_path import BucketPath
from ..core.errors import CheckpointError, ConfigurationError, MissingCheckpointError
from ..core.files import location, reason
from ..core.json_text import JSONObject
from ..core.objects import ranks_in_words, values_in_words
from ..core.trees import map_leaves
from ..parallel.prepared import PreparedModel
from ..runtime.agreement import Agreement, Process, RankErrors, Reduce, first
from ..runtime.passing import others_went_on
from .commit import FolderInUse, RunLocks, restore
from .kinds import CLASSES, ObjectState, Written, kinds, loading
from .layout import (
    ATTEMPTS,
    MANIFEST,
    CheckpointMismatch,
    CorruptCheckpoint,
    Manifest,
    always_replaced,
    candidates,
    check_sizes,
    fingerprint,
    is_shared,
)
from .pending import COMPLETION
from .run_state import HasState, RunState
from .source import CheckpointReader, ModelWeights, open_checkpoint

logger: logging.Logger = logging.getLogger(__name__)

_ABSENT = (
    "Every process must call it at the same place, not under `if accelerator.is_main_process`."
)
_UNCHANGED = "Nothing was changed."
_LENIENT = (
    " Prepare the same objects as in the run that saved them, or pass strict=False to "
    "load_state: data loaders and schedulers that do not fit then stay as they are."
)
_HOOKS_CALLED = "Changes that load hooks made remain; everything else is unchanged."
_PARTLY_LOADED = "The run is partly loaded: load another checkpoint, or restart the run."


@dataclass(repr=False)
class LoadReport:
    """What a load did.

    Fields:
        folder: the checkpoint.
        progress: the run's position when it was saved.
        world_size: how many processes saved it; 0 if the folder has no manifest.
        skipped: newer checkpoints that were skipped, and why.
        notes: what could not be restored exactly, one line each.
        manifest: the checkpoint's manifest; None for a folder of another library.
    """

    folder: Path
    progress: JSONObject
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
    progress: JSONObject
    notes: list[str]
    files: list[tuple[ObjectState, Callable[[], object]]] = field(default_factory=list)
    states: list[ObjectState] = field(default_factory=list)
    # of the objects that were saved, by kind
    classes: dict[str, list[str]] = field(default_factory=dict)
    # by the title of an object that a lenient load leaves out
    unfit: dict[str, str] = field(default_factory=dict)


def load_run(
    run: RunState,
    folder: str | Path,
    *,
    process: Process,
    strict: bool = True,
    allow_pickle: bool = False,
    models_only: bool = False,
    timeout: float = COMPLETION,
) -> LoadReport:
    """Load a checkpoint into a run. Every rank calls it. Any number of processes may have saved it.

    Before the run changes, every file is compared with its checksum, and each object with what was saved. Objects of
    the user's that only their `load_state_dict` can judge are loaded first, and get back what they had if one refuses.
    With `strict=False` models load what fits, schedulers and data loaders that do not fit stay as they are, and the
    report's notes list what does not fit. `models_only` loads nothing else. Folders in the API's own format (without a
    manifest) have no checksums. `allow_pickle` accepts pickled objects in them, which can run any code.

    Raises on every rank: CorruptCheckpoint with the bad files' names, CheckpointMismatch with the lists of missing,
    unexpected and differently shaped entries, CheckpointError for anything else.
    """
    folder = location(folder, "load_state")
    if process.local_process_index == 0 and not (folder / MANIFEST).exists():
        restore(folder)
    agreement = Agreement(process)
    _meet(agreement, timeout)
    agreement.exchange("load_state", str(folder), timeout, _ABSENT, _check_same)
    if run.entire is not None:
        from .adapters import AdapterModel  # slow to import

        for part in run.models:
            if isinstance(part, AdapterModel):
                part.before_load()
    for _ in range(ATTEMPTS):
        report = _load(run, folder, process, agreement, timeout, strict, allow_pickle, models_only)
        if report is not None:
            return report
    raise always_replaced(folder)


def _meet(agreement: Agreement, timeout: float) -> None:
    """Raise CheckpointError where rank 0 calls alone: the other ranks were seen to go on."""
    if agreement.rank:
        agreement.announce("load_state")
    elif others_went_on(agreement, "load_state", timeout):
        others = ranks_in_words(range(1, agreement.world))
        text = f"rank 0: {others} did not reach `load_state` and went on. {_ABSENT}"
        agreement.refuse(text)
        raise CheckpointError(text)


def _load(
    run: RunState,
    folder: Path,
    process: Process,
    agreement: Agreement,
    timeout: float,
    strict: bool,
    allow_pickle: bool,
    models_only: bool,
) -> LoadReport | None:
    """Load a checkpoint; None where a save has replaced the folder meanwhile, so that ranks may have read two."""
    source: CheckpointReader | None = None
    before = fingerprint(folder)
    try:
        plan: _LoadPlan | None = None
        error: Exception | None = None
        try:
            source = open_checkpoint(folder, run, process, allow_pickle)
            run = source.run
            plan = _read(run, source, process, strict, models_only)
        except FileNotFoundError as caught:
            error = CorruptCheckpoint(f"{folder} has no {PurePath(caught.filename or '').name}")
        except Exception as caught:
            error = caught
        row: JSONObject = {
            "unfit": {} if plan is None else plan.unfit,
            "is_replaced": fingerprint(folder) != before,
        }
        if row["is_replaced"]:
            error = None
        elif source is not None:
            has_all_ranks = source.manifest is None or is_shared(source.manifest)
            row["save"] = [
                0 if has_all_ranks else process.process_index - process.local_process_index,
                before,
            ]
        unfit = _agree(agreement, "load_state: read", error, folder, timeout, row, reduce=_unfit)
        if unfit is None:
            return None
        assert source is not None and plan is not None
        plan.notes.extend(f"{title} stays as it is: {why}" for title, why in unfit.items())
        plan.states = [item_state for item_state in plan.states if item_state.title not in unfit]
        states_before = _load_objects(plan, folder, agreement, timeout)
        if run.load_hooks:
            try:
                with _folder_of_hooks(folder, source, process, agreement, timeout) as local:
                    _run_hooks(run, source, local, plan, strict, agreement, timeout)
            except CheckpointError:
                _put_back(states_before, folder)
                raise
        try:
            _apply(run, source, plan, strict, models_only)
        except Exception as caught:
            # Other ranks may wait for this one in a collective: it does not wait for them.
            agreement.refuse(
                f"load_state: rank {process.process_index} failed: {type(caught).__name__}: {caught}"
            )
            if fingerprint(folder) != before:
                raise CheckpointError(
                    f"{folder} was replaced by another save while it was being loaded. "
                    f"{_PARTLY_LOADED}"
                ) from caught
            if isinstance(caught, CheckpointError) and not isinstance(caught, CheckpointMismatch):
                raise type(caught)(f"{caught}. {_PARTLY_LOADED}") from caught
            raise
        is_replaced = False
        if run.load_hooks or not source.is_unsharded:
            # Hooks and torch's readers of shards open files by their names; all others were open since the comparison.
            is_replaced = fingerprint(folder) != before
        if agreement.exchange(
            "load_state: apply", is_replaced, timeout, reduce=lambda rows: any(rows.values())
        ):
            return None
        for note in plan.notes if process.process_index == 0 else ():
            logger.warning("%s: %s", folder, note)
        return LoadReport(
            folder, plan.progress, source.world_size, notes=plan.notes, manifest=source.manifest
        )
    finally:
        if source is not None:
            source.close()


def _check_same(folders: dict[int, str]) -> None:
    if len(set(folders.values())) > 1:
        raise CheckpointError(
            "load_state was called with different folders on different ranks: "
            f"{values_in_words(folders)}. Use the same folder on all ranks."
        )


def _unfit(rows: dict[int, JSONObject]) -> dict[str, str] | None:
    """What does not fit on some rank, by title; None where the ranks have not all read the same save."""
    unfit: dict[str, str] = {}
    fingerprints: dict[int, int | None] = {}
    for row in rows.values():
        if row["is_replaced"]:
            return None
        unfit.update(row["unfit"])
        if "save" in row:
            home, present = row["save"]
            if fingerprints.setdefault(home, present) != present:
                return None
    return unfit


def load_options(load_kwargs: dict[str, Any] | None, map_location: object = None) -> dict[str, Any]:
    """Arguments of `torch.load`, as arguments of `load_run`.

    Raises ConfigurationError for a `map_location` that the API does not have: it names where its files are read to.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise ConfigurationError(
            f"load_state: map_location={map_location!r} is neither 'cpu' nor 'on_device'"
        )
    arguments = dict(load_kwargs or {})
    arguments.pop("map_location", None)
    if not arguments.pop("weights_only", True):
        arguments["allow_pickle"] = True
    return arguments


def _agree(
    agreement: Agreement,
    subject: str,
    error: Exception | None,
    folder: Path,
    timeout: float,
    value: object = None,
    effect: str = _UNCHANGED,
    reduce: Reduce | None = None,
) -> Any:
    """What `reduce` makes of the values. If a rank has failed, the same error on all; `effect` is what is so then."""
    try:
        return agreement.exchange(subject, value, timeout, reduce=reduce, error=error)
    except RankErrors as failed:
        text = str(failed).replace(f"{folder}: ", "")
        if failed.common is not None:
            text = failed.common.removeprefix(f"{folder}: ")
        if "Nothing was" not in text:
            text = f"{text.removesuffix('.')}. {effect}"
        if failed.common is not None and isinstance(error, CheckpointError):
            # Without a second traceback that says the same.
            if isinstance(error, CorruptCheckpoint) or text == str(error):
                raise error from error.__cause__
            raise type(error)(text if str(folder) in text else f"{folder}: {text}") from error
        error_class = CheckpointError
        # Damage counts most: every rank tries an older checkpoint then.
        for kind in (CheckpointMismatch, CorruptCheckpoint):
            if kind.__name__ in failed.classes:
                error_class = kind
        raise error_class(f"{folder} was not loaded: {text}") from error


def _read(
    run: RunState, source: CheckpointReader, process: Process, strict: bool, models_only: bool
) -> _LoadPlan:
    """Read and check everything. Changes nothing."""
    notes: list[str] = []
    if process.local_process_index == 0:
        # One rank of each machine checks what is not read into new memory below; the others share its file cache.
        if source.manifest is not None:
            check_sizes(source.folder, source.manifest)
        source.check_weights()
    if not models_only:
        source.check_counts(source.counts())
    plan = _LoadPlan([], source.progress, notes)
    if not run.load_hooks:
        plan.models = _match(run.models, source, strict, notes)
    if run.sharded is not None and not source.is_unsharded:
        notes.extend(run.sharded.check(source.folder, strict, models_only))
    if models_only:
        return plan
    for kind in kinds(Written.FILE):
        for index, item in enumerate(kind.objects(run)):
            # `run.sharded` reads what is sharded.
            is_sharded = kind.in_shards(item) and not source.is_unsharded
            read: Callable[[], object] = dict
            if not is_sharded:
                read = source.read_file(kind, index, item)
                plan.files.append((ObjectState(kind, index, item), read))
            if kind.check_fit is not None:
                about = source.about(kind, index)
                kind.check_fit(index, item, read, about, source.folder)
    states, progress = source.states(notes)
    plan.progress = dict(progress)
    plan.classes = plan.progress.pop(CLASSES, {})
    wrong: list[str] = []
    advice = ""
    for kind in kinds(Written.ONCE, Written.RANK):
        pairs = zip(kind.objects(run), states.get(kind.name, ()), strict=False)
        for index, (item, state) in enumerate(pairs):
            item_state = ObjectState(kind, index, item, state)
            plan.states.append(item_state)
            if kind.judged_together:
                continue
            try:
                notes.extend(item_state.check(plan.classes))
            except CheckpointError as error:
                if kind.optional and not strict:
                    plan.unfit[item_state.title] = str(error)
                else:
                    wrong.append(f"{item_state.title}: {error}")
                    advice = _LENIENT if kind.optional else advice
    if wrong:
        raise CheckpointMismatch(
            f"{source.folder} does not fit {'; '.join(wrong)}. Nothing was loaded.{advice}"
        )
    # Generators last: what is loaded before may draw from them.
    plan.states.sort(key=lambda item_state: item_state.kind.name == "rng")
    return plan


def _match(
    models: Sequence[PreparedModel], source: CheckpointReader, strict: bool, notes: list[str]
) -> list[tuple[PreparedModel, ModelWeights]]:
    if not source.is_unsharded:
        models = [model for model in models if not model.saves_shards]
    matched = []
    for index, model in enumerate(models):
        weights = _weights(source, index)
        notes.extend(weights.compare(index, model, strict))
        matched.append((model, weights))
    return matched


def _weights(source: CheckpointReader, index: int) -> ModelWeights:
    if source.manifest is not None and index < len(source.manifest.models):
        row = source.manifest.models[index]
    else:
        row = {}
    if "adapters" not in row:
        return source.model(index)
    from .adapters import adapter_weights  # slow to import

    return adapter_weights(source, index, row)


def _load_objects(
    plan: _LoadPlan, folder: Path, agreement: Agreement, timeout: float
) -> list[ObjectState]:
    """Load what is written once, and return the states before.

    If an object of any rank refuses its state, all of them get back what they had.
    """
    before: list[ObjectState] = []
    error: Exception | None = None
    try:
        for item_state in plan.states:
            if item_state.kind.judged_together:
                with loading(item_state.title, folder):
                    item_state.check(plan.classes)
        for item_state in plan.states:
            if item_state.kind.written is Written.ONCE:
                before.append(replace(item_state, state=_present_state(item_state.item)))
                plan.notes.extend(item_state.load(folder))
    except Exception as caught:
        error = caught
    if error is None:
        effect = _UNCHANGED
    else:
        effect = _put_back(before, folder)
    try:
        _agree(agreement, "load_state: objects", error, folder, timeout, effect=effect)
    except CheckpointError:
        if error is None:
            _put_back(before, folder)
        raise
    return before


_NOT_KNOWN = object()


def _present_state(item: HasState) -> object:
    """A copy of an object's state, tensors in host memory; `_NOT_KNOWN` where it cannot be had."""
    try:
        state = item.state_dict()
        return copy.deepcopy(map_leaves(lambda tensor: tensor.detach().to("cpu"), state))
    except Exception:
        return _NOT_KNOWN


def _put_back(before: list[ObjectState], folder: Path) -> str:
    """Load the states that objects had before. Returns what is so then."""
    lost = []
    for item_state in reversed(before):
        try:
            if item_state.state is _NOT_KNOWN:
                raise CheckpointError("its state could not be copied")
            item_state.load(folder)
        except Exception as error:
            lost.append(f"{item_state.title} ({error})")
    if not lost:
        return _UNCHANGED
    text = f"These could not be restored: {', '.join(lost)}. Everything else is unchanged."
    logger.error("%s", text)
    return text


@contextlib.contextmanager
def _folder_of_hooks(
    checkpoint: Path,
    source: CheckpointReader,
    process: Process,
    agreement: Agreement,
    timeout: float,
) -> Iterator[Path]:
    """The folder that load hooks read: of a checkpoint in a bucket, a local copy that the ranks of a machine share."""
    if not isinstance(checkpoint, BucketPath) or source.manifest is None:
        yield source.folder
        return
    from .copying import copy_files

    manifest = source.manifest
    local = ""
    error: Exception | None = None
    try:
        if process.local_process_index == 0:
            local = tempfile.mkdtemp(prefix="accelerate-load-")
            names = [name for name in manifest.files if not source.read_fresh(name)]
            try:
                copy_files(checkpoint, Path(local), manifest, names)
            except Exception as caught:
                error = caught
        _agree(agreement, "load_state: copy", error, checkpoint, timeout, local)
        first_here = process.process_index - process.local_process_index
        yield Path(agreement.values([first_here])[first_here])
    finally:
        if local:
            shutil.rmtree(local, ignore_errors=True)


def _run_hooks(
    run: RunState,
    source: CheckpointReader,
    folder: Path,
    plan: _LoadPlan,
    strict: bool,
    agreement: Agreement,
    timeout: float,
) -> None:
    """Call the user's hooks, which read `folder`, and compare the models that they leave."""
    error: Exception | None = None
    try:
        # As in the API, a hook removes the models that it has loaded itself from the list.
        left = [part.hooked for part in run.models]
        for hook in run.load_hooks:
            with loading(
                f"the hook {getattr(hook, '__qualname__', hook)}", source.folder, "has failed"
            ):
                hook(left, str(folder))
        kept = {id(module) for module in left}
        remaining = [part for part in run.models if id(part.hooked) in kept]
        plan.models = _match(remaining, source, strict, plan.notes)
    except Exception as caught:
        error = caught
    _agree(agreement, "load_state: hooks", error, source.folder, timeout, effect=_HOOKS_CALLED)


def _apply(
    run: RunState, source: CheckpointReader, plan: _LoadPlan, strict: bool, models_only: bool
) -> None:
    folder = source.folder
    for index, (part, weights) in enumerate(plan.models):
        with loading(f"model {index}", weights.path):
            weights.load(part, strict)
    if run.sharded is not None and not source.is_unsharded:
        with loading("the sharded models and optimizers", folder):
            run.sharded.load(folder, strict, models_only)
    for item_state, read in plan.files:
        with loading(item_state.title, folder):
            state = read()
        complete = replace(item_state, state=state)
        plan.notes += complete.load(folder)
    for item_state in plan.states:
        if item_state.kind.written is Written.RANK:
            plan.notes += item_state.load(folder)


def load_newest(
    run: RunState,
    directory: str | Path,
    *,
    process: Process,
    **options: Any,
) -> LoadReport:
    """Load the newest valid `checkpoint_N` of a directory; every rank calls it. `options` as in `load_run`.

    Damaged checkpoints are skipped and listed in the report. Raises CheckpointError when none is left.
    """
    report = resume(run, directory, process=process, **options)
    if report is None:
        raise MissingCheckpointError(
            f"there is no checkpoint in {directory}: it does not contain a folder named "
            "checkpoint_N"
        )
    return report


def resume(
    run: RunState,
    directory: str | Path,
    *,
    process: Process,
    locks: RunLocks | None = None,
    timeout: float = COMPLETION,
    **options: Any,
) -> LoadReport | None:
    """Like `load_newest`, but return None if the directory does not contain a checkpoint.

    With `locks` the run takes the directory's lock. Raises FolderInUse if another live run saves into it, and
    CheckpointError if there are checkpoints and none is valid: starting over would hide the loss.
    """
    directory = location(directory, "directory")
    agreement = Agreement(process)
    _meet(agreement, timeout)
    # By checkpoint: why it was not loaded.
    damaged: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for _ in range(ATTEMPTS):
        listing = _listing(agreement, directory, locks, timeout)
        names = [name for name in listing["names"] if name not in damaged]
        for name in names:
            try:
                report = load_run(run, name, process=process, timeout=timeout, **options)
            except CorruptCheckpoint as error:
                damaged[name] = str(error)
                continue
            newest = _number(name)
            for path, why in {**listing["skipped"], **damaged}.items():
                if _number(path) > newest:
                    report.skipped.append((location(path, "folder"), why))
            for folder, why in report.skipped if process.process_index == 0 else ():
                logger.warning("checkpoint %s was skipped: %s", folder, why)
            return report
        # What was listed may have made room for newer ones meanwhile: they are in the next list.
        if not names and listing["skipped"] == skipped:
            break
        skipped = listing["skipped"]
    damaged = {name: why for name, why in damaged.items() if name in listing["names"]}
    reasons = {**listing["skipped"], **damaged}
    if not reasons:
        return None
    reports = "; ".join(f"{PurePath(path).name}: {why}" for path, why in reasons.items())
    raise CheckpointError(
        f"{directory} does not contain a valid checkpoint: {reports}. Nothing was moved or "
        "removed: restore one of them, or move them away to start from scratch"
    )


def _number(path: str) -> int:
    return int(path.rpartition("_")[2])


def _listing(
    agreement: Agreement, directory: Path, locks: RunLocks | None, timeout: float
) -> JSONObject:
    """The checkpoints of a directory as rank 0 sees them: names to try, and why others are skipped."""
    listing: JSONObject = {}
    if agreement.rank == 0:
        try:
            if locks is not None and directory.is_dir():
                try:
                    locks.acquire_run(directory)
                except OSError as error:
                    logger.debug("no lock for %s: %s", directory, error)  # the first save takes it
            folders, unfit = candidates(directory)
            listing = {
                "names": list(map(str, folders)),
                "skipped": {str(folder): why for folder, why in unfit},
            }
        except FolderInUse as error:
            listing = {"in_use": f"nothing was resumed: {error}"}
        except OSError as error:
            listing = {"error": f"{directory} cannot be read: {reason(error)}"}
    answer: JSONObject = agreement.exchange("load_state", listing, timeout, _ABSENT, first)
    if "in_use" in answer:
        raise FolderInUse(answer["in_use"])
    if "error" in answer:
        raise CheckpointError(f"rank 0: {answer['error']}")
    return answer
