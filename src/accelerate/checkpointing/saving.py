# SPDX-License-Identifier: Apache-2.0
"""Saving a run: collect what each rank writes, agree on the folder, write to a temporary one, agree again, commit."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import CheckpointError, CommunicationError
from ..core.files import location
from ..core.json_text import JSONObject
from ..core.modules import class_name
from ..core.objects import ranks_in_words, spans, values_in_words
from ..core.tensor_files import ALIASES
from ..parallel.adapters import config_text
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..parallel.unwrap import extract_model_from_parallel, is_peft_model
from ..runtime.agreement import (
    Agreement,
    OneProcess,
    Process,
    RankErrors,
    Reduce,
    error_text,
)
from ..runtime.communication import is_lost
from ..runtime.passing import others_went_on
from .commit import UNFINISHED
from .documents import documents
from .files import (
    BlockIO,
    FileRecord,
    only_tensors,
    segments,
    with_own_storages,
    without_aliases,
)
from .kinds import (
    SESSION,
    Written,
    check_same_entries,
    collect,
    compat_files,
    entry_digests,
    kinds,
    rank_entries,
    session_rank_name,
)
from .layout import Manifest, is_taken, numbered, rank_document_name, rotate, stamp
from .pending import Options, PendingCheckpoint, UndecidedError, pending_checkpoint
from .run_state import RunState, StateDict, state_template

if TYPE_CHECKING:
    from .writer import Writer

logger: logging.Logger = logging.getLogger(__name__)


class ReportedError(Exception):
    """An error of this rank while others may wait for it in a collective. They read it at the next exchange."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class SaveRanks:
    """The ranks that save into one folder. Every rank has the same exchanges in the same order.

    Args:
        process: this rank.
        folder: the checkpoint, for messages.
        timeout: seconds within which every rank must come to an exchange.
        name: of the sequence of exchanges. Another thread needs another name.
    """

    def __init__(
        self, process: Process, folder: Path, timeout: float, name: str = "checkpoint"
    ) -> None:
        self.process: Process = process
        self.folder = folder
        self.timeout = timeout
        # whether the last exchange may have committed the save, or still may
        self.is_undecided: bool = False
        self._agreement = Agreement(process, name)

    def exchange(
        self,
        step: str,
        error: BaseException | None,
        value: object = None,
        absent: str = "",
        reduce: Reduce | None = None,
    ) -> Any:
        """What `reduce` makes of the values of all ranks, as in `Agreement.exchange`.

        Raises the errors of all ranks, if any, else that of `reduce`; the cause is this rank's own error.
        """
        self.is_undecided = True
        try:
            return self._agreement.exchange(step, value, self.timeout, absent, reduce, error)
        except RankErrors as failed:
            self.is_undecided = UndecidedError.__name__ in failed.classes
            if error is not None and not isinstance(error, Exception):
                raise error from None
            raise self._error(str(failed)) from failed.__cause__

    def announce(self, step: str) -> None:
        """Tell rank 0 that this rank comes to the next exchange."""
        if self.process.process_index:
            self._agreement.announce(step)

    def is_left_alone(self, step: str) -> bool:
        """Whether this is rank 0, and the other ranks were seen to go on instead of coming to the next exchange."""
        return others_went_on(self._agreement, step, self.timeout)

    def go_alone(self) -> None:
        """Go on without the other ranks."""
        self.process = OneProcess()
        self._agreement = Agreement(self.process, self._agreement.name)

    def refuse(self, text: str) -> None:
        """Leave an error for a rank that comes to the next exchange later."""
        self._agreement.refuse(text)

    def values(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The values that `ranks` have given in the last exchange, to be read before the next one."""
        return self._agreement.values(ranks)

    @contextlib.contextmanager
    def reported_at_once(self) -> Iterator[None]:
        """A block that may use collectives: an error of this rank is published for the others and raised at once.

        Comparing errors first could deadlock, because other ranks may wait in a collective until this process ends.
        An exchange of the calling thread must follow the block.
        """
        try:
            yield
        except (ReportedError, CommunicationError):
            # Published already; or a failure of another rank has broken the collective, and the next exchange
            # reports it.
            raise
        except Exception as error:
            if is_lost(error) or self.process.num_processes == 1:
                raise
            self._agreement.refuse(str(self.raised_here(error)))
            raise ReportedError(error) from error

    def raised_here(self, error: BaseException) -> BaseException:
        """The error to raise on the rank where it happened: an interrupt itself, any other as on the other ranks."""
        if not isinstance(error, Exception):
            return error
        return self._error(f"rank {self.process.process_index}: {error_text(error)}")

    def _error(self, text: str) -> CheckpointError:
        exists = False
        with contextlib.suppress(OSError):
            exists = not self.is_undecided and is_taken(self.folder)
        if exists:
            kept = "Its earlier content is unchanged."
        else:
            kept = "Earlier checkpoints are unchanged."
        return CheckpointError(f"{self.folder} was not saved: {text.rstrip('.')}. {kept}")


_RANK_INLINE = 1 << 14  # bytes: generator states stay in the one file of a rank
_EVERY = "Every process must call it, at the same place in the loop"
_ABSENT = f"{_EVERY}; under DDP the main process may call it alone."


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
    rank that reaches the second exchange commits. Where collecting uses collectives, they also meet before it.

    Raises CheckpointError on every rank when one of them fails, or does not call within `options.timeout`
    seconds. The run is unchanged then, and so is an earlier checkpoint in `folder`.
    """
    given = location(folder, "save_state")
    if writer is not None:
        writer.wait(for_save=True)
    pending = pending_checkpoint(given, process, options or Options())
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

    def meet() -> JSONObject:
        row = {
            "folder": str(pending.given),
            "layout": options.layout,
            "is_collective": is_collective,
            "temporary": pending.temporary_name,
            "digests": pending.digests,
            "lost": pending.lost,
        }
        agreed: JSONObject = ranks.exchange("save_state", pending.error, row, _ABSENT, _compare)
        pending.temporary_name = agreed["temporary"]
        return agreed

    ranks.announce("save_state")
    with _noted(pending):
        pending.open()
        ranks.folder = pending.folder
        if not is_collective:
            _collect(pending, run, in_background)
    if not options.save_on_each_node and ranks.is_left_alone("save_state"):
        others = ranks_in_words(range(1, pending.world_size))
        # In data parallelism each rank has all models and optimizers, so that one can save them.
        if any(part.is_partial or part.saves_shards for part in _parts(run)):
            text = (
                f"rank 0: {others} did not reach `save_state` and went on. {_EVERY}: each has a "
                "part of a model or of an optimizer's state."
            )
            ranks.refuse(text)
            raise CheckpointError(text)
        pending.is_alone = True
        ranks.go_alone()
        pending.process = ranks.process
    agreed = meet()
    if pending.is_alone:
        _warn_alone(ranks_in_words(range(1, pending.world_size)))
    if agreed["is_collective"]:
        # A rank that is absent had to be named before the others wait for it in a collective.
        with _noted(pending), ranks.reported_at_once():
            if is_collective:
                if options.save_on_each_node:
                    pending.find_home()  # hooks may write into it
                _collect(pending, run, in_background)
        agreed = meet()
    if agreed["lost"] and pending.process.process_index == 0:
        logger.warning(
            "layout='compat' cannot store the %s, which is not saved. layout='native' saves it.",
            ", the ".join(agreed["lost"]),
        )
    return bool(agreed["is_any_different"])


def _parts(run: RunState) -> list[PreparedModel | PreparedOptimizer]:
    return [*run.models, *run.optimizers]


def _is_collective(run: RunState, in_background: bool) -> bool:
    """Whether collecting the states may use collectives."""
    if run.save_hooks or run.state_of:
        return True
    for item in _parts(run):
        if item.is_partial and not item.saves_shards:
            return True
    if run.sharded is None:
        return False
    if run.custom or run.averages:
        return True  # they may have DTensors
    return run.sharded.is_collective(in_background)


@functools.cache
def _warn_alone(others: str) -> None:
    logger.warning(
        "save_state was called on rank 0 only. Its checkpoints have the models, optimizers and "
        "schedulers, and the random states and data position of rank 0. The random states and "
        "unfinished gradients of %s are missing: load_state reseeds their generators. Call "
        "save_state on every process to save them.",
        others,
    )


def _compare(rows: dict[int, JSONObject]) -> JSONObject:
    """What the ranks agree on. Raises CheckpointError if their arguments or objects differ."""
    for name in ("folder", "layout"):
        values = {rank: row[name] for rank, row in rows.items()}
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"save_state was called with a different {name} on different ranks: "
                f"{values_in_words(values)}. Use the same on all ranks. After a save on rank 0 "
                "only, call `accelerator.wait_for_everyone()` before the next save."
            )
    check_same_entries([row["digests"] for row in rows.values()])
    lost: set[str] = set()
    for row in rows.values():
        lost.update(row["lost"])
    return {
        "temporary": rows[0]["temporary"],
        "is_collective": any(row["is_collective"] for row in rows.values()),
        "lost": sorted(lost),
        "is_any_different": any(row["digests"] != rows[0]["digests"] for row in rows.values()),
    }


