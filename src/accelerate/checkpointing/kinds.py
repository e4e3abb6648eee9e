# SPDX-License-Identifier: Apache-2.0
"""The kinds of state in a checkpoint: one row each. A new kind is a row, or a subclass of `StateKind` in its own file.

A row has where its objects are in a `RunState`, where their states are written, and their files in the API's format.
Saving, comparing ranks, counting, checking and loading go through the table.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..core.constants import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..core.objects import names_in_words
from ..core.trees import children, leaves, map_leaves, with_children
from ..parallel.prepared import PreparedOptimizer
from . import compat
from .documents import TensorSink, encode
from .files import host_view
from .layout import LOADER_NAME, CheckpointMismatch, numbered, registered_file
from .run_state import GlobalGenerators, HasState, RunState
from .run_state import is_empty as is_empty_rank_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # slow to import

SESSION = "session"
CLASSES = "classes"  # in the progress: {kind: class of each object}


class Written(enum.Enum):
    """Where the native format has the states of a kind."""

    WEIGHTS = "a file of weights for each object, or a folder of its shards"
    FILE = "a document for each object, or a folder of its shards; its tensors are read in place"
    ONCE = "in the document `session`; a rank whose state differs writes its own to `session_rank_<rank>`"
    RANK = "in the document `random_states_<rank>` of each rank"


@dataclass(frozen=True)
class StateKind:
    """A kind of state, and how it is saved and loaded.

    Fields:
        name: the key of its states in a document, and the field of `RunState` that has its objects.
        label: what messages call one of its objects.
        written: where its states are in the native format.
        file: the name of its files, for kinds with their own.
        compat: the file name of object number i in the API's format; None where that format has no place for it.
        single: whether a run has at most one object. Its key has the state itself, else a list.
        always: whether every document has its key, also without objects. True for those of format version 1.
        shards: whether objects that save shards are written by `RunState.sharded` instead.
        check_fit: raises CheckpointMismatch if the state in a file is that of another object. Its arguments are the
            object's index, the object, a function that reads the state, the row in the manifest if any, the folder.
        judge: raises CheckpointError for a state that an object cannot take, and changes nothing. Its arguments are
            the object, the state, the class that saved it if that is known. Returns notes.
        judged_together: `judge` may use collectives.
        optional: whether an object may stay as it is in a load that is not strict, or where no object was saved.
        is_empty: whether nothing is lost if a state is not saved.
        of_first: of a ONCE kind, whether the state of rank 0 is that of all ranks; on others it may be incomplete.
        resized: of a RANK kind, what is loaded on another number of processes: the "own" state of the rank of this
            number, that of the "first" rank, or nothing.
    """

    name: str
    label: str
    written: Written
    file: str = ""
    compat: Callable[[int], str] | None = None
    single: bool = False
    always: bool = False
    shards: bool = False
    check_fit: Callable[[int, Any, Callable[[], object], JSONObject | None, Path], None] | None = (
        None
    )
    judge: Callable[[Any, Any, str | None], list[str]] | None = None
    judged_together: bool = False
    optional: bool = False
    is_empty: Callable[[Any], bool] | None = None
    of_first: bool = False
    resized: Literal["own", "first"] | None = None

    def objects(self, run: RunState) -> Sequence[Any]:
        """The objects of a run whose states are of this kind."""
        found = getattr(run, self.name)
        if self.single:
            if found is None:
                return ()
            return (found,)
        return list(found)

    def in_shards(self, item: Any) -> bool:
        """Whether each rank writes a shard of an object's state."""
        return self.shards and bool(item.saves_shards)

    def collect(self, run: RunState) -> list[object]:
        """The state of each object; None for an object without one."""
        return [
            item.state_dict() if callable(getattr(item, "state_dict", None)) else None
            for item in self.objects(run)
        ]

    def states(self, document: Mapping[str, object]) -> list[object]:
        """The states in a document. Raises KeyError or ValueError where they are missing or not a list."""
        if self.name not in document and not self.always:
            return []
        found = document[self.name]
        if self.single:
            return [found]
        if not isinstance(found, list):
            raise ValueError(f"{self.name} is not a list")
        return found

    def compat_files(
        self, states: Sequence[object], run: RunState, rank: int, is_first: bool
    ) -> dict[str, object]:
        """{file name: value} of what this rank writes in the API's format. `is_first`: for what is written once."""
        if self.compat is None or not is_first:
            return {}
        return {
            self.compat(index): state
            for index, state in enumerate(states)
            if state is not None or self.written is not Written.RANK
        }

    def read_compat(
        self, folder: Path, count: int, rank: int, allow_pickle: bool, notes: list[str]
    ) -> list[object]:
        """The states of `count` objects in a folder of the API's format."""
        if self.compat is None:
            return []
        paths = [folder / self.compat(index) for index in range(count)]
        return [
            None if self.single and not path.exists() else compat.load_pickled(path, allow_pickle)
            for path in paths
        ]

    def localized(self, state: object, item: Any) -> object:
        """The state as this rank's object takes it."""
        return state


