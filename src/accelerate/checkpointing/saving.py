# SPDX-License-Identifier: Apache-2.0
"""Saving a run: collect what each rank writes, write it to a temporary folder, agree with the other ranks, commit."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import CheckpointError, CommunicationError, ConfigurationError
from ..core.files import follow_links, user_path
from ..runtime.agreement import Agreement, Process
from ..runtime.communication import is_lost
from . import compat, per_rank
from .blocks import BlockIO, FileRecord, Segment
from .commit import commit, drop_temporary, open_temporary, save_target
from .layout import SESSION_NAME, numbered, rotate, set_aside
from .manifest import Manifest, stamp
from .run_lock import RunLocks, SaveLock
from .session import RunState, documents, rank_documents, shared_state
from .tensorfile import ALIASES, segments, without_aliases

if TYPE_CHECKING:
    from .writer import Writer

logger = logging.getLogger(__name__)

ARRIVAL = 30.0  # seconds within which every rank must have called
COMPLETION = 1800.0  # seconds within which every rank must have written its files
_VISIBLE = 10.0  # seconds until a folder made on another machine must be visible here
_ABSENT = (
    "Every process must call it, at the same place of the loop: not under `if accelerator.is_main_process`. If a rank "
    "may come later than that, call `accelerator.wait_for_everyone()` before."
)


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that a load has skipped, with the identity of its folder at that time."""

    name: str
    reason: str
    identity: tuple[int, int, int] | None

    @classmethod
    def found(cls, folder: Path, reason: str) -> DamagedCheckpoint:
        """Create the record of a damaged checkpoint in `folder`."""
        return cls(folder.name, reason, _identity(folder))


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """What identifies a folder: another folder of the same name has another identity."""
    try:
        found = folder.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


@dataclass
class Options:
    """How a run is saved.

    Fields:
        checkpoints: the directory to rotate in after the commit; None for no rotation.
        locks: the locks that the run keeps until its end. None takes a lock for this save only.
        damaged: checkpoints that a load has skipped. Those in the same directory are renamed before the save.
    """

    layout: str = "native"
    safe_serialization: bool = True
    save_on_each_node: bool = False
    arrival_timeout: float = ARRIVAL
    timeout: float = COMPLETION
    checkpoints: Path | None = None
    total_limit: int | None = None
    locks: RunLocks | None = None
    damaged: Sequence[DamagedCheckpoint] = ()

    def __post_init__(self) -> None:
        if self.layout not in ("native", "compat"):
            raise ConfigurationError(f"layout={self.layout!r}: a checkpoint's layout is 'native' or 'compat'")


@dataclass
class PendingCheckpoint:
    """A save in progress: what this rank writes, and where."""

    folder: Path
    temporary: Path
    home: int  # the rank that commits the folder this rank writes to
    files: dict[str, list[Segment]] = field(default_factory=dict)
    pickled: dict[str, Any] = field(default_factory=dict)
    sharded: Any = None
    extras: bool = False  # hooks or sharded writers have written into the folder too
    lock: SaveLock | None = None  # on the rank that commits the folder
    error: BaseException | None = None
    about: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] | None = None  # the content of the shared document, on a rank that writes one


def save_run(
    run: RunState,
    folder: str | Path,
    *,
    process: Process,
    options: Options | None = None,
    writer: Writer | None = None,
) -> Path:
    """Save a run into `folder`, which is then a complete checkpoint. Every rank calls it. Returns the folder.

    With a `writer` the call returns when the state has been copied to host memory. The rest runs in the background,
    and the writer's next call raises its error. Without one, the checkpoint is on disk when this returns.

    Raises CheckpointError on every rank when one of them fails, or does not call within `options.arrival_timeout`
    seconds. The run is unchanged then, and so is an earlier checkpoint in `folder`.
    """
    options = options or Options()
    given = user_path(folder, "save_state")
    if writer is not None:
        writer.wait()
    pending = _open(given, process, options)
    agreement = Agreement(process)
    try:
        _take_states(pending, run, process, options, agreement, writer)
        if writer is not None:
            writer.submit(pending, process, options)
    except BaseException:
        _discard(pending, process)
        raise
    if writer is None:
        complete(pending, process, options, agreement)
    return given


