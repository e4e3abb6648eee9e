# SPDX-License-Identifier: Apache-2.0
"""Saving a run: collect what each rank writes, write it to a temporary folder, agree with the other ranks, commit."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CheckpointError
from ..core.files import user_path
from ..core.json_text import JSONObject
from ..core.torch_files import write_file
from ..runtime.agreement import Process
from ..runtime.calls import ranks_in_words
from . import per_rank
from .blocks import BlockIO, FileRecord, Segment
from .commit import UNFINISHED, commit
from .documents import documents
from .kinds import SESSION, ObjectState, Written, collect, compat_files, kinds
from .layout import numbered, rank_document_name, rotate
from .manifest import Manifest, stamp
from .opening import Options, PendingCheckpoint, open_pending
from .ranks import ReportedError, SaveRanks
from .run_state import RunState
from .tensorfile import ALIASES, only_tensors, segments, without_aliases

if TYPE_CHECKING:
    from .writer import Writer

logger: logging.Logger = logging.getLogger(__name__)

_RANK_INLINE = 1 << 14  # bytes: generator states stay in the one file of a rank


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
    given = user_path(folder, "save_state")
    if writer is not None:
        writer.wait()
    pending, ranks = open_pending(given, process, options or Options())
    try:
        _take_states(pending, ranks, run, writer)
        if writer is not None:
            writer.submit(pending)
    except BaseException:
        pending.discard()
        raise
    if writer is None:
        complete(pending, ranks)
    return given


def complete(pending: PendingCheckpoint, ranks: SaveRanks) -> None:
    """Write the files, agree with the other ranks, commit. Raises CheckpointError on every rank when one fails."""
    records: dict[str, FileRecord] = {}
    try:
        with BlockIO() as io:
            if pending.error is None:
                with _noted(pending):
                    records = _write(pending, io)
            files = _agree(pending, ranks, records, io)
        ranks.exchange("save_state: commit", _commit(pending, files) if pending.is_home else None)
    except BaseException:
        pending.discard()
        raise
    pending.close()


def _commit(pending: PendingCheckpoint, files: dict[str, FileRecord]) -> BaseException | None:
    """Commit and rotate, on the rank that owns the folder. Returns an error instead of raising it."""
    options, world_size = pending.options, pending.process.num_processes
    try:
        manifest = Manifest(layout=options.layout, world_size=world_size, files=files, **pending.about, **stamp())
        if pending.lock is not None:
            pending.lock.keep()
        commit(pending.temporary, pending.folder, manifest)
    except BaseException as error:
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


# --- contents ------------------------------------------------------------------------------------------------------


def _take_states(pending: PendingCheckpoint, ranks: SaveRanks, run: RunState, writer: Writer | None) -> None:
    """Collect what this rank writes: the states, then what differs between ranks, then shards and copies.

    A failure of one rank is raised on every rank, by this call even if files are written in the background. If only
    writing without collectives is left, the ranks compare their errors after it.
    """
    try:
        with _noted(pending):
            _collect(pending, ranks, run)
        own = _compare_ranks(pending, ranks, run)
        if pending.error is None:
            with _noted(pending):
                _take_shards(pending, ranks, run, blocking=writer is None)
                pending.files.update(own())
                if writer is not None:
                    writer.copy(pending)
    except ReportedError as reported:
        raise ranks.raised_here(reported.error) from reported.error
    if run.sharded is not None or writer is not None:
        # Writing shards uses collectives, and an error in the background is raised by the next save. No rank may begin
        # either while another one has failed.
        ranks.exchange("save_state: states", pending.error)


@contextlib.contextmanager
def _noted(pending: PendingCheckpoint) -> Iterator[None]:
    """A block whose error the ranks compare at the next exchange."""
    try:
        yield
    except ReportedError:
        raise
    except BaseException as error:
        pending.error = error


def _collect(pending: PendingCheckpoint, ranks: SaveRanks, run: RunState) -> None:
    """Collect the states that this rank writes. Every rank calls it: gathering sharded states uses collectives."""
    if len({part.saves_shards for part in run.models} | {part.saves_shards for part in run.optimizers}) > 1:
        raise CheckpointError("a run whose models and optimizers are partly sharded and partly not cannot be saved")
    # Hooks may communicate: a rank that fails before one must publish its error at once.
    with ranks.reported_at_once() if run.save_hooks else contextlib.nullcontext():
        weights, states = _unsharded_states(run, ranks)
        for hook in run.save_hooks:
            # As in the API, a hook may write into the folder and remove weights from what is saved here.
            hook([part.module for part in run.models], weights, str(pending.temporary))
    pending.about = {
        "progress": _plain(run.progress),
        "mesh": dict(run.mesh),
        "models": [
            {"class": type(part.state_template).__qualname__, "sharded": part.saves_shards} for part in run.models
        ],
        "optimizers": [{**part.describe(), "sharded": part.saves_shards} for part in run.optimizers],
    }
    pending.extras = bool(run.save_hooks) or run.sharded is not None
    rank = pending.process.process_index
    if pending.options.layout == "compat":
        pending.pickled, pending.lost = compat_files(run, states, rank, pending.is_home)
    else:
        pending.files = documents(rank_document_name(rank), collect(run, Written.RANK), f"rank {rank}", _RANK_INLINE)
        if pending.is_home:
            for kind in kinds(Written.FILE):
                for index, state in enumerate(states[kind.name]):
                    name = numbered(kind.file, index, "")
                    pending.files.update(documents(name, state, f"{kind.label} {index}"))
            pending.shared = collect(run, Written.ONCE)
            pending.files.update(documents(SESSION, pending.shared, SESSION))
    for index, state in enumerate(weights if pending.is_home else ()):
        _collect_weights(pending, index, state)


def _unsharded_states(run: RunState, ranks: SaveRanks) -> tuple[list[dict[str, object]], dict[str, list[object]]]:
    """The weights of models that do not save shards, and {kind: states} of others with files of their own.

    A sharded one is gathered by all ranks.
    """
    models = [part for part in run.models if not part.saves_shards]
    others = {
        kind.name: [item for item in kind.objects(run) if not kind.in_shards(item)] for kind in kinds(Written.FILE)
    }
    everything = [*models, *(item for items in others.values() for item in items)]
    is_collective = any(getattr(item, "is_partial", False) for item in everything)
    with ranks.reported_at_once() if is_collective else contextlib.nullcontext():
        weights = [dict(part.checkpoint_state_dict()) for part in models]
        return weights, {name: [item.state_dict() for item in items] for name, items in others.items()}


def _collect_weights(pending: PendingCheckpoint, index: int, state: dict[str, object]) -> None:
    if not pending.options.safe_serialization:
        pending.pickled[numbered("pytorch_model", index, ".bin")] = state
        return
    tensors = only_tensors(state)
    kept, aliases = without_aliases(tensors)
    # The tools of the safetensors format write the same entries, `alias: name`, for shared tensors.
    metadata = dict(aliases)
    if aliases:
        metadata[ALIASES] = json.dumps(aliases, separators=(",", ":"))
    pending.files[numbered("model", index, ".safetensors")] = segments(kept, metadata)
    rest = {name: value for name, value in state.items() if name not in tensors}
    if rest:
        pending.files.update(documents(numbered("model_extra", index, ""), rest, f"model {index}"))


def _plain(progress: dict[str, object]) -> dict[str, object]:
    """The entries of the progress that go into the manifest: values of JSON's own scalar types."""
    return {
        key: value
        for key, value in progress.items()
        if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    }


