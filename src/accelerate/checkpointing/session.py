# SPDX-License-Identifier: Apache-2.0
"""The state of a run, and the documents that contain everything but the weights."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..core import json_text
from ..core.devices import accelerator_type, module_of
from ..core.errors import CheckpointError
from ..core.files import require_regular
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from .blocks import BlockIO, CorruptFile, Segment
from .codec import MALFORMED, TensorSink, decode, encode
from .manifest import CorruptCheckpoint, Manifest, reason
from .tensorfile import read_header, read_into, read_tensors, segments

State = Mapping[str, Any]
# As in the API: a save hook is called with (models, weights, folder), a load hook with (models, folder).
SaveHook = Callable[[list[Any], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[Any], str], Any]


class HasState(Protocol):
    """Anything whose state goes into a checkpoint."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class ShardedPart(Protocol):
    """How a strategy saves sharded models and optimizers. Every rank calls every method."""

    @property
    def is_collective(self) -> bool:
        """Whether `stage` communicates: a rank that fails in it may leave others waiting."""
        ...

    def prepare_background(self) -> None:
        """Make what `stage(blocking=False)` needs of all ranks; nothing in it depends on the run's state."""
        ...

    def stage(self, blocking: bool, compat: bool = False) -> Callable[[Path], None]:
        """Take what this rank must write now; the callable writes it below a folder.

        Without `blocking` it is called in another thread while training continues: the state must be a copy, and no
        message may use the process group of the training. `compat` selects the API's own format.
        """
        ...

    def check(self, folder: Path, strict: bool, models_only: bool = False) -> list[str]:
        """How what was written below a folder differs; with `strict` a CheckpointMismatch. Changes nothing."""
        ...

    def load(self, folder: Path, strict: bool, models_only: bool = False) -> None:
        """Read the shards of this rank from what any number of ranks has written below a folder."""
        ...


@dataclass
class RunState:
    """All that a checkpoint holds, as references: nothing is copied until it is saved.

    Fields:
        models, optimizers, schedulers, dataloaders, scaler, custom: in the order in which they were prepared or
            registered; the order ties them to their files.
        progress: plain data about where the run is (step, epoch, iteration, accumulation, tracker run ids, ...);
            it comes back in the report of a load.
        rank_state: state that differs on every rank (unfinished gradients, say), or None.
        save_hooks, load_hooks: the user's, called on every rank as the API calls them.
        sharded: writes and reads the models and optimizers that save shards.
        mesh: {dimension: size} of the layout that saves, for the manifest.
    """

    models: Sequence[PreparedModel] = ()
    optimizers: Sequence[PreparedOptimizer] = ()
    schedulers: Sequence[HasState] = ()
    dataloaders: Sequence[Any] = ()
    scaler: HasState | None = None
    custom: Sequence[HasState] = ()
    progress: dict[str, Any] = field(default_factory=dict)
    rank_state: HasState | None = None
    save_hooks: Sequence[SaveHook] = ()
    load_hooks: Sequence[LoadHook] = ()
    sharded: ShardedPart | None = None
    mesh: dict[str, int] = field(default_factory=dict)


def check_custom(objects: Sequence[Any]) -> None:
    """Raise ValueError, naming the classes, unless each object has `state_dict` and `load_state_dict`."""
    bad = [
        f"{type(item).__module__}.{type(item).__qualname__}"
        for item in objects
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)))
    ]
    if bad:
        raise ValueError(
            "register_for_checkpointing takes objects that have both `state_dict` and `load_state_dict`; these have "
            f"not: {', '.join(bad)}"
        )