def _take_states(
    pending: PendingCheckpoint,
    run: RunState,
    process: Process,
    options: Options,
    agreement: Agreement,
    writer: Writer | None,
) -> None:
    """Collect what this rank writes: the states, then what differs between ranks, then shards and copies.

    A failure of one rank is raised on every rank, by this call even if files are written in the background. If only
    writing without collectives is left, the ranks compare their errors after it.
    """
    try:
        try:
            _collect(pending, run, process, options, functools.partial(_unsharded_states, run, pending, process))
        except _ReportedError:
            raise
        except BaseException as error:
            pending.error = error
        own = _compare_ranks(pending, run, process, options, agreement)
        if pending.error is None:
            try:
                _take_shards(pending, run, process, options, blocking=writer is None)
                pending.files.update(own())
                if writer is not None:
                    writer.copy(pending)
            except _ReportedError:
                raise
            except BaseException as error:
                pending.error = error
    except _ReportedError as reported:
        raise _raised_here(reported.error, process, pending.folder) from reported.error
    if run.sharded is not None or writer is not None:
        # Writing shards uses collectives, and an error in the background is raised by the next save. No rank may begin
        # either while another one has failed.
        failed = None if pending.error is None else _error_text(pending.error)
        reports = agreement.exchange("save_state: states", failed, options.timeout)
        _raise_reported(reports, pending.error, process, pending.folder)