def _compare_ranks(
    pending: PendingCheckpoint, ranks: SaveRanks, run: RunState
) -> Callable[[], dict[str, list[Segment]]]:
    """Find which states differ from those of the rank that writes the shared document. The callable encodes them.

    Every rank takes part, including one that has failed: an error of any rank is raised on all of them.
    """
    process = pending.process
    if process.num_processes == 1:
        _report_lost([pending.lost])
        return dict
    is_native = pending.options.layout == "native"
    rows: list[ObjectState] = []
    mine: dict[str, str] | None = None
    if pending.error is None:
        try:
            rows = per_rank.entries(run, pending.shared or collect(run, Written.ONCE))
            mine = per_rank.digests(rows, strict=is_native)
        except BaseException as error:
            pending.error = error
    found = ranks.exchange("save_state: compare", pending.error, {"digests": mine, "lost": pending.lost})
    digests = [row["digests"] for row in found]
    if process.process_index == 0:
        _report_lost([row["lost"] for row in found])
    per_rank.check_same_entries(digests)
    reference = digests[pending.home]
    differing = [row for row in rows if mine and reference is not None and mine[row.key] != reference.get(row.key)]
    if not differing:
        return dict
    if is_native:
        name = per_rank.document_name(process.process_index)
        return lambda: documents(name, per_rank.own_document(differing), name)
    logger.warning(
        "rank %d: layout='compat' has no place for the state of one rank: that of rank %d is saved for %s. "
        "layout='native' saves each rank's own.",
        process.process_index,
        pending.home,
        ", ".join(row.title for row in differing),
    )
    return dict