@dataclass(frozen=True)
class ObjectState:
    """An object of a run, the `index`-th of its kind, and a state of it."""

    kind: StateKind
    index: int
    item: Any
    state: object = None

    @property
    def key(self) -> str:
        """What documents call the object, such as "schedulers[0]"."""
        return f"{self.kind.name}[{self.index}]"

    @property
    def title(self) -> str:
        """What messages call the object."""
        label = self.kind.label
        if self.kind.single:
            return f"the {label}"
        return f"{label} {self.index} ({type(self.item).__qualname__})"

    def check(self, classes: Mapping[str, Sequence[str]]) -> list[str]:
        """Notes on what the state means for the object. Raises CheckpointError for one that it cannot take."""
        if self.kind.judge is None or self.state is None:
            return []
        names = classes.get(self.kind.name, ())
        saved_class = None
        if self.index < len(names):
            saved_class = names[self.index]
        try:
            notes = self.kind.judge(self.item, self.state, saved_class)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{type(error).__name__}: {str(error)[:500]}") from error
        return [f"{self.title} {note}" for note in notes]

    def load(self, folder: Path) -> list[str]:
        """Load the state into the object. Returns notes on what could not be restored."""
        is_once = self.kind.written is Written.ONCE
        if self.state is None and (self.kind.single or not is_once):
            # A run and the saved one may differ here: a scaler is used with fp16 only.
            if is_once:
                return [f"{self.title} stays as it is: its state was not saved"]
            return []
        if not callable(getattr(self.item, "load_state_dict", None)):
            return []
        with loading(self.title, folder):
            notes = self.item.load_state_dict(self.kind.localized(self.state, self.item))
        if isinstance(notes, list):
            return list(notes)
        return []


class _Loaders(StateKind):
    def read_compat(
        self, folder: Path, count: int, rank: int, allow_pickle: bool, notes: list[str]
    ) -> list[object]:
        return [compat.read_loader(folder, index, allow_pickle, notes) for index in range(count)]


class _Generators(StateKind):
    def objects(self, run: RunState) -> Sequence[Any]:
        return (GlobalGenerators(),)

    def compat_files(
        self, states: Sequence[Any], run: RunState, rank: int, is_first: bool
    ) -> dict[str, object]:
        step = run.progress.get("accumulation_step", 0)
        return {f"{RNG_STATE_NAME}_{rank}.pkl": compat.generator_file(states[0], step)}

    def read_compat(
        self, folder: Path, count: int, rank: int, allow_pickle: bool, notes: list[str]
    ) -> list[object]:
        state = compat.read_generators(folder, rank, allow_pickle)
        if state is None:
            notes.append(no_generators(rank))
        return [state]


class _Registered(StateKind):
    """States may have DTensors, as averaged weights of a sharded model: they are saved unsharded."""

    def collect(self, run: RunState) -> list[object]:
        return [
            map_leaves(
                lambda value: value.full_tensor().cpu() if _is_sharded(value) else value, state
            )
            for state in super().collect(run)
        ]

    def localized(self, state: object, item: HasState) -> object:
        present = item.state_dict()
        if any(map(_is_sharded, leaves(present))):
            return _sharded_like(state, present)
        return state


