# SPDX-License-Identifier: Apache-2.0
"""Schedulers, the scaler and registered objects whose state differs between ranks: found when a run is saved.

The checkpoint's shared document has the state of one rank. Each other rank writes a document with the entries
that differ, and restores them on the same number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import CheckpointError
from .blocks import host_view
from .codec import TensorSink, encode
from .session import RunState

_PREFIX = "session_rank_"


def document_name(rank: int) -> str:
    """The document of what a rank has different from the others."""
    return f"{_PREFIX}{rank}"


def document_names(files: Mapping[str, Any]) -> list[str]:
    """The documents of this kind among the files of a checkpoint, by rank."""
    found = [name.removesuffix(".json") for name in files if name.startswith(_PREFIX) and name.endswith(".json")]
    return sorted(found, key=lambda name: (len(name), name))


@dataclass
class StateEntry:
    """One state: `kind` is "schedulers", "custom" or "scaler"; `label` names the object in messages."""

    kind: str
    index: int
    label: str
    state: Any

    @property
    def key(self) -> str:
        """The name of the entry, such as "schedulers[0]"."""
        return f"{self.kind}[{self.index}]"


def entries(run: RunState, shared: Mapping[str, Any]) -> list[StateEntry]:
    """The entries of the shared document of this rank that may differ between ranks."""
    found = []
    for kind, objects, name in (
        ("schedulers", run.schedulers, "scheduler"),
        ("custom", run.custom, "registered object"),
        ("scaler", [] if run.scaler is None else [run.scaler], "gradient scaler"),
    ):
        states = [shared[kind]] if kind == "scaler" else shared[kind]
        for index, (item, state) in enumerate(zip(objects, states, strict=False)):
            found.append(StateEntry(kind, index, f"{name} {index} ({type(item).__qualname__})", state))
    return found


def digests(rows: Sequence[StateEntry], strict: bool) -> dict[str, str]:
    """{entry: digest of its state}. Raises CheckpointError for a state that cannot be saved, when `strict`."""
    found = {}
    for row in rows:
        try:
            found[row.key] = digest(row.state, row.key)
        except CheckpointError:
            if strict:
                raise
            found[row.key] = ""
    return found


def digest(state: Any, path: str) -> str:
    """A digest of a state's structure and of the values of its tensors."""
    sink = TensorSink()
    text = json.dumps(encode(state, sink, path), sort_keys=True)
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sink.tensors.items():
        found.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        here = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        if here.numel():
            found.update(host_view(here))
    return found.hexdigest()


def check_same_entries(rows: Sequence[Mapping[str, str] | None]) -> None:
    """Raise CheckpointError unless all ranks that could read their state have objects for the same entries."""
    names = {rank: sorted(row) for rank, row in enumerate(rows) if row is not None}
    if len(set(map(tuple, names.values()))) <= 1:
        return
    counts = "; ".join(
        f"rank {rank}: {sum(key.startswith('custom') for key in keys)} registered objects, "
        f"{sum(key.startswith('schedulers') for key in keys)} schedulers"
        for rank, keys in names.items()
    )
    raise CheckpointError(
        f"the ranks have different objects to save: {counts}. Prepare and register the same objects on every rank."
    )


def differing(mine: Mapping[str, str], reference: Mapping[str, str] | None) -> list[str]:
    """The entries of this rank that are not those of the reference."""
    return [] if reference is None else [key for key, value in mine.items() if value != reference.get(key)]


def overlay(shared: dict[str, Any], own: Any) -> dict[str, Any]:
    """The shared document with a rank's own entries in place. Raises ValueError for an entry that has no place."""
    merged = {**shared, "schedulers": list(shared["schedulers"]), "custom": list(shared["custom"])}
    for kind, rows in own.items():
        if kind == "scaler":
            merged["scaler"] = rows[0]
            continue
        for index, state in rows.items():
            if kind not in ("schedulers", "custom") or type(index) is not int or not 0 <= index < len(merged[kind]):
                raise ValueError(f"{kind}[{index}] is in none of the shared lists")
            merged[kind][index] = state
    return merged


def own_document(rows: Sequence[StateEntry], keys: Sequence[str]) -> dict[str, dict[int, Any]]:
    """What a rank writes: {kind: {index: state}} of the entries that differ."""
    document: dict[str, dict[int, Any]] = {}
    for row in rows:
        if row.key in keys:
            document.setdefault(row.kind, {})[row.index] = row.state
    return document