def _report_lost(rows: list[list[str]]) -> None:
    """Warn of the states of all ranks for which the API's format has no place."""
    lost = {label: [rank for rank, row in enumerate(rows) if label in row] for row in rows for label in row}
    if lost:
        logger.warning(
            "layout='compat' has no place for the %s: not saved. layout='native' saves it.",
            ", the ".join(f"{label} of {ranks_in_words(ranks)}" for label, ranks in lost.items()),
        )


def _take_shards(pending: PendingCheckpoint, ranks: SaveRanks, run: RunState, blocking: bool) -> None:
    if run.sharded is None:
        return
    if not blocking:
        run.sharded.prepare_background()
    with ranks.reported_at_once() if run.sharded.is_collective else contextlib.nullcontext():
        pending.sharded = run.sharded.stage(blocking, pending.options.layout == "compat")


# --- writing -------------------------------------------------------------------------------------------------------


def _write(pending: PendingCheckpoint, io: BlockIO) -> dict[str, FileRecord]:
    if pending.sharded is not None:
        pending.sharded(pending.temporary)
    paths = [(pending.temporary / name, content) for name, content in pending.files.items()]
    records = dict(zip(pending.files, io.write_all(paths), strict=True))
    for name, value in pending.pickled.items():
        write_file(value, pending.temporary / name)
        records[name] = io.record(pending.temporary / name)
    return records


def _agree(
    pending: PendingCheckpoint, ranks: SaveRanks, records: dict[str, FileRecord], io: BlockIO
) -> dict[str, FileRecord]:
    """The records of all files in this rank's folder, once every rank has written. Raises on every rank otherwise."""
    mine = {"home": pending.home, "extras": pending.extras, "files": _to_json(records)}
    rows = ranks.exchange("save_state: write", pending.error, mine)
    peers = [rank for rank, row in enumerate(rows) if row["home"] == pending.home]
    files = _merge(rows[rank]["files"] for rank in peers)
    if any(row["extras"] for row in rows):
        failure: BaseException | None = None
        found: dict[str, FileRecord] = {}
        try:
            # Files of hooks and sharded writers have no checksum yet: each rank of the folder computes some of them.
            place = peers.index(pending.process.process_index)
            folder = pending.temporary
            present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
            share = sorted(present - {UNFINISHED, *files})[place :: len(peers)]
            found = {name: io.record(folder / name) for name in share}
        except BaseException as error:
            failure = error
        others = ranks.exchange("save_state: checksums", failure, _to_json(found))
        files.update(_merge(others[rank] for rank in peers))
    return dict(sorted(files.items()))


def _to_json(records: dict[str, FileRecord]) -> dict[str, JSONObject]:
    return {name: record.to_json() for name, record in records.items()}


def _merge(rows: Iterable[dict[str, JSONObject]]) -> dict[str, FileRecord]:
    return {name: FileRecord.from_json(record) for row in rows for name, record in row.items()}