def _collect(pending: PendingCheckpoint, run: RunState, in_background: bool) -> None:
    """Collect the states that this rank writes. Every rank calls it: gathering sharded states uses collectives."""
    if len({part.saves_shards for part in _parts(run)}) > 1:
        raise CheckpointError(
            "a run cannot be saved if only some of its models and optimizers are sharded"
        )
    rank, is_native = pending.process.process_index, pending.options.layout == "native"
    weights: list[StateDict] = []
    for part in run.models:
        if part.saves_shards:
            continue
        if run.state_of is None:
            weights.append(dict(part.checkpoint_state_dict()))
        else:
            weights.append(dict(run.state_of(part.module)))
    states = {
        kind.name: [item.state_dict() for item in kind.objects(run) if not kind.in_shards(item)]
        for kind in kinds(Written.FILE)
    }
    for hook in run.save_hooks:
        # As in the API, a hook may write into the folder and remove weights from what is saved here.
        hook([part.hooked for part in run.models], weights, str(pending.hook_folder))
    pending.about = {
        "progress": _plain(run.progress),
        "mesh": dict(run.mesh),
        "models": [_about(part) for part in run.models],
        "optimizers": [
            {**part.describe(), "sharded": part.saves_shards} for part in run.optimizers
        ],
    }
    adapters: dict[int, AdapterModel] = {}
    if run.entire is not None:
        from .adapters import AdapterModel, adapter_files, adapters_folder  # slow to import

        for index, part in enumerate(run.models):
            if isinstance(part, AdapterModel):
                adapters[index] = part
                names, base = list(part.names), dict(part.base)
                pending.about["models"][index].update(adapters=names, base=base)
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
        if index in adapters:
            safe, below = pending.options.safe_serialization, f"{adapters_folder(index)}/"
            files, pickled = adapter_files(adapters[index], state, safe, below)
            pending.files.update(files)
            pending.pickled.update(pickled)
        else:
            _collect_weights(pending, index, state)
    if pending.process.num_processes > 1:
        pending.entries = rank_entries(run, session)
        pending.digests = entry_digests(pending.entries, strict=is_native)
    if run.sharded is not None:
        pending.sharded = run.sharded.stage(not in_background, not is_native)


