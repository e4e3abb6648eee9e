# SPDX-License-Identifier: Apache-2.0
"""States that are written once, and differ between ranks (of schedulers, for example): found when a run is saved.

The checkpoint's shared document has the state of one rank. Each other rank writes a document with the entries
that differ, and restores them on the same number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from ..core.errors import CheckpointError
from ..core.json_text import JSONObject
from .blocks import host_view
from .codec import TensorSink, encode
from .kinds import ObjectState, Written, kinds
from .run_state import RunState

PREFIX = "session_rank_"


def document_name(rank: int) -> str:
    """The document of what a rank has different from the others."""
    return f"{PREFIX}{rank}"


def document_names(files: Iterable[str]) -> list[str]:
    """The documents of this kind among the files of a checkpoint, by rank."""
    names = [
        name.removesuffix(".json")
        for name in files
        if name.startswith(PREFIX) and name.endswith(".json")
    ]
    return sorted(names, key=lambda name: (len(name), name))


def entries(run: RunState, shared: Mapping[str, object]) -> list[ObjectState]:
    """The entries of the shared document of this rank that may differ between ranks."""
    return [
        ObjectState(kind, index, item, state)
        for kind in kinds(Written.ONCE)
        if not kind.of_first
        for index, (item, state) in enumerate(
            zip(kind.objects(run), kind.states(shared), strict=False)
        )
    ]


def digests(rows: Sequence[ObjectState], strict: bool) -> dict[str, str]:
    """{entry: digest of its state}. Raises CheckpointError for a state that cannot be saved, when `strict`."""
    by_entry = {}
    for row in rows:
        try:
            by_entry[row.key] = digest(row.state, row.key)
        except CheckpointError:
            if strict:
                raise
            by_entry[row.key] = ""
    return by_entry


def digest(state: object, path: str) -> str:
    """A digest of a state's structure and of the values of its tensors."""
    sink = TensorSink()
    text = json.dumps(encode(state, sink, path), sort_keys=True)
    hashed = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sink.tensors.items():
        hashed.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        here = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        if here.numel():
            hashed.update(host_view(here))
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


def overlay(shared: Mapping[str, object], own: Mapping[str, Mapping[int, object]]) -> JSONObject:
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