def _sharded_like(state: object, present: object) -> object:
    """A state whose tensors are this rank's shards where those of the present state are."""
    if _is_sharded(present):
        from ..parallel.materialize import local_shard
        from ..torch_internals.dtensor import as_dtensor

        if not isinstance(state, torch.Tensor) or state.shape != present.shape:
            return state
        return as_dtensor(
            local_shard(state, present).to(present.to_local().device, copy=True), present
        )
    values, layouts = children(state), children(present) or {}
    if values is None:
        return state
    return with_children(
        state, {key: _sharded_like(value, layouts.get(key)) for key, value in values.items()}
    )


def _is_sharded(value: object) -> TypeGuard[DTensor]:
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


# What DeepSpeed's Adam has as an option, and other ones always do.
_IMPLIED = {"bias_correction"}


def check_optimizer(
    index: int,
    part: PreparedOptimizer,
    read: Callable[[], object],
    about: JSONObject | None,
    folder: Path,
) -> None:
    """Raise CheckpointMismatch when an optimizer's state belongs to other parameters or another kind of optimizer."""
    here = part.describe()
    rows: list[str] = []
    if about is not None:
        rows = list(_group_differences(about["shapes"], here["shapes"]))
        lacking = sorted(set(here["options"]) - set(about["options"]) - _IMPLIED)
        if about["class"] != here["class"] and lacking:
            rows.append(
                f"saved by {about['class']}, which does not have {', '.join(lacking)}; this is "
                f"{here['class']}"
            )
    else:
        state = read()
        if isinstance(state, Mapping):
            groups = state.get("param_groups", [])
        else:
            groups = []
        saved = [len(group["params"]) for group in groups]
        counts = [len(group) for group in here["shapes"]]
        if saved and counts and saved != counts:
            rows.append(f"parameters in each group: {saved} saved, {counts} here")
    if rows:
        raise CheckpointMismatch(
            f"{folder} does not fit optimizer {index} ({here['class']}): {names_in_words(rows)}. Nothing was loaded. "
            "To load the weights alone, pass models_only=True to load_state."
        )


def check_scheduler(item: object, state: object, saved_class: str | None) -> list[str]:
    """Raise CheckpointError where a state is that of another torch scheduler. Returns notes.

    Args:
        item: the scheduler, prepared or not. One that is not torch's decides itself what it takes.
        state: the saved state.
        saved_class: the class that it was saved by; None if it is not known.
    """
    scheduler = getattr(item, "scheduler", item)  # without the wrapper of `prepare`
    if not isinstance(scheduler, LRScheduler):
        return []
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the saved state is a {type(state).__name__}, not the state of a scheduler"
        )
    name = type(scheduler).__qualname__
    here, saved = _entries(scheduler.state_dict()), _entries(state)
    # A class may get other entries in another version of torch or of the user's code.
    if saved_class is None:
        is_other = bool(here - saved and saved - here)
    else:
        is_other = saved_class != name and here != saved
    if is_other:
        by = saved_class or "another scheduler"
        raise CheckpointError(
            f"saved by {by} ({_listed(saved - here)}), but this is {name} ({_listed(here - saved)})"
        )
    if saved_class not in (None, name):
        return [f"was saved by {saved_class} and is a {name} here: it continues from that state"]
    return []


def _entries(state: Mapping[str, object]) -> set[str]:
    """What schedulers of one class have in their state, and others have not."""
    return {name for name in state if name == "_schedulers" or not name.startswith("_")} - {
        "verbose"
    }


def _listed(names: set[str]) -> str:
    if names:
        return f"with {names_in_words(sorted(names))}"
    return "with nothing else"


def check_scaler(item: HasState, state: object, saved_class: str | None) -> list[str]:
    """Raise CheckpointError for a state that lacks entries which a gradient scaler needs."""
    saved = state if isinstance(state, Mapping) else {}
    lacking = [name for name in item.state_dict() if name not in saved]
    if lacking:
        raise CheckpointError(f"the saved state lacks {', '.join(lacking)}")
    return []


def check_own(item: object, state: object, saved_class: str | None) -> list[str]:
    """Let an object judge a state itself, if it can: it raises CheckpointError, or returns notes."""
    check = getattr(item, "check_state_dict", None)
    if check is not None:
        return list(check(state) or ())
    return []