class _ReportedError(Exception):
    """An error of this rank while others may wait for it in a collective. They read it at the next agreement."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _unsharded_states(run: RunState, pending: PendingCheckpoint, process: Process) -> tuple[list[Any], list[Any]]:
    """The states of models and optimizers that do not save shards. A sharded one is gathered by all ranks."""
    models = [part for part in run.models if not part.saves_shards]
    optimizers = [part for part in run.optimizers if not part.saves_shards]
    is_collective = any(part.is_partial for part in models) or any(part.is_partial for part in optimizers)
    with _reported_at_once(pending, process) if is_collective else contextlib.nullcontext():
        weights = [dict(part.checkpoint_state_dict()) for part in models]
        return weights, [part.state_dict() for part in optimizers]


def _take_shards(
    pending: PendingCheckpoint, run: RunState, process: Process, options: Options, blocking: bool
) -> None:
    if run.sharded is None:
        return
    if not blocking:
        run.sharded.prepare_background()
    with _reported_at_once(pending, process) if run.sharded.is_collective else contextlib.nullcontext():
        pending.sharded = run.sharded.stage(blocking, options.layout == "compat")


@contextlib.contextmanager
def _reported_at_once(pending: PendingCheckpoint, process: Process) -> Iterator[None]:
    """A block that may use collectives: an error of this rank is published for the others and raised at once.

    Comparing errors first could deadlock, because other ranks may wait in a collective until this process ends.
    An agreement of the calling thread must follow the block.
    """
    try:
        yield
    except (_ReportedError, CommunicationError):
        # Published already; or a failure of another rank has broken the collective, and the next agreement reports it.
        raise
    except Exception as error:
        if is_lost(error) or process.num_processes == 1:
            raise
        Agreement(process).refuse(_message([(process.process_index, _error_text(error))], pending.folder))
        raise _ReportedError(error) from error


def complete(pending: PendingCheckpoint, process: Process, options: Options, agreement: Agreement) -> None:
    """Write the files, agree with the other ranks, commit. Raises CheckpointError on every rank when one fails."""
    try:
        _complete(pending, process, options, agreement)
    finally:
        _close(pending)


def _close(pending: PendingCheckpoint) -> None:
    if pending.lock is not None:
        pending.lock.close()


def _discard(pending: PendingCheckpoint, process: Process) -> None:
    """Clean up after a failed save: remove its temporary folder, then release the lock."""
    try:
        if pending.home == process.process_index:
            drop_temporary(pending.temporary)
    finally:
        _close(pending)


def _complete(pending: PendingCheckpoint, process: Process, options: Options, agreement: Agreement) -> None:
    records: dict[str, FileRecord] = {}
    with BlockIO() as io:
        if pending.error is None:
            try:
                records = _write(pending, io)
            except BaseException as error:
                pending.error = error
        try:
            files = _agree(pending, process, agreement, records, io, options.timeout)
        except BaseException:
            if pending.home == process.process_index:
                drop_temporary(pending.temporary)
            raise
    failure: BaseException | None = None
    if pending.home == process.process_index:
        failure = _finish(pending, process, options, files)
    reports = agreement.exchange(
        "save_state: commit", None if failure is None else _error_text(failure), options.timeout
    )
    _raise_reported(reports, failure, process, pending.folder)


def _finish(
    pending: PendingCheckpoint, process: Process, options: Options, files: dict[str, FileRecord]
) -> BaseException | None:
    """Commit and rotate, on the rank that owns the folder. Returns an error instead of raising it."""
    try:
        manifest = Manifest(
            layout=options.layout, world_size=process.num_processes, files=files, **pending.about, **stamp()
        )
        if pending.lock is not None:
            pending.lock.keep()
        commit(pending.temporary, pending.folder, manifest)
    except BaseException as error:
        drop_temporary(pending.temporary)
        return error
    if options.checkpoints is not None:
        try:
            removed = rotate(options.checkpoints, options.total_limit)
        except OSError as error:
            # The new checkpoint is complete: failing to remove an old one must not stop the run.
            logger.warning("old checkpoints in %s could not be removed: %s", options.checkpoints, error)
        else:
            if removed:
                logger.info("removed %s to keep %d", ", ".join(f.name for f in removed), options.total_limit)
    return None


# --- opening -------------------------------------------------------------------------------------------------------


def _open(given: Path, process: Process, options: Options) -> PendingCheckpoint:
    """The temporary folder this rank writes to. Raises CheckpointError on every rank when the ranks disagree."""
    agreement = Agreement(process)
    folder = given.absolute()
    pending: PendingCheckpoint | None = None
    error: BaseException | None = None
    try:
        if any(folder.name == damaged.name for damaged in options.damaged):
            # A damaged checkpoint that is a link is renamed itself, not its target.
            folder = follow_links(folder.parent, "save_state") / folder.name
        else:
            folder = follow_links(folder, "save_state")
        if process.process_index == 0:
            pending = _start(folder, options)
            folder = pending.folder
    except Exception as caught:
        error = caught
    mine = {
        "folder": str(given),
        "layout": options.layout,
        "temporary": None if pending is None else pending.temporary.name,
        "error": None if error is None else _error_text(error),
    }
    try:
        rows = agreement.exchange("save_state", mine, options.arrival_timeout, _ABSENT)
        _check_same(rows)
        _raise_reported([row["error"] for row in rows], error, process, folder)
    except BaseException:
        if pending is not None:
            drop_temporary(pending.temporary)
            _close(pending)
        raise
    if pending is None:
        pending = PendingCheckpoint(folder, folder.with_name(rows[0]["temporary"]), home=0)
        try:
            _find_home(pending, process, options)
        except Exception as caught:
            error = caught
    try:
        # A rank that fails in a hook removes the folder: by then every rank must have found it.
        failed = None if error is None else _error_text(error)
        reports = agreement.exchange("save_state: folder", failed, options.timeout)
        _raise_reported(reports, error, process, folder)
    except BaseException:
        _discard(pending, process)
        raise
    return pending


def _start(folder: Path, options: Options) -> PendingCheckpoint:
    """On the rank that commits the folder: take its lock, free its name, create the temporary folder."""
    is_damaged = any(folder.name == damaged.name for damaged in options.damaged)
    lock = SaveLock(folder if is_damaged else save_target(folder), options.locks)
    try:
        _free_numbers(folder, options)
        target = save_target(folder)
        return PendingCheckpoint(target, open_temporary(target), home=0, lock=lock)
    except BaseException:
        lock.close()
        raise


def _free_numbers(target: Path, options: Options) -> None:
    """Rename the damaged checkpoints that the run has skipped, so that it can use their numbers."""
    for damaged in options.damaged:
        folder = target.with_name(damaged.name)
        identity = _identity(folder)
        if identity is None:
            continue
        if identity != damaged.identity:
            if folder == target:
                raise CheckpointError(f"{folder} has been saved by another run since this one was loaded")
            continue
        moved = set_aside(folder)
        logger.warning("skipped damaged checkpoint %s, which is now %s: %s", folder, moved.name, damaged.reason)


def _check_same(rows: list[dict[str, Any]]) -> None:
    for name in ("folder", "layout"):
        if len({row[name] for row in rows}) > 1:
            values = "; ".join(f"rank {rank}: {row[name]}" for rank, row in enumerate(rows))
            raise CheckpointError(
                f"save_state was called with another {name} on other ranks: {values}. Use one on all."
            )


def _find_home(pending: PendingCheckpoint, process: Process, options: Options) -> None:
    """Find the folder of rank 0, or, on a machine that does not share it, that of this machine's first rank."""
    if _appears(pending.temporary, 0.5 if options.save_on_each_node else _VISIBLE):
        return
    if not options.save_on_each_node:
        raise CheckpointError(
            f"the folder {pending.temporary.parent}, where rank 0 writes, is not shared with this rank's machine. "
            "Save to a shared file system, or set ProjectConfiguration(save_on_each_node=True)"
        )
    pending.home = process.process_index - process.local_process_index
    if process.local_process_index == 0:
        own = _start(pending.folder, options)
        pending.lock = own.lock
        try:
            own.temporary.rename(pending.temporary)
        except OSError:
            drop_temporary(own.temporary)
            raise
    elif not _appears(pending.temporary, _VISIBLE):
        raise CheckpointError(f"the folder {pending.temporary.parent} is not shared by the ranks of this machine")


