# SPDX-License-Identifier: Apache-2.0
"""Saving a run: collect what each rank writes, agree on the folder, write to a temporary one, agree again, commit."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CheckpointError
from ..core.files import user_path
from ..core.json_text import JSONObject
from ..core.objects import spans
from ..core.safetensors_header import ALIASES
from ..core.torch_files import write_file
from ..runtime.agreement import Process
from ..runtime.calls import ranks_in_words, values_in_words
from . import per_rank
from .blocks import BlockIO, FileRecord
from .commit import UNFINISHED, commit
from .documents import documents
from .kinds import SESSION, Written, collect, compat_files, kinds
from .layout import numbered, rank_document_name, rotate
from .manifest import Manifest, stamp
from .opening import Options, PendingCheckpoint
from .ranks import ReportedError, SaveRanks
from .run_lock import check_lock
from .run_state import RunState
from .tensorfile import only_tensors, segments, with_own_storages, without_aliases

if TYPE_CHECKING:
    from .writer import Writer

logger: logging.Logger = logging.getLogger(__name__)

_RANK_INLINE = 1 << 14  # bytes: generator states stay in the one file of a rank
_ABSENT = (
    "Every process must call it, at the same place of the loop; in data parallelism the main process may do so alone. "
    "If a rank may come later than that, call `accelerator.wait_for_everyone()` before."
)


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

    The ranks exchange values twice: when each has collected its states, and when each has written its files. The last
    rank that comes to the second exchange commits. Where collecting uses collectives, they also meet before it.

    Raises CheckpointError on every rank when one of them fails, or does not call within `options.arrival_timeout`
    seconds. The run is unchanged then, and so is an earlier checkpoint in `folder`.
    """
    given = user_path(folder, "save_state")
    if writer is not None:
        writer.wait()
    pending = PendingCheckpoint(given, process, options or Options())
    ranks = SaveRanks(process, pending.folder, pending.options.timeout)
    in_background = writer is not None
    try:
        try:
            is_any_different = _collect_and_meet(pending, ranks, run, in_background)
        except ReportedError as reported:
            raise ranks.raised_here(reported.error) from reported.error
        with _noted(pending):
            if run.sharded is not None and in_background:
                run.sharded.prepare_background()
            pending.find_home()
            if not pending.is_home:
                pending.keep_own_files()
            if is_any_different:
                _keep_differing(pending, ranks)
            if writer is not None:
                writer.copy(pending)
        if writer is not None:
            writer.submit(pending)
    except BaseException:
        pending.discard()
        raise
    if writer is None:
        complete(pending, ranks)
    return given


@contextlib.contextmanager
def _noted(pending: PendingCheckpoint) -> Iterator[None]:
    """A block whose error the ranks compare at the next exchange."""
    try:
        yield
    except ReportedError:
        raise
    except BaseException as error:
        pending.error = error


# --- contents ------------------------------------------------------------------------------------------------------


def _collect_and_meet(
    pending: PendingCheckpoint, ranks: SaveRanks, run: RunState, in_background: bool
) -> bool:
    """Collect what this rank writes, and agree with the other ranks. An error of any rank is raised on all of them.

    Returns:
        Whether states that are written once differ between ranks.
    """
    options, is_collective = pending.options, _is_collective(run, in_background)

    def meet(timeout: float) -> JSONObject:
        row = {
            "folder": str(pending.given),
            "layout": options.layout,
            "is_collective": is_collective,
            "temporary": pending.temporary_name,
            "digests": pending.digests,
            "lost": pending.lost,
        }
        agreed: JSONObject = ranks.exchange(
            "save_state", pending.error, row, timeout, _ABSENT, _compare
        )
        pending.temporary_name = agreed["temporary"]
        return agreed

    with _noted(pending):
        pending.open()
        ranks.folder = pending.folder
        if not is_collective:
            _collect(pending, run, in_background)
    if _is_on_every_rank(run) and not options.save_on_each_node:
        pending.is_alone = ranks.go_alone("save_state", options.arrival_timeout)
        pending.process = ranks.process
    agreed = meet(options.arrival_timeout)
    if pending.is_alone:
        _warn_alone(ranks_in_words(range(1, pending.world_size)))
    if agreed["is_collective"]:
        # A rank that is absent had to be named before the others wait for it in a collective.
        with _noted(pending), ranks.reported_at_once():
            if is_collective:
                if options.save_on_each_node:
                    pending.find_home()  # hooks may write into it
                _collect(pending, run, in_background)
        agreed = meet(options.timeout)
    if agreed["lost"] and pending.process.process_index == 0:
        logger.warning(
            "layout='compat' has no place for the %s: not saved. layout='native' saves it.",
            ", the ".join(agreed["lost"]),
        )
    return bool(agreed["is_any_different"])


