# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint, in the native format or in the API's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.constants import MODEL_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME
from ..core.errors import CheckpointError
from ..parallel.prepared import PreparedModel
from . import compat, per_rank
from .blocks import BlockIO, CorruptFile
from .contents import check_rank, check_shared
from .layout import model_shards, numbered, optimizer_shards
from .manifest import MANIFEST, CorruptCheckpoint, Manifest, check_files, check_sizes, read_manifest, reason
from .matching import Differences, compare_model
from .session import RunState, damage, read_document, read_document_into
from .tensorfile import read_header, read_into, read_tensors


class CheckpointReader:
    """Reads a checkpoint. Only `WeightsReader.load` changes the run."""

    manifest: Manifest | None = None

    def __init__(self, folder: Path, run: RunState, allow_pickle: bool) -> None:
        self.folder = folder
        self.run = run
        self.allow_pickle = allow_pickle
        self.io = BlockIO()

    def close(self) -> None:
        """Stop the threads that read."""
        self.io.__exit__()

    @property
    def world_size(self) -> int:
        """The number of processes that saved the checkpoint; 0 if it has no manifest."""
        return self.manifest.world_size if self.manifest else 0

    @property
    def progress(self) -> dict[str, Any]:
        """The counters of the run; empty if the checkpoint has no manifest."""
        return dict(self.manifest.progress) if self.manifest else {}

    @property
    def is_unsharded(self) -> bool:
        """Whether nothing in it was saved in shards."""
        if self.manifest is None:
            return not any(self.folder.glob(f"{MODEL_NAME}_fsdp_*"))
        return not any(row["sharded"] for row in (*self.manifest.models, *self.manifest.optimizers))

    def check_sizes(self) -> None:
        """Compare the files with their sizes in the manifest, if there is one."""
        if self.manifest is not None:
            check_sizes(self.folder, self.manifest)

    def check_weights(self) -> None:
        """Check the files that are not read into fresh memory: the weights, and what hooks and shards have written."""
        if self.manifest is not None:
            names = [name for name in self.manifest.files if not self.read_fresh(name)]
            check_files(self.io, self.folder, self.manifest, names)
        if not self.is_unsharded:
            from .sharded import check_shards

            folders = [model_shards(self.folder, index) for index in range(len(self.run.models))]
            folders += [optimizer_shards(self.folder, index) for index in range(len(self.run.optimizers))]
            for folder in folders:
                check_shards(folder)

    def read_fresh(self, name: str) -> bool:
        """Whether a file is always read into new memory, and checked when it is read."""
        return False

    def model(self, index: int, part: PreparedModel) -> WeightsReader:
        """Return the reader for the weights of a model."""
        for name in (numbered(SAFE_MODEL_NAME, index, ".safetensors"), numbered(MODEL_NAME, index, ".bin")):
            path = self.folder / name
            if path.exists():
                kind = SafetensorsWeights if name.endswith(".safetensors") else PickledWeights
                return kind(self, path, index)
        if model_shards(self.folder, index).is_dir():
            return ShardedWeights(self, model_shards(self.folder, index), index)
        raise CheckpointError(f"{self.folder} holds no weights of model {index}")

    def model_extra(self, index: int) -> dict[str, Any]:
        """The entries of a model's state that are no tensors."""
        return {}

    def counts(self) -> dict[str, int | None]:
        """Return the number of saved objects by kind, as far as it is known."""
        raise NotImplementedError

    def optimizer(self, index: int) -> Callable[[], Any]:
        """Check the saved state of an optimizer now; the callable gives it, at the cost of the former state."""
        raise NotImplementedError

    def sharded_optimizer(self, index: int) -> Any:
        """Read the state of an optimizer that was saved in shards."""
        from .sharded import read_optimizer  # slow to import, and not needed for an unsharded checkpoint

        optimizer = self.run.optimizers[index]
        return read_optimizer(
            optimizer_shards(self.folder, index),
            optimizer.inner,
            [part.state_template for part in self.run.models],
            optimizer.group_shapes(),
        )

    def about_optimizer(self, index: int) -> Mapping[str, Any] | None:
        """Return an optimizer's entry in the manifest; None without a manifest."""
        return self.manifest.optimizers[index] if self.manifest else None

    def shared(self) -> dict[str, Any]:
        """Return the state that all ranks share."""
        raise NotImplementedError

    def shared_of(self, rank: int, world_size: int, notes: list[str]) -> dict[str, Any]:
        """The shared state as a rank takes it."""
        return self.shared()

    def rank(self, rank: int, world_size: int, notes: list[str]) -> dict[str, Any]:
        """Return the state of one rank."""
        raise NotImplementedError


def open_checkpoint(folder: Path, run: RunState, allow_pickle: bool) -> CheckpointReader:
    """The checkpoint in a folder, by its manifest or else by the random states that the API's format always has.

    Raises CorruptCheckpoint for a folder that has neither.
    """
    if not (folder / MANIFEST).exists() and any(folder.glob(f"{RNG_STATE_NAME}_*.pkl")):
        return CompatReader(folder, run, allow_pickle)
    manifest = read_manifest(folder)
    source = (CompatReader if manifest.layout == "compat" else NativeReader)(folder, run, allow_pickle)
    source.manifest = manifest
    return source