def _group_differences(saved: list[list[list[int]]], here: list[list[list[int]]]) -> Iterable[str]:
    if len(saved) != len(here):
        yield f"{len(saved)} parameter groups saved, {len(here)} here"
        return
    for group, (old, new) in enumerate(zip(saved, here, strict=True)):
        if len(old) != len(new):
            yield f"group {group}: {len(old)} parameters saved, {len(new)} here"
            continue
        for position, (was, now) in enumerate(zip(old, new, strict=True)):
            if was != now:
                yield f"group {group}, parameter {position}: shape {was} saved, {now} here"


# In the order of their keys in documents and of loading; the generators are loaded last.
KINDS: tuple[StateKind, ...] = (
    StateKind("models", "model", Written.WEIGHTS, SAFE_MODEL_NAME, shards=True),
    StateKind(
        "optimizers", "optimizer", Written.FILE, OPTIMIZER_NAME, partial(numbered, OPTIMIZER_NAME, ending=".bin"),
        shards=True, check_fit=check_optimizer,
    ),
    StateKind(
        "schedulers", "scheduler", Written.ONCE, compat=partial(numbered, SCHEDULER_NAME, ending=".bin"), always=True,
        judge=check_scheduler, optional=True,
    ),
    _Generators(
        "rng", "state of the random number generators", Written.RANK, single=True, always=True,
        compat=lambda rank: f"{RNG_STATE_NAME}_{rank}.pkl", resized="own",
    ),
    _Loaders(  # positions in the data are global
        "dataloaders", "data loader", Written.RANK, compat=partial(numbered, LOADER_NAME, ending=".bin"), always=True,
        judge=check_own, optional=True, resized="first",
    ),
    StateKind(
        "scaler", "gradient scaler", Written.ONCE, compat=lambda index: SCALER_NAME, single=True, always=True,
        judge=check_scaler,
    ),
    StateKind(
        "rank_state", "unfinished gradients and random streams", Written.RANK, single=True, always=True,
        judge=check_own, judged_together=True, is_empty=is_empty_rank_state,
    ),
    StateKind(
        "averages", "weight average", Written.ONCE, compat=partial(numbered, "weight_average", ending=".bin"),
        optional=True, of_first=True,
    ),
    _Registered(
        "custom", "registered object", Written.ONCE, compat=registered_file, always=True
    ),
)  # fmt: skip


def kinds(*written: Written) -> list[StateKind]:
    """The rows of the table that are written in one of these places."""
    return [kind for kind in KINDS if kind.written in written]


def collect(run: RunState, written: Written) -> dict[str, object]:
    """The content of the document of ONCE or RANK states."""
    document: dict[str, object] = {}
    if written is Written.ONCE:
        names = []
        for item in run.schedulers:
            scheduler = getattr(item, "scheduler", item)
            names.append(type(scheduler).__qualname__)
        document["progress"] = {**run.progress, CLASSES: {"schedulers": names}}
    for kind in kinds(written):
        states = kind.collect(run)
        if kind.always or states:
            if kind.single:
                document[kind.name] = (states or [None])[0]
            else:
                document[kind.name] = states
    return document


def unknown_keys(document: Mapping[str, object], written: Written) -> list[str]:
    """The keys of a document that are of no kind in the table: a version with more kinds wrote it."""
    return sorted(set(document) - {kind.name for kind in kinds(written)} - {"progress"})


def no_generators(rank: int) -> str:
    """The note for a checkpoint without the random states of a rank."""
    return f"the random states of rank {rank} were not saved: its generators stay as they are"