def _is_collective(run: RunState, in_background: bool) -> bool:
    """Whether collecting the states may use collectives."""
    unsharded = [
        item
        for kind in kinds(Written.WEIGHTS, Written.FILE)
        for item in kind.objects(run)
        if not kind.in_shards(item)
    ]
    gathers = any(getattr(item, "is_partial", False) for item in unsharded)
    if run.save_hooks or gathers or run.sharded is None:
        return bool(run.save_hooks) or gathers
    # Registered objects may have DTensors.
    return bool(run.custom or run.averages) or run.sharded.is_collective(in_background)


def _is_on_every_rank(run: RunState) -> bool:
    """Whether each rank has all models and optimizers, as in data parallelism: one of them can save them."""
    return not any(
        part.is_partial or part.saves_shards
        for parts in (run.models, run.optimizers)
        for part in parts
    )


@functools.cache
def _warn_alone(others: str) -> None:
    logger.warning(
        "save_state was called on rank 0 only. Its checkpoints have the models, optimizers and schedulers, and the "
        "random states and data position of rank 0. The random states and unfinished gradients of %s are missing: "
        "load_state seeds their generators anew. Call save_state on every process to save them.",
        others,
    )


def _compare(rows: dict[int, JSONObject]) -> JSONObject:
    """What the ranks agree on. Raises CheckpointError if their arguments or objects differ."""
    for name in ("folder", "layout"):
        values = {rank: row[name] for rank, row in rows.items()}
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"save_state was called with another {name} on other ranks: {values_in_words(values)}. Use one on "
                "all. After a save on rank 0 only, call `accelerator.wait_for_everyone()` before the next save."
            )
    per_rank.check_same_entries([row["digests"] for row in rows.values()])
    return {
        "temporary": rows[0]["temporary"],
        "is_collective": any(row["is_collective"] for row in rows.values()),
        "lost": sorted({label for row in rows.values() for label in row["lost"]}),
        "is_any_different": any(row["digests"] != rows[0]["digests"] for row in rows.values()),
    }


def _collect(pending: PendingCheckpoint, run: RunState, in_background: bool) -> None:
    """Collect the states that this rank writes. Every rank calls it: gathering sharded states uses collectives."""
    if (
        len(
            {part.saves_shards for part in run.models}
            | {part.saves_shards for part in run.optimizers}
        )
        > 1
    ):
        raise CheckpointError(
            "a run whose models and optimizers are partly sharded and partly not cannot be saved"
        )
    rank, is_native = pending.process.process_index, pending.options.layout == "native"
    weights = [dict(part.checkpoint_state_dict()) for part in run.models if not part.saves_shards]
    states = {
        kind.name: [item.state_dict() for item in kind.objects(run) if not kind.in_shards(item)]
        for kind in kinds(Written.FILE)
    }
    for hook in run.save_hooks:
        # As in the API, a hook may write into the folder and remove weights from what is saved here.
        hook([part.hooked for part in run.models], weights, str(pending.temporary))
    pending.about = {
        "progress": _plain(run.progress),
        "mesh": dict(run.mesh),
        "models": [
            {
                "class": type(part.state_template).__qualname__,
                "sharded": part.saves_shards,
                **part.about(),
            }
            for part in run.models
        ],
        "optimizers": [
            {**part.describe(), "sharded": part.saves_shards} for part in run.optimizers
        ],
    }
    session = collect(run, Written.ONCE)
    if is_native:
        pending.files = documents(
            rank_document_name(rank), collect(run, Written.RANK), f"rank {rank}", _RANK_INLINE
        )
        if pending.may_be_home:
            for kind in kinds(Written.FILE):
                for index, state in enumerate(states[kind.name]):
                    name = numbered(kind.file, index, "")
                    pending.files.update(documents(name, state, f"{kind.label} {index}"))
            pending.files.update(documents(SESSION, session, SESSION))
    else:
        pending.pickled, pending.lost = compat_files(run, states, rank, pending.may_be_home)
    for index, state in enumerate(weights if pending.may_be_home else ()):
        if run.models[index].is_adapter:
            from .adapters import adapter_files, adapters_folder  # slow to import

            safe, below = pending.options.safe_serialization, f"{adapters_folder(index)}/"
            files, pickled = adapter_files(run.models[index], state, safe, below)
            pending.files.update(files)
            pending.pickled.update(pickled)
        else:
            _collect_weights(pending, index, state)
    if pending.process.num_processes > 1:
        pending.entries = per_rank.entries(run, session)
        pending.digests = per_rank.digests(pending.entries, strict=is_native)
    if run.sharded is not None:
        pending.sharded = run.sharded.stage(not in_background, not is_native)


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
        if value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    }


