# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint, in the native format or in the API's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from ..core.bucket_path import BucketPath
from ..core.constants import MODEL_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME
from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from ..core.modules import class_name
from ..core.objects import names_in_words
from ..core.tensor_files import read_header
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..parallel.unwrap import canonical_name
from ..runtime.agreement import Process
from . import compat
from .documents import damage, read_document, read_document_into
from .files import BlockIO, memory_of, only_tensors, read_tensors
from .kinds import (
    SESSION,
    SESSION_RANK,
    StateKind,
    Written,
    kinds,
    no_generators,
    session_rank_name,
    session_rank_names,
    unknown_keys,
    with_rank_entries,
)
from .layout import (
    MANIFEST,
    RANK_DOCUMENT,
    CheckpointMismatch,
    CorruptCheckpoint,
    Manifest,
    check_files,
    model_shards,
    numbered,
    rank_document_name,
    read_manifest,
)
from .run_state import RunState, StateDict, seeded, state_template

T = TypeVar("T")


class CheckpointReader:
    """Reads a checkpoint. Only `ModelWeights.load` changes the run."""

    manifest: Manifest | None = None

    def __init__(self, folder: Path, run: RunState, process: Process, allow_pickle: bool) -> None:
        self.folder = folder
        self.run = run
        self.rank: int = process.process_index
        self.processes: int = process.num_processes
        self.allow_pickle = allow_pickle
        self.io: BlockIO = BlockIO()

    def close(self) -> None:
        """Stop the threads that read."""
        self.io.__exit__()

    @property
    def world_size(self) -> int:
        """The number of processes that saved the checkpoint; 0 if it has no manifest."""
        if self.manifest:
            return self.manifest.world_size
        return 0

    @property
    def progress(self) -> JSONObject:
        """The counters of the run; empty if the checkpoint has no manifest."""
        if self.manifest:
            return dict(self.manifest.progress)
        return {}

    @property
    def is_unsharded(self) -> bool:
        """Whether nothing in it was saved in shards."""
        if self.manifest is None:
            return not any(self.folder.glob(f"{MODEL_NAME}_fsdp_*"))
        return not any(row["sharded"] for row in (*self.manifest.models, *self.manifest.optimizers))

    def check_weights(self) -> None:
        """Check the files that are not read into fresh memory: the weights, and what hooks and shards have written.

        Tensors in a bucket are checked where they are read.
        """
        if self.manifest is not None:
            names = [name for name in self.manifest.files if not self.read_fresh(name)]
            if isinstance(self.folder, BucketPath):
                names = [name for name in names if not name.endswith(".safetensors")]
            check_files(self.io, self.folder, self.manifest, names)

    def read_fresh(self, name: str) -> bool:
        """Whether a file is always read into new memory, and checked when it is read."""
        return False

    def model(self, index: int) -> ModelWeights:
        """Return the saved weights of a model."""
        path = self.folder / numbered(SAFE_MODEL_NAME, index, ".safetensors")
        pickled = self.folder / numbered(MODEL_NAME, index, ".bin")
        shards = model_shards(self.folder, index)
        if path.exists() or pickled.exists():
            shapes, read = weights_file(self.io, path, pickled, self.allow_pickle)
            path = path if path.exists() else pickled
        elif shards.is_dir():
            from .sharded import read_unsharded, shard_shapes

            path = shards
            shapes, read = shard_shapes(path), functools.partial(read_unsharded, path)
            if isinstance(path, BucketPath):
                # Their checksums are compared before anything changes.
                state = read()
                read = functools.partial(dict, state)
        else:
            raise CheckpointError(f"{self.folder} does not hold the weights of model {index}")
        return ModelWeights(path, shapes, read, self.model_extra(index))

    def model_extra(self, index: int) -> dict[str, object]:
        """The entries of a model's state that are not tensors."""
        return {}

    def counts(self) -> dict[str, int]:
        """The number of saved objects by kind, where it is known."""
        if self.manifest is None:
            return {}
        return {"models": len(self.manifest.models), "optimizers": len(self.manifest.optimizers)}

    def check_counts(self, saved: dict[str, int]) -> None:
        """Raise CheckpointMismatch when the run has more or fewer objects of a kind than were saved."""
        if self.run.load_hooks:
            # A hook may have taken models out when they were saved.
            saved.pop("models", None)
        rows = []
        for kind in kinds(*Written):
            present = len(kind.objects(self.run))
            count = saved.get(kind.name, present)
            if count != present:
                rows.append(f"{count} {kind.label}s saved, {present} here")
        if rows:
            raise CheckpointMismatch(
                f"{self.folder} was saved by another run: {'; '.join(rows)}. Nothing was loaded. Prepare and register "
                "the same objects in the same order before loading. To load the weights alone, pass models_only=True "
                "to load_state."
            )

    def about(self, kind: StateKind, index: int) -> JSONObject | None:
        """An object's row in the manifest, if there is one."""
        if self.manifest is None:
            rows = {}
        else:
            rows = {"models": self.manifest.models, "optimizers": self.manifest.optimizers}
        if kind.name in rows:
            return rows[kind.name][index]
        return None

    def read_file(
        self, kind: StateKind, index: int, item: PreparedOptimizer
    ) -> Callable[[], object]:
        """Check the saved state of an object of a FILE kind now, and return a function that reads it."""
        shards = self.folder / f"{kind.file}_{index}"
        if not shards.is_dir():
            return self._read_unsharded(kind, index, item)
        # slow to import, and not needed for an unsharded checkpoint
        from .sharded import (
            read_optimizer,
        )

        models = [state_template(part) for part in self.run.models]
        state = read_optimizer(shards, item.inner, models, item.group_shapes())
        return lambda: state

    def _read_unsharded(
        self, kind: StateKind, index: int, item: PreparedOptimizer
    ) -> Callable[[], object]:
        raise NotImplementedError

    def states(self, notes: list[str]) -> tuple[dict[str, list[object]], JSONObject]:
        """({kind: states of its objects}, progress) for this rank, of the kinds without files of their own."""
        raise NotImplementedError

    @property
    def _is_of_rank_0(self) -> bool:
        """Whether rank 0 has saved alone."""
        return self.manifest is not None and self.manifest.ranks != "all"

    def _random_states(self, first: StateDict, notes: list[str]) -> StateDict:
        """The random states of this rank, from those of rank 0, which has saved alone."""
        notes.append(
            f"only rank 0 of {self.world_size} processes saved this: its random states are "
            "restored, and the generators of other ranks are seeded from these and their rank. "
            "Unfinished gradients are not restored"
        )
        if self.rank:
            return seeded(first, self.rank)
        return first