class NativeReader(CheckpointReader):
    """A folder in our own format."""

    manifest: Manifest

    def read_fresh(self, name: str) -> bool:
        """Whether a file is a document or belongs to one."""
        return not (name.startswith((SAFE_MODEL_NAME, MODEL_NAME)) or "/" in name) and name.endswith(
            (".json", ".safetensors")
        )

    def counts(self) -> dict[str, int | None]:
        """Return the number of saved objects by kind."""
        shared = self.shared()
        return {
            "models": len(self.manifest.models),
            "optimizers": len(self.manifest.optimizers),
            "schedulers": len(shared["schedulers"]),
            "registered objects": len(shared["custom"]),
        }

    def model_extra(self, index: int) -> dict[str, Any]:
        """Return the entries of a model's state that are not tensors."""
        name = numbered("model_extra", index, "")
        if f"{name}.json" not in self.manifest.files:
            return {}
        found = read_document(self.io, self.folder, name, self.manifest)
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise CorruptCheckpoint(f"{self.folder / name}.json is damaged: it is not an object")
        return found

    def optimizer(self, index: int) -> Callable[[], Any]:
        """Check the saved state of an optimizer now, and return a function that reads it."""
        if self.manifest.optimizers[index]["sharded"]:
            state = self.sharded_optimizer(index)
            return lambda: state
        part = self.run.optimizers[index]
        # Where the state's memory is there already it is read in place, so that none is needed twice.
        current = None if part.is_partial else part.state_dict()
        name = numbered("optimizer", index, "")
        return read_document_into(self.io, self.folder, name, self.manifest, current, f"optimizer {index}")

    def shared(self) -> dict[str, Any]:
        """Return the state that all ranks share. It is read once."""
        if not hasattr(self, "_shared"):
            found = read_document(self.io, self.folder, "session", self.manifest)
            self._shared: dict[str, Any] = check_shared(found, self.folder / "session.json")
        return self._shared

    def shared_of(self, rank: int, world_size: int, notes: list[str]) -> dict[str, Any]:
        """The shared state as a rank had it. On another number of processes it is the same for all."""
        names = per_rank.document_names(self.manifest.files)
        if world_size != self.manifest.world_size:
            if names:
                notes.append(self._differing(names))
            return self.shared()
        name = per_rank.document_name(rank)
        if name not in names:
            return self.shared()
        with damage(self.folder / f"{name}.json"):
            return per_rank.overlay(self.shared(), read_document(self.io, self.folder, name, self.manifest))

    def _differing(self, names: list[str]) -> str:
        keys: dict[str, None] = {}
        for name in names:
            with damage(self.folder / f"{name}.json"):
                for kind, rows in read_document(self.io, self.folder, name, self.manifest).items():
                    keys.update({f"{kind}[{index}]": None for index in rows})
        return (
            f"{', '.join(keys)} differed between the {self.manifest.world_size} processes that saved: with another "
            "number of processes every rank takes the state of rank 0"
        )

    def rank(self, rank: int, world_size: int, notes: list[str]) -> dict[str, Any]:
        """A rank's own state. On another number of processes the loaders' places are rank 0's, which are global."""
        same = world_size == self.manifest.world_size
        own = f"random_states_{rank}"
        if f"{own}.json" in self.manifest.files:
            state = self._rank_document(own)
            if same:
                return state
            notes.append(
                f"saved by {self.manifest.world_size} processes, loaded by {world_size}: each of the first ranks "
                "takes its former random states; unfinished gradients, and places in streams of random numbers that "
                "stages of a pipeline have for themselves, are dropped"
            )
            if rank == 0:
                return {**state, "rank_state": None}
        else:
            state = {"rng": None}
            notes.append(f"no random states of rank {rank} were saved: its generators stay as they are")
        first = self._first_rank()
        return {"rng": state["rng"], "dataloaders": first["dataloaders"], "rank_state": None}

    def _first_rank(self) -> dict[str, Any]:
        """The state of the lowest rank that this folder has (rank 0 but where each machine keeps its own copy)."""
        present = [
            int(match[1])
            for name in self.manifest.files
            if (match := re.fullmatch(r"random_states_(\d{1,9})\.json", name))
        ]
        if not present:
            raise CorruptCheckpoint(f"{self.folder} holds the state of no rank")
        return self._rank_document(f"random_states_{min(present)}")

    def _rank_document(self, name: str) -> dict[str, Any]:
        return check_rank(read_document(self.io, self.folder, name, self.manifest), self.folder / f"{name}.json")