@contextlib.contextmanager
def loading(what: str, path: Path, problem: str = "cannot take its saved state") -> Iterator[None]:
    """Convert an error of an object that rejects its saved state to a CheckpointError that names both."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {what} {problem} ({error})") from error
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:500]}"
        raise CheckpointError(f"{path}: {what} {problem} ({text})") from error


def compat_files(
    run: RunState, states: Mapping[str, list[object]], rank: int, is_first: bool
) -> tuple[dict[str, object], list[str]]:
    """What a rank writes in the API's format: {file name: value}, and the labels of what has no place in it.

    Args:
        run: the run that is saved.
        states: the states of FILE kinds, by name.
        rank: of this process.
        is_first: whether this rank writes what is written once.
    """
    files: dict[str, object] = {}
    lost: list[str] = []
    for kind in kinds(Written.FILE, Written.ONCE, Written.RANK):
        if kind.name in states:
            found = states[kind.name]
        else:
            found = kind.collect(run)
        files.update(kind.compat_files(found, run, rank, is_first))
        present = [
            state
            for state in found
            if state is not None and not (kind.is_empty and kind.is_empty(state))
        ]
        if kind.compat is None and present:
            lost.append(kind.label)
    return files, lost


SESSION_RANK = "session_rank_"


def session_rank_name(rank: int) -> str:
    """The document of what a rank has different from the others."""
    return f"{SESSION_RANK}{rank}"


def session_rank_names(files: Iterable[str]) -> list[str]:
    """The documents of this kind among the files of a checkpoint, by rank."""
    names = [
        name.removesuffix(".json")
        for name in files
        if name.startswith(SESSION_RANK) and name.endswith(".json")
    ]
    return sorted(names, key=lambda name: (len(name), name))


def rank_entries(run: RunState, shared: Mapping[str, object]) -> list[ObjectState]:
    """The entries of the shared document of this rank that may differ between ranks."""
    entries = []
    for kind in kinds(Written.ONCE):
        if kind.of_first:
            continue
        pairs = zip(kind.objects(run), kind.states(shared), strict=False)
        for index, (item, state) in enumerate(pairs):
            entries.append(ObjectState(kind, index, item, state))
    return entries


def entry_digests(rows: Sequence[ObjectState], strict: bool) -> dict[str, str]:
    """{entry: digest of its state}. Raises CheckpointError for a state that cannot be saved, when `strict`."""
    by_entry = {}
    for row in rows:
        try:
            by_entry[row.key] = state_digest(row.state, row.key)
        except CheckpointError:
            if strict:
                raise
            by_entry[row.key] = ""
    return by_entry


def state_digest(state: object, path: str) -> str:
    """A digest of a state's structure and of the values of its tensors."""
    sink = TensorSink()
    text = json.dumps(encode(state, sink, path), sort_keys=True)
    hashed = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sink.tensors.items():
        hashed.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        on_host = tensor.detach().to("cpu")
        values = on_host.resolve_conj().resolve_neg().contiguous()
        if values.numel():
            hashed.update(host_view(values))
    return hashed.hexdigest()


def check_same_entries(rows: Sequence[Mapping[str, str] | None]) -> None:
    """Raise CheckpointError unless all ranks that could read their state have objects for the same entries."""
    names = {rank: sorted(row) for rank, row in enumerate(rows) if row is not None}
    if len(set(map(tuple, names.values()))) <= 1:
        return
    counts = {
        f"{kind.label}s": {
            rank: sum(key.startswith(f"{kind.name}[") for key in keys)
            for rank, keys in names.items()
        }
        for kind in kinds(Written.ONCE)
    }
    uneven = {label: row for label, row in counts.items() if len(set(row.values())) > 1}
    text = "; ".join(
        f"rank {rank}: " + ", ".join(f"{row[rank]} {label}" for label, row in uneven.items())
        for rank in names
    )
    raise CheckpointError(
        f"the ranks have different objects to save: {text}. Prepare and register the same objects on every rank."
    )


def with_rank_entries(
    shared: Mapping[str, object], own: Mapping[str, Mapping[int, object]]
) -> JSONObject:
    """The shared document with a rank's own entries in place. Raises ValueError for an entry that has no place."""
    merged: JSONObject = dict(shared)
    known = {kind.name: kind for kind in kinds(Written.ONCE)}
    for name, rows in own.items():
        if name in known:
            states = list(known[name].states(shared))
        else:
            states = []
        for index, state in rows.items():
            if type(index) is not int or not 0 <= index < len(states):
                raise ValueError(f"{name}[{index}] is in none of the shared lists")
            states[index] = state
        merged[name] = states[0] if known[name].single else states
    return merged