def open_checkpoint(
    folder: Path, run: RunState, process: Process, allow_pickle: bool
) -> CheckpointReader:
    """The checkpoint in a folder, by its manifest or else by the random states that the API's format always has.

    Raises CorruptCheckpoint for a folder that has neither.
    """
    if not (folder / MANIFEST).exists() and any(folder.glob(f"{RNG_STATE_NAME}_*.pkl")):
        return CompatReader(folder, run.entire or run, process, allow_pickle)
    manifest = read_manifest(folder)
    if not any("adapters" in row for row in manifest.models):
        run = run.entire or run
    source = (CompatReader if manifest.layout == "compat" else NativeReader)(
        manifest.files_in(folder), run, process, allow_pickle
    )
    source.manifest = manifest
    return source


class NativeReader(CheckpointReader):
    """A folder in our own format."""

    manifest: Manifest

    def read_fresh(self, name: str) -> bool:
        """Whether a file is a document or belongs to one."""
        return self._documents.fullmatch(name) is not None

    @functools.cached_property
    def _documents(self) -> re.Pattern[str]:
        files = "|".join(kind.file for kind in kinds(Written.FILE))
        return re.compile(
            rf"({SESSION}|{SESSION_RANK}\d+|{RNG_STATE_NAME}_\d+|({files})(_\d+)?)\.(json|safetensors)"
        )

    def counts(self) -> dict[str, int]:
        """Return the number of saved objects by kind."""
        # An optional kind that a checkpoint has none of stays as it is.
        counts = {}
        for kind in kinds(Written.ONCE):
            is_expected = not kind.optional or kind.name in self._session
            if is_expected and not kind.single:
                counts[kind.name] = len(kind.states(self._session))
        for kind in kinds(Written.FILE):
            pattern = re.compile(rf"{kind.file}(_\d+)?\.json")
            files = [name for name in self.manifest.files if pattern.fullmatch(name)]
            counts[kind.name] = len(files)
        return {**counts, **super().counts()}

    def model_extra(self, index: int) -> dict[str, object]:
        """Return the entries of a model's state that are not tensors."""
        name = numbered("model_extra", index, "")
        if f"{name}.json" not in self.manifest.files:
            return {}
        entries: dict[str, object] = self._read(name)
        return entries

    def _read(self, name: str) -> Any:
        return read_document(self.io, self.folder, name, self.manifest)

    def _read_unsharded(
        self, kind: StateKind, index: int, item: PreparedOptimizer
    ) -> Callable[[], object]:
        # Where the state's memory is there already it is read in place, so that none is needed twice.
        if getattr(item, "is_partial", False):
            current = None
        else:
            current = item.state_dict()
        name = numbered(kind.file, index, "")
        return read_document_into(
            self.io, self.folder, name, self.manifest, current, f"{kind.label} {index}"
        )

    @functools.cached_property
    def _session(self) -> JSONObject:
        session: JSONObject = self._read(SESSION)
        return session

    def _rank_document(self, rank: int) -> JSONObject:
        document: JSONObject = self._read(rank_document_name(rank))
        return document

    @functools.cached_property
    def _own(self) -> JSONObject:
        """The document that the rank of this number wrote; empty if there is none."""
        if f"{rank_document_name(self.rank)}.json" in self.manifest.files:
            return self._rank_document(self.rank)
        return {}

    @functools.cached_property
    def _first_rank(self) -> JSONObject:
        """The document of the lowest rank that this folder has (0 but where each machine keeps its own copy)."""
        present = [
            int(match[1])
            for name in self.manifest.files
            if (match := RANK_DOCUMENT.fullmatch(name))
        ]
        if not present:
            raise CorruptCheckpoint(f"{self.folder} does not hold the state of any rank")
        if min(present) == self.rank:
            return self._own
        return self._rank_document(min(present))

    @property
    def _is_same_size(self) -> bool:
        return self.processes == self.manifest.world_size and not self._is_of_rank_0

    def states(self, notes: list[str]) -> tuple[dict[str, list[object]], JSONObject]:
        """Of a rank that has saved, its own states. On another number of processes, what has a place there."""
        own = self._rank_states(notes)
        session = self._session_of_rank(notes)
        unknown = [*unknown_keys(session, Written.ONCE), *unknown_keys(own, Written.RANK)]
        if unknown:
            notes.append(
                f"{', '.join(unknown)[:200]}: not loaded, because this version does not know this "
                "kind of state"
            )
        saved_states = {kind.name: kind.states(session) for kind in kinds(Written.ONCE)}
        saved_states.update({kind.name: kind.states(own) for kind in kinds(Written.RANK)})
        self.check_counts(
            {
                kind.name: len(saved_states[kind.name])
                for kind in kinds(Written.RANK)
                if not kind.single
            }
        )
        return saved_states, session["progress"]

    def _session_of_rank(self, notes: list[str]) -> JSONObject:
        """What is written once, as this rank had it."""
        names = session_rank_names(self.manifest.files)
        if self._is_same_size:
            names = [name for name in names if name == session_rank_name(self.rank)]
        keys: dict[str, None] = {}
        session = self._session
        for name in names:
            with damage(self.folder / f"{name}.json"):
                entries = self._read(name)
                for kind, rows in entries.items():
                    keys.update({f"{kind}[{index}]": None for index in rows})
                if self._is_same_size:
                    session = with_rank_entries(session, entries)
        if keys and not self._is_same_size:
            notes.append(
                f"{', '.join(keys)} differed between the {self.manifest.world_size} processes "
                "that saved: with a different number of processes every rank takes the state of "
                "rank 0"
            )
        return session

    def _rank_states(self, notes: list[str]) -> JSONObject:
        own = self._own
        if self._is_of_rank_0:
            own = {"rng": self._random_states(self._first_rank["rng"], notes)}
        elif own:
            if self._is_same_size:
                return own
            saved = self.manifest.world_size
            note = f"saved on {saved} process{'es' * (saved > 1)}, loaded on {self.processes}"
            if self.processes > saved:
                note += f"; ranks from {saved} on keep their random states"
            window = (own.get("rank_state") or {}).get("window")
            if window and window["gradients"]:
                note += "; the gradients of the unfinished accumulation window are dropped"
            notes.append(note)
        else:
            notes.append(no_generators(self.rank))

        def none(kind: StateKind) -> list[None] | None:
            if kind.single:
                return None
            return [None] * len(kind.objects(self.run))

        documents = {"own": own, "first": self._first_rank}
        states: JSONObject = {}
        for kind in kinds(Written.RANK):
            if kind.resized is None:
                states[kind.name] = none(kind)
            else:
                states[kind.name] = documents[kind.resized].get(kind.name)
        return states