class CompatReader(CheckpointReader):
    """A folder in the API's own format, written by another library (without checksums) or by layout='compat'."""

    def counts(self) -> dict[str, int | None]:
        """Return the numbers of models and optimizers; empty without a manifest."""
        if self.manifest is None:
            return {}
        return {"models": len(self.manifest.models), "optimizers": len(self.manifest.optimizers)}

    def optimizer(self, index: int) -> Callable[[], Any]:
        """Read the saved state of an optimizer, and return a function that returns it."""
        if optimizer_shards(self.folder, index).is_dir():
            state = self.sharded_optimizer(index)
        else:
            state = compat.read_optimizer(self.folder, index, self.allow_pickle)
        return lambda: state

    def shared(self) -> dict[str, Any]:
        """Return the state that all ranks share."""
        return {**compat.read_shared(self.folder, self.run, self.allow_pickle), "progress": self.progress}

    def rank(self, rank: int, world_size: int, notes: list[str]) -> dict[str, Any]:
        """Return the random states and the positions of the loaders of one rank."""
        found = compat.read_rank(self.folder, rank, self.allow_pickle)
        if found is None:
            notes.append(f"no random states of rank {rank} were saved: its generators stay as they are")
            found = {"rng": None}
        loaders = [
            compat.read_loader(self.folder, index, self.allow_pickle, notes)
            for index in range(len(self.run.dataloaders))
        ]
        progress = {"accumulation_step": found.get("step", 0)}
        return {"rng": found["rng"], "progress": progress, "dataloaders": loaders}


# --- weights -------------------------------------------------------------------------------------------------------


class WeightsReader:
    """The saved state of one model."""

    def __init__(self, source: CheckpointReader, path: Path, index: int) -> None:
        self.source = source
        self.path = path
        self.extra = source.model_extra(index)
        self.differences = Differences()

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each entry; None for an entry that is not a tensor."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The full state, in host memory."""
        raise NotImplementedError

    def compare(self, index: int, part: PreparedModel, strict: bool) -> list[str]:
        """Notes on what differs from the model; with `strict` any difference is a CheckpointMismatch."""
        if part.saves_shards:
            from ..parallel.fsdp.state import is_fsdp1

            if is_fsdp1(part.module):
                return []  # its parameters are flattened: only its own loader knows their names
        saved = {**self.shapes(), **dict.fromkeys(self.extra)}
        self.differences = compare_model(index, part, saved, self.path, strict)
        return [f"model {index}: {self.differences}"] if self.differences else []

    def load(self, part: PreparedModel, strict: bool) -> None:
        """Load the weights into a model."""
        state = {**self.state(), **self.extra}
        for name in self.differences.shapes:
            state.pop(name, None)
        # What is missing or unexpected was judged before; tied names may be missing rightly.
        part.load_state_dict(state, strict if part.is_partial else False)


class SafetensorsWeights(WeightsReader):
    """A safetensors file."""

    def __init__(self, source: CheckpointReader, path: Path, index: int) -> None:
        super().__init__(source, path, index)
        try:
            self.header = read_header(path)
        except (CorruptFile, OSError) as error:
            raise CorruptCheckpoint(f"{path} is damaged: {reason(error)}") from error

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each entry, including aliases of tied weights."""
        found: dict[str, tuple[int, ...] | None] = {name: entry.shape for name, entry in self.header.entries.items()}
        found.update({alias: found[name] for alias, name in self.header.aliases.items() if name in found})
        return found

    def state(self) -> dict[str, Any]:
        """Read the full state into host memory."""
        with damage(self.path):
            return dict(read_tensors(self.source.io, self.path))

    def load(self, part: PreparedModel, strict: bool) -> None:
        """Load the weights, directly into the model's memory if possible."""
        if part.is_partial or self.extra or not _loads_plainly(part.state_template):
            super().load(part, strict)
            return
        saved = self.shapes()
        targets = {
            name: tensor
            for name, tensor in part.state_template.state_dict().items()
            if name in saved and name not in self.differences.shapes
        }
        with damage(self.path):
            read_into(self.source.io, self.path, targets)


class PickledWeights(WeightsReader):
    """A file of torch.save."""

    def __init__(self, source: CheckpointReader, path: Path, index: int) -> None:
        super().__init__(source, path, index)
        found = compat.load_pickled(path, source.allow_pickle)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise CorruptCheckpoint(f"{path} is not the state of a model")
        self._state = dict(found)

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each entry; None for an entry that is not a tensor."""
        return {
            name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
            for name, value in self._state.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the full state, which is in host memory."""
        return self._state


class ShardedWeights(WeightsReader):
    """A folder of shards, merged for an unsharded model."""

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the unsharded shape of each entry."""
        from .sharded import model_shapes

        return model_shapes(self.path)

    def state(self) -> dict[str, Any]:
        """Merge the shards in host memory."""
        from .sharded import read_model

        return read_model(self.path)


def _loads_plainly(module: torch.nn.Module) -> bool:
    """Whether loading a state into the module is nothing but copying into its tensors."""
    plain = torch.nn.Module
    for child in module.modules():
        kind = type(child)
        if (
            kind.load_state_dict is not plain.load_state_dict
            or kind._load_from_state_dict is not plain._load_from_state_dict
            or kind.set_extra_state is not plain.set_extra_state
            or child._load_state_dict_pre_hooks
            or child._load_state_dict_post_hooks
            or child._state_dict_hooks
        ):
            return False
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                return False
            if tensor is not None and tensor.device.type == "meta":
                return False
    return True