def _appears(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- contents ------------------------------------------------------------------------------------------------------


def _collect(
    pending: PendingCheckpoint,
    run: RunState,
    process: Process,
    options: Options,
    unsharded_states: Callable[[], tuple[list[Any], list[Any]]],
) -> None:
    """Collect the states that this rank writes. Every rank calls `unsharded_states`, which may use collectives."""
    if len({part.saves_shards for part in run.models} | {part.saves_shards for part in run.optimizers}) > 1:
        raise CheckpointError("a run whose models and optimizers are partly sharded and partly not cannot be saved")
    writes_shared = pending.home == process.process_index
    modules = [part.module for part in run.models]
    # Hooks may communicate: a rank that fails before one must publish its error at once.
    with _reported_at_once(pending, process) if run.save_hooks else contextlib.nullcontext():
        weights, states = unsharded_states()
        for hook in run.save_hooks:
            # As in the API, a hook may write into the folder and remove weights from what is saved here.
            hook(modules, weights, str(pending.temporary))
    pending.about = {
        "progress": _plain(run.progress),
        "mesh": dict(run.mesh),
        "models": [
            {"class": type(part.state_template).__qualname__, "sharded": part.saves_shards} for part in run.models
        ],
        "optimizers": [{**part.describe(), "sharded": part.saves_shards} for part in run.optimizers],
    }
    pending.extras = bool(run.save_hooks) or run.sharded is not None
    if options.layout == "compat":
        pending.pickled.update(compat.rank_files(run, process.process_index))
        if writes_shared:
            pending.pickled.update(compat.shared_files(run, states))
    else:
        pending.files.update(rank_documents(run, process.process_index))
        if writes_shared:
            for index, state in enumerate(states):
                pending.files.update(documents(numbered("optimizer", index, ""), state, f"optimizer {index}"))
            pending.shared = shared_state(run)
            pending.files.update(documents(SESSION_NAME.removesuffix(".json"), pending.shared, "session"))
    if writes_shared:
        for index, state in enumerate(weights):
            _collect_weights(pending, index, state, options.safe_serialization)


def _compare_ranks(
    pending: PendingCheckpoint, run: RunState, process: Process, options: Options, agreement: Agreement
) -> Callable[[], dict[str, list[Segment]]]:
    """Find which states differ from those of the rank that writes the shared document. The callable encodes them.

    Every rank takes part, including one that has failed: an error of any rank is raised on all of them.
    """
    if process.num_processes == 1:
        return dict
    rows: list[per_rank.StateEntry] = []
    mine: dict[str, str] | None = None
    if pending.error is None:
        try:
            rows = per_rank.entries(run, pending.shared if pending.shared is not None else shared_state(run))
            mine = per_rank.digests(rows, strict=options.layout == "native")
        except BaseException as error:
            pending.error = error
    failed = None if pending.error is None else _error_text(pending.error)
    found = agreement.exchange("save_state: compare", {"error": failed, "digests": mine}, options.timeout)
    digests = [row["digests"] for row in found]
    _raise_reported([row["error"] for row in found], pending.error, process, pending.folder)
    per_rank.check_same_entries(digests)
    keys = per_rank.differing(mine or {}, digests[pending.home])
    if not keys:
        return dict
    if options.layout == "native":
        name = per_rank.document_name(process.process_index)
        return lambda: documents(name, per_rank.own_document(rows, keys), name)
    logger.warning(
        "rank %d: layout='compat' has no place for the state of one rank: that of rank %d is saved for %s. "
        "layout='native' saves each rank's own.",
        process.process_index,
        pending.home,
        ", ".join(row.label for row in rows if row.key in keys),
    )
    return dict


def _collect_weights(pending: PendingCheckpoint, index: int, state: dict[str, Any], safe: bool) -> None:
    if not safe:
        pending.pickled[numbered("pytorch_model", index, ".bin")] = state
        return
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    kept, aliases = without_aliases(tensors)
    # The tools of the safetensors format write the same entries, `alias: name`, for shared tensors.
    metadata = dict(aliases)
    if aliases:
        metadata[ALIASES] = _json(aliases)
    pending.files[numbered("model", index, ".safetensors")] = segments(kept, metadata)
    rest = {name: value for name, value in state.items() if name not in tensors}
    if rest:
        pending.files.update(documents(numbered("model_extra", index, ""), rest, f"model {index}"))


def _json(value: Any) -> str:
    import json

    return json.dumps(value, separators=(",", ":"))


def _plain(progress: dict[str, Any]) -> dict[str, Any]:
    """The entries of the progress that go into the manifest: values of JSON's own scalar types."""
    return {
        key: value
        for key, value in progress.items()
        if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    }


# --- writing and agreeing ------------------------------------------------------------------------------------------


def _write(pending: PendingCheckpoint, io: BlockIO) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    if pending.sharded is not None:
        pending.sharded(pending.temporary)
    paths = [(pending.temporary / name, content) for name, content in pending.files.items()]
    for name, record in zip(pending.files, io.write_all(paths), strict=True):
        records[name] = record
    for name, value in pending.pickled.items():
        torch.save(value, pending.temporary / name)
        records[name] = io.record(pending.temporary / name)
    return records


def _agree(
    pending: PendingCheckpoint,
    process: Process,
    agreement: Agreement,
    records: dict[str, FileRecord],
    io: BlockIO,
    timeout: float,
) -> dict[str, FileRecord]:
    """The records of all files in this rank's folder, once every rank has written. Raises on every rank otherwise."""
    failed = None if pending.error is None else _error_text(pending.error)
    mine = {"error": failed, "home": pending.home, "extras": pending.extras, "files": _to_json(records)}
    rows = agreement.exchange("save_state: write", mine, timeout)
    _raise_reported([row["error"] for row in rows], pending.error, process, pending.folder)
    peers = [rank for rank, row in enumerate(rows) if row["home"] == pending.home]
    files = _merge(rows[rank]["files"] for rank in peers)
    if any(row["extras"] for row in rows):
        failure: BaseException | None = None
        found: dict[str, FileRecord] = {}
        try:
            # Files of hooks and sharded writers have no checksum yet: each rank of the folder computes some of them.
            share = sorted(_relative(pending.temporary) - set(files))[peers.index(process.process_index) :: len(peers)]
            found = {name: io.record(pending.temporary / name) for name in share}
        except BaseException as error:
            failure = error
        mine = {"error": None if failure is None else _error_text(failure), "files": _to_json(found)}
        rows = agreement.exchange("save_state: checksums", mine, timeout)
        _raise_reported([row["error"] for row in rows], failure, process, pending.folder)
        files.update(_merge(rows[rank]["files"] for rank in peers))
    return dict(sorted(files.items()))


def _to_json(records: dict[str, FileRecord]) -> dict[str, Any]:
    return {name: record.to_json() for name, record in records.items()}


def _merge(rows: Iterator[dict[str, Any]]) -> dict[str, FileRecord]:
    return {name: FileRecord.from_json(record) for row in rows for name, record in row.items()}


def _relative(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _error_text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, (CheckpointError, ConfigurationError)) else f"{type(error).__name__}: {text}"


def _raised_here(error: BaseException, process: Process, folder: Path) -> BaseException:
    """The error to raise on the rank where it happened: an interrupt itself, any other as on the other ranks."""
    if not isinstance(error, Exception):
        return error
    return CheckpointError(_message([(process.process_index, _error_text(error))], folder))


def _raise_reported(reports: list[str | None], own: BaseException | None, process: Process, folder: Path) -> None:
    """Raise the reported errors of all ranks, if any; the cause is this rank's own error."""
    if not any(reports):
        return
    if own is not None and not isinstance(own, Exception):
        raise own
    raise CheckpointError(_message([(rank, text) for rank, text in enumerate(reports) if text], folder)) from own


def _message(errors: Sequence[tuple[int, str]], folder: Path) -> str:
    """The message that every rank raises: which ranks failed, and why."""
    lines = "; ".join(f"rank {rank}: {text}" for rank, text in errors)
    kept = "Its earlier content is unchanged." if _exists(folder) else "Earlier checkpoints are unchanged."
    return f"{folder} was not saved: {lines}. {kept}"


def _exists(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.exists()
    return False