class CompatReader(CheckpointReader):
    """A folder in the API's own format, written by another library (without checksums) or by layout='compat'."""

    def _read_unsharded(
        self, kind: StateKind, index: int, item: PreparedOptimizer
    ) -> Callable[[], object]:
        state = kind.compat and compat.load_pickled(
            self.folder / kind.compat(index), self.allow_pickle
        )
        return lambda: state

    def states(self, notes: list[str]) -> tuple[dict[str, list[object]], JSONObject]:
        """Return the states in the files that the API's format has, for the objects of the run."""
        saved_states = {}
        for kind in kinds(Written.ONCE, Written.RANK):
            count = len(kind.objects(self.run))
            saved_states[kind.name] = kind.read_compat(
                self.folder, count, self.rank, self.allow_pickle, notes
            )
        if self._is_of_rank_0:
            first = compat.read_generators(self.folder, 0, self.allow_pickle)
            saved_states["rng"] = [None]
            if first is not None:
                saved_states["rng"] = [self._random_states(first, notes)]
        for kind in kinds(Written.ONCE, Written.FILE):
            if kind.compat is None and kind.objects(self.run):
                notes.append(
                    f"the API's format cannot store the state of the {kind.label}, which stays as "
                    "it is"
                )
        progress = self.progress
        if not progress:
            step = compat.read_step(self.folder, self.rank, self.allow_pickle)
            progress = {"accumulation_step": step}
        return saved_states, progress