def _keep_differing(pending: PendingCheckpoint, ranks: SaveRanks) -> None:
    """Write the states of this rank that differ from those of the rank that writes the shared document."""
    reference = ranks.values([pending.home])[pending.home]["digests"]
    mine = pending.digests or {}
    differing = [entry for entry in pending.entries if mine[entry.key] != reference.get(entry.key)]
    if differing and pending.options.layout == "native":
        name = per_rank.document_name(pending.process.process_index)
        document: dict[str, dict[int, object]] = {}
        for entry in differing:
            document.setdefault(entry.kind.name, {})[entry.index] = entry.state
        pending.files.update(documents(name, document, name))
    elif differing:
        logger.warning(
            "rank %d: layout='compat' has no place for the state of one rank: that of rank %d is saved for %s. "
            "layout='native' saves each rank's own.",
            pending.process.process_index,
            pending.home,
            ", ".join(entry.title for entry in differing),
        )


# --- writing -------------------------------------------------------------------------------------------------------


def complete(pending: PendingCheckpoint, ranks: SaveRanks) -> None:
    """Write the files, agree with the other ranks, commit. Raises CheckpointError on every rank when one fails."""
    row: JSONObject = {"home": pending.home}
    try:
        with _noted(pending):
            row["files"] = {name: record.to_json() for name, record in _write(pending).items()}
            if pending.locks is not None:
                row.update(
                    about=pending.about,
                    lock=pending.locks.acquire(pending.folder, pending.options.checkpoints),
                )
        if not pending.options.save_on_each_node:
            ranks.exchange(
                "save_state: write", pending.error, row, reduce=functools.partial(_commit, pending)
            )
        else:
            homes = ranks.exchange("save_state: write", pending.error, row, reduce=_homes)
            with _noted(pending):
                if pending.is_home:
                    spans_of_ranks = homes[str(pending.home)]
                    peers = [rank for low, high in spans_of_ranks for rank in range(low, high + 1)]
                    _commit(pending, ranks.values(peers))
            ranks.exchange("save_state: commit", pending.error)
    except BaseException:
        pending.discard()
        raise
    pending.close()


def _write(pending: PendingCheckpoint) -> dict[str, FileRecord]:
    """Write the files of this rank. Returns the records of its files, and of its share of the shards."""
    records: dict[str, FileRecord] = {}
    names: list[str] = []
    if pending.sharded is not None:
        # Also after an error: the other ranks wait in a collective.
        names = pending.sharded(pending.temporary, pending.error)
    if pending.error is not None:
        return {}
    for name in (*pending.files, *pending.pickled):
        (pending.temporary / name).parent.mkdir(parents=True, exist_ok=True)
    with BlockIO() as io:
        paths = [(pending.temporary / name, content) for name, content in pending.files.items()]
        records = dict(zip(pending.files, io.write_all(paths), strict=True))
        for name, value in pending.pickled.items():
            write_file(with_own_storages(value), pending.temporary / name)
            names.append(name)
        records.update({name: io.record(pending.temporary / name) for name in names})
    return records


def _commit(pending: PendingCheckpoint, rows: dict[int, JSONObject]) -> None:
    """Commit the folder that these ranks have written, and rotate. One of them calls it, with the values of all."""
    options = pending.options
    home = rows[pending.home]
    records = {
        name: FileRecord.from_json(record)
        for row in rows.values()
        for name, record in row["files"].items()
    }
    written = {
        path.relative_to(pending.temporary).as_posix()
        for path in pending.temporary.rglob("*")
        if path.is_file()
    }
    with BlockIO() as io:
        for name in written - {UNFINISHED, *records}:  # of hooks
            records[name] = io.record(pending.temporary / name)
    files = dict(sorted(records.items()))
    manifest = Manifest(
        layout=options.layout,
        world_size=pending.world_size,
        ranks="rank 0 only" if pending.is_alone else "all",
        files=files,
        **home["about"],
        **stamp(),
    )
    check_lock(pending.folder, options.checkpoints, home["lock"])
    commit(pending.temporary, pending.folder, manifest)
    if options.checkpoints is not None:
        try:
            removed = rotate(options.checkpoints, options.total_limit)
        except OSError as error:
            # The new checkpoint is complete: failing to remove an old one must not stop the run.
            logger.warning(
                "old checkpoints in %s could not be removed: %s", options.checkpoints, error
            )
        else:
            if removed:
                logger.info(
                    "removed %s to keep %d", ", ".join(f.name for f in removed), options.total_limit
                )


def _homes(rows: dict[int, JSONObject]) -> dict[str, list[tuple[int, int]]]:
    """The spans of ranks that write into the folder of each home."""
    homes: dict[str, list[int]] = {}
    for rank, row in rows.items():
        homes.setdefault(str(row["home"]), []).append(rank)
    return {home: spans(members) for home, members in homes.items()}