# --- random number generators --------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The states of this process's generators: Python's, numpy's, torch's on the CPU and on each accelerator."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    kind = accelerator_type()
    if kind is not None:
        module = module_of(kind)
        if hasattr(module, "get_rng_state_all"):
            state[kind] = list(module.get_rng_state_all())
        elif hasattr(module, "get_rng_state"):
            state[kind] = [module.get_rng_state()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> list[str]:
    """Restore the generators. Returns a note for each kind of generator that this machine does not have."""
    random.setstate(_as_python_state(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    kind = accelerator_type()
    notes = []
    for name in set(state) - {"python", "numpy", "torch"}:
        if name != kind:
            notes.append(f"the state of the {name} generators was not used: this machine has no {name} device")
            continue
        module = module_of(name)
        if hasattr(module, "set_rng_state_all"):
            # As many as are here: the saving process may have seen more devices than this one.
            present = int(torch.accelerator.device_count())
            module.set_rng_state_all(state[name][:present])
        else:
            module.set_rng_state(state[name][0])
    return notes


def _as_python_state(state: Sequence[Any]) -> tuple[Any, ...]:
    return (state[0], tuple(state[1]), state[2])


# --- documents -----------------------------------------------------------------------------------------------------

_RANK_INLINE = 1 << 14  # bytes: generator states stay in the one file of a rank


def documents(name: str, value: Any, root: str, inline: int = 64) -> dict[str, list[Segment]]:
    """{file name: segments} of a JSON document, and of a tensor file if the value contains tensors."""
    sink = TensorSink(inline)
    text = json.dumps(encode(value, sink, root), separators=(",", ":"), allow_nan=False).encode()
    files: dict[str, list[Segment]] = {f"{name}.json": [text]}
    if sink.tensors:
        files[f"{name}.safetensors"] = segments(sink.tensors)
    return files


def read_document(io: BlockIO, folder: Path, name: str, manifest: Manifest, unshare: bool = False) -> Any:
    """The value that `documents` wrote, its files checked against the manifest in the same reading."""
    with damage(folder / f"{name}.json"):
        text = _read_text(io, folder, name, manifest)
    path = folder / f"{name}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    if path.name in manifest.files:
        with damage(path):
            tensors = read_tensors(io, path, manifest.files[path.name])
    with damage(folder / f"{name}.json"):
        return decode(json_text.parse(text), tensors, str(folder / f"{name}.json"), unshare)


def read_document_into(
    io: BlockIO, folder: Path, name: str, manifest: Manifest, current: Any, root: str
) -> Callable[[], Any]:
    """Do the same as `read_document` in two steps: check the files now, and return a function that reads them.

    The function returns the saved value. It reads tensors into those of the `current` value if that has a tensor of
    the same shape and dtype at the same place.
    """
    path = folder / f"{name}.safetensors"
    sink = TensorSink()
    encode(current, sink, root)
    if not sink.tensors or path.name not in manifest.files:
        value = read_document(io, folder, name, manifest, unshare=True)
        return lambda: value
    with damage(folder / f"{name}.json"):
        text = _read_text(io, folder, name, manifest)
    with damage(path):
        io.check(path, manifest.files[path.name])
        entries = read_header(path).entries
    with damage(folder / f"{name}.json"):
        json_text.parse(text)  # a text that is no JSON is found before the run changes

    def read() -> Any:
        targets = {}
        for key, entry in entries.items():
            mine = sink.tensors.get(key)
            if mine is None or mine.dtype != entry.dtype or tuple(mine.shape) != entry.shape:
                mine = torch.empty(entry.shape, dtype=entry.dtype)
            targets[key] = mine
        with damage(path):
            read_into(io, path, targets)
        with damage(folder / f"{name}.json"):
            return decode(json_text.parse(text), targets, str(folder / f"{name}.json"), unshare=True)

    return read


def _read_text(io: BlockIO, folder: Path, name: str, manifest: Manifest) -> bytearray:
    record = manifest.files.get(f"{name}.json")
    if record is None:
        raise CorruptCheckpoint(f"{folder} holds no {name}.json")
    found = require_regular(folder / f"{name}.json")
    if found != record.size:
        raise CorruptFile(f"it has {found} bytes where {record.size} were written")
    text = bytearray(record.size)
    io.read(folder / f"{name}.json", [memoryview(text)], record)
    return text


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Convert errors from reading a damaged file to a CorruptCheckpoint that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except (CorruptFile, OSError, *MALFORMED) as error:
        raise CorruptCheckpoint(f"{path} is damaged: {reason(error)[:500]}") from error


def shared_state(run: RunState) -> dict[str, Any]:
    """The state that all ranks share, except for models and optimizers."""
    return {
        "progress": run.progress,
        "schedulers": [item.state_dict() for item in run.schedulers],
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "custom": [item.state_dict() for item in run.custom],
    }


def rank_state(run: RunState) -> dict[str, Any]:
    """The state of this rank: its generators, its position in each loader, and its `rank_state`."""
    return {
        "rng": rng_state(),
        "dataloaders": [
            item.state_dict() if callable(getattr(item, "state_dict", None)) else None for item in run.dataloaders
        ],
        "rank_state": None if run.rank_state is None else run.rank_state.state_dict(),
    }


def rank_documents(run: RunState, rank: int) -> dict[str, list[Segment]]:
    """The files with the state of a rank."""
    return documents(f"random_states_{rank}", rank_state(run), f"rank {rank}", _RANK_INLINE)