# --- weights -------------------------------------------------------------------------------------------------------


Shapes = Mapping[str, tuple[int, ...] | None]  # by entry; None for an entry that is not a tensor


@dataclass
class Differences:
    """How the entries of a file differ from those of a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"missing in the checkpoint: {names_in_words(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the model: {names_in_words(self.unexpected)}")
        if self.shapes:
            rows = [
                f"{name} (saved {list(saved)}, here {list(here)})"
                for name, (saved, here) in self.shapes.items()
            ]
            lines.append(f"with a different shape: {names_in_words(rows)}")
        return "; ".join(lines)


def compare_names(
    saved: Mapping[str, tuple[int, ...] | None], state: Mapping[str, object]
) -> Differences:
    """How saved entries ({name: shape}, None for an entry that is not a tensor) differ from those of a model's state.

    An entry that the file lacks is not a difference when the model ties it to one that the file has.
    """
    differences = Differences()
    present = {
        memory_of(value)
        for name, value in state.items()
        if name in saved and isinstance(value, torch.Tensor)
    }
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            if name not in saved:
                differences.missing.append(name)
        elif name not in saved:
            if memory_of(value) not in present:
                differences.missing.append(name)
        elif saved[name] is not None and tuple(value.shape) != saved[name]:
            differences.shapes[name] = (saved[name] or (), tuple(value.shape))
    differences.unexpected = [name for name in saved if name not in state]
    return differences


@dataclass
class ModelWeights:
    """The saved weights of one model.

    Fields:
        path: the file, or the folder of shards.
        shapes: of its entries.
        read: reads its entries into host memory.
        extra: the entries of the model's state that are not tensors.
        differences: between the entries and the model, after `compare`.
    """

    path: Path
    shapes: Shapes
    read: Callable[[], Mapping[str, object]]
    extra: dict[str, object]
    differences: Differences = field(default_factory=Differences)

    def compare(self, index: int, part: PreparedModel, strict: bool) -> list[str]:
        """Notes on what differs from the model; with `strict` any difference is a CheckpointMismatch."""
        if part.saves_shards and part.template is None:
            from ..parallel.fsdp.state import is_fsdp1

            if is_fsdp1(part.module):
                return []  # its parameters are flattened: only its own loader knows their names
        saved = _plain_names({**self.shapes, **dict.fromkeys(self.extra)})
        self.differences = compare_names(saved, _plain_names(self.present_entries(part)))
        if self.differences and strict:
            raise CheckpointMismatch(
                f"{self.path} does not fit model {index} ({class_name(state_template(part))}): {self.differences}. "
                "Nothing was loaded. Build the model as it was saved, or pass strict=False to load what fits."
            )
        if self.differences:
            return [f"model {index}: {self.differences}"]
        return []

    def present_entries(self, part: PreparedModel) -> Mapping[str, object]:
        """The entries of a model, with the shapes of the user's; they need not have storage."""
        entries: dict[str, object] = state_template(part).state_dict()
        return entries

    def load(self, part: PreparedModel, strict: bool) -> None:
        """Load the weights into a model."""
        other = self.differences.shapes
        entries = _plain_names({**self.read(), **self.extra})
        # What is missing or unexpected was judged before; tied names may be missing rightly.
        kept = {name: value for name, value in entries.items() if name not in other}
        part.load_state_dict(kept, strict if part.is_partial else False)