def _about(part: PreparedModel) -> JSONObject:
    """What the manifest has on a model.

    Of a model of transformers, the text of its configurations, with which `accelerate export` makes it readable;
    of a model of peft, those of its adapters too.
    """
    about: JSONObject = {
        "class": type(state_template(part)).__qualname__,
        "sharded": part.saves_shards,
    }
    model: Any = extract_model_from_parallel(part.module, keep_torch_compile=False)
    if is_peft_model(model):
        about["adapter_configs"] = {
            name: config_text(model, name).decode() for name in model.peft_config
        }
        about["active"] = list(model.active_adapters)
        model = model.get_base_model()
    for name in ("config", "generation_config"):
        config: Any = copy.copy(getattr(model, name, None))
        if callable(getattr(config, "to_json_string", None)):
            config.architectures = [class_name(model)]
            # A configuration that is not JSON is no reason not to save.
            with contextlib.suppress(TypeError):
                about[name] = config.to_json_string()
    return about


def _collect_weights(pending: PendingCheckpoint, index: int, state: dict[str, object]) -> None:
    if not pending.options.safe_serialization:
        pending.pickled[numbered("pytorch_model", index, ".bin")] = state
        return
    tensors = only_tensors(state)
    stored, aliases = without_aliases(tensors)
    # The tools of the safetensors format write the same entries, `alias: name`, for shared tensors.
    metadata = dict(aliases)
    if aliases:
        metadata[ALIASES] = json.dumps(aliases, separators=(",", ":"))
    file = numbered("model", index, ".safetensors")
    pending.files[file] = segments(stored, metadata)
    extra = {name: value for name, value in state.items() if name not in tensors}
    if extra:
        document = numbered("model_extra", index, "")
        files = documents(document, extra, f"model {index}")
        pending.files.update(files)