def _plain_names(entries: Mapping[str, T]) -> dict[str, T]:
    return {canonical_name(name): value for name, value in entries.items()}


def weights_file(
    io: BlockIO, path: Path, pickled: Path, allow_pickle: bool
) -> tuple[Shapes, Callable[[], Mapping[str, object]]]:
    """The shapes in a safetensors file, or in one of torch.save where there is none, and what reads it."""
    if path.exists() or not pickled.exists():
        return _safetensors(io, path)
    return _pickled(pickled, allow_pickle)


def _safetensors(io: BlockIO, path: Path) -> tuple[Shapes, Callable[[], Mapping[str, object]]]:
    """The shapes in a safetensors file, with the aliases of tied weights, and a function that reads it."""
    in_memory: dict[str, torch.Tensor] = {}
    with damage(path):
        held = io.hold(path)
        header = read_header(held)
        if isinstance(path, BucketPath):
            # Read once, and checked before anything changes.
            in_memory = read_tensors(io, path)
    shapes = {name: entry.shape for name, entry in header.entries.items()}
    for alias, name in header.aliases.items():
        shapes[alias] = shapes[name]

    def read() -> Mapping[str, object]:
        # Views of the mapped file: what is copied from them is not held in memory twice.
        tensors = in_memory or load_file(held)
        for alias, name in header.aliases.items():
            tensors[alias] = tensors[name]
        return tensors

    return shapes, read


def _pickled(path: Path, allow_pickle: bool) -> tuple[Shapes, Callable[[], Mapping[str, object]]]:
    """The shapes in a file of torch.save, which is in host memory then, and a function that returns its content."""
    state = compat.load_pickled(path, allow_pickle)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CorruptCheckpoint(f"{path} is not the state of a model")
    shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(state)
    for name, tensor in only_tensors(state).items():
        shapes[name] = tuple(tensor.shape)
    return shapes, lambda: state