def _plain(progress: dict[str, object]) -> dict[str, object]:
    """The entries of the progress that go into the manifest: values of JSON's own scalar types."""
    entries = {}
    for key, value in progress.items():
        is_scalar = value is None or isinstance(value, (bool, int, str))
        if isinstance(value, float):
            is_scalar = math.isfinite(value)
        if is_scalar:
            entries[key] = value
    return entries


def _keep_differing(pending: PendingCheckpoint, ranks: SaveRanks) -> None:
    """Write the states of this rank that differ from those of the rank that writes the shared document."""
    reference = ranks.values([pending.home])[pending.home]["digests"]
    mine = pending.digests or {}
    differing = [entry for entry in pending.entries if mine[entry.key] != reference.get(entry.key)]
    if differing and pending.options.layout == "native":
        name = session_rank_name(pending.process.process_index)
        document: dict[str, dict[int, object]] = {}
        for entry in differing:
            states = document.setdefault(entry.kind.name, {})
            states[entry.index] = entry.state
        pending.files.update(documents(name, document, name))
    elif differing:
        logger.warning(
            "rank %d: layout='compat' cannot store a state for each rank: the state of rank %d "
            "is saved for %s. layout='native' saves the state of each rank.",
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
            if pending.is_home:
                row.update(about=pending.about, claim=pending.claim())
        if not pending.options.save_on_each_node:
            ranks.exchange(
                "save_state: write", pending.error, row, reduce=functools.partial(_commit, pending)
            )
        else:
            homes = ranks.exchange("save_state: write", pending.error, row, reduce=_homes)
            with _noted(pending):
                if pending.is_home:
                    spans_of_ranks = homes[str(pending.home)]
                    peers: list[int] = []
                    for low, high in spans_of_ranks:
                        peers += range(low, high + 1)
                    _commit(pending, ranks.values(peers))
            ranks.exchange("save_state: commit", pending.error)
    except BaseException:
        pending.discard(ranks.is_undecided)
        raise
    pending.close()


def _write(pending: PendingCheckpoint) -> dict[str, FileRecord]:
    """Write the files of this rank. Returns the records of its files, and of its share of the shards."""
    records: dict[str, FileRecord] = {}
    unread: list[str] = []
    if pending.sharded is not None:
        # Also after an error: the other ranks wait in a collective.
        records, unread = pending.sharded(pending.temporary, pending.error)
    if pending.error is not None:
        return {}
    folder = pending.temporary
    contents = {**pending.files, **pending.hook_files()}
    for name in (*contents, *pending.pickled):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
    with BlockIO() as io:
        written = io.write_all([(folder / name, content) for name, content in contents.items()])
        records.update(zip(contents, written, strict=True))
        for name, value in pending.pickled.items():
            records[name] = io.write_pickled(folder / name, with_own_storages(value))
        for name in unread:
            records[name] = io.record(folder / name)
    return records


def _commit(pending: PendingCheckpoint, rows: dict[int, JSONObject]) -> None:
    """Commit the folder that these ranks have written, and rotate. One of them calls it, with the values of all."""
    options = pending.options
    home = rows[pending.home]
    records: dict[str, FileRecord] = {}
    for row in rows.values():
        for name, record in row["files"].items():
            if name in records:
                # Each machine has a folder of hooks for a bucket.
                raise CheckpointError(
                    f"save hooks wrote {name} on two machines: write it only on the main process"
                )
            records[name] = FileRecord.from_json(record)
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
    pending.commit(manifest, home["claim"])
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
