# SPDX-License-Identifier: Apache-2.0
"""Sharded state: each rank writes and reads its own shards, through torch.distributed.checkpoint.

The shards are safetensors files. Other values are in a JSON document next to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..core import json_text
from ..core.bucket_path import BucketPath
from ..core.constants import MODEL_NAME
from ..core.devices import kind_of
from ..core.errors import CheckpointError
from ..core.files import named_errors, read_regular, require_regular
from ..core.tensor_files import READ_ERRORS, read_header
from ..parallel.fsdp.state import (
    drop_states,
    is_fsdp1,
    named_groups,
    optimizer_state,
    parameter_names,
    unwrapped,
)
from ..parallel.matrices import laid_out
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..runtime.agreement import error_text
from ..torch_internals.optimizer_step import without_empty_groups
from .documents import TensorSink, damage, decode, encode
from .files import FileRecord, memory_of, only_tensors
from .layout import INDEX, CheckpointMismatch, model_shards, optimizer_shards
from .pending import WriteShards
from .run_state import StateDict
from .source import compare_names

_OPTIONS = "options.json"
# the names of the files of shards: a part of them does not tell that there were more
FILES = "files.json"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclasses.dataclass
class _Shards:
    """What this rank writes to one folder of shards.

    Fields:
        folder: relative to the checkpoint.
        tensors: DTensors, or plain tensors that all ranks have.
        options: what an optimizer has besides tensors.
        index: where each shard is in a bucket, on rank 0.
    """

    folder: Path
    tensors: dict[str, torch.Tensor]
    options: dict[str, object]
    index: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


class ShardedState:
    """The models and optimizers of a run that save shards: the `sharded` part of a `RunState`.

    Every rank calls every method.
    """

    def __init__(
        self, models: Sequence[PreparedModel], optimizers: Sequence[PreparedOptimizer] = ()
    ) -> None:
        self.update(models, optimizers)
        self._group: dist.ProcessGroup | None = None
        self._is_separate = False
        # copies of the last background save, used again
        self._copies: dict[tuple[Path, str], torch.Tensor] = {}

    def update(
        self, models: Sequence[PreparedModel], optimizers: Sequence[PreparedOptimizer] = ()
    ) -> None:
        """Take the objects of the next save; the group of background saves stays.

        Raises CheckpointError for an optimizer whose parameters are in none of the models.
        """
        self.models: list[torch.nn.Module] = [prepared.inner for prepared in models]
        # By model: a module whose state has the names and shapes of the entire model, where ranks hold different ones.
        self.templates: dict[int, torch.nn.Module] = {}
        for index, prepared in enumerate(models):
            if prepared.template is not None:
                self.templates[index] = prepared.template
        self.optimizers: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
        for index, optimizer in enumerate(optimizers):
            if optimizer.model is None:
                raise CheckpointError(
                    f"optimizer {index} ({type(optimizer.inner).__qualname__}) steps parameters "
                    "of more than one prepared model. Sharded state is saved by model: give each "
                    "model its own optimizer."
                )
            self.optimizers.append((optimizer.model.inner, optimizer.inner))

    def is_collective(self, in_background: bool) -> bool:
        """Whether `stage` communicates.

        FSDP1 gathers what a rank's slices belong to, pipelines the options; a mesh for copies of DTensors is made by
        all ranks.
        """
        if self.templates or any(map(is_fsdp1, self.models)):
            return True
        parameters = itertools.chain.from_iterable(model.parameters() for model in self.models)
        return in_background and any(parameter.device.type != "cpu" for parameter in parameters)

    def prepare_background(self) -> None:
        """Make the process group on which shards are written in the background."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def separate(self) -> None:
        """Write on a group that nothing else uses, also in a save that blocks."""
        self.prepare_background()
        self._is_separate = True

    def stage(self, blocking: bool = True, compat: bool = False) -> WriteShards:
        """Capture the current shards of this rank, and return a function that writes them to a folder.

        Its second argument is an error of this rank: then no rank writes. It returns the records of the files that
        this rank has written to a bucket, and the names of other files whose checksums this rank is to compute.

        Args:
            blocking: if False, the shards are copied to host memory, and writing them uses the group that
                `prepare_background` makes.
            compat: write the API's format.
        """
        staged = []
        for index, model in enumerate(self.models):
            shards_folder = model_shards(Path(), index)
            staged.append(_Shards(shards_folder, _model_state(model), {}))
        for index, (model, optimizer) in enumerate(self.optimizers):
            shards_folder = optimizer_shards(Path(), index)
            with laid_out(optimizer):
                tensors, options = self._state_of(model, optimizer)
            staged.append(_Shards(shards_folder, tensors, options))
        if not blocking:
            for shards in staged:
                for name, value in shards.tensors.items():
                    shards.tensors[name] = self._copy((shards.folder, name), value)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def write(
            folder: Path, error: BaseException | None = None
        ) -> tuple[dict[str, FileRecord], list[str]]:
            group = None
            if not blocking or self._is_separate:
                group = self._group
            records: dict[str, FileRecord] = {}
            try:
                for shards in staged:
                    records.update(_write_shards(folder, shards, group, compat, error))
            except PeerError:
                return {}, []  # the rank that has failed reports it
            return records, _finish_shards(folder, staged, compat)

        return write

    def _state_of(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """The flat state of an optimizer: its tensors, and the other values."""
        # What torch flattens.
        flattened = (torch.Tensor, int, float, dict)
        for state in optimizer.state.values():
            for name, value in state.items():
                if not isinstance(value, flattened):
                    raise CheckpointError(
                        f"the state {name!r} of {type(optimizer).__name__} is a {type(value).__name__}, which cannot "
                        "be saved in shards: set state_dict_type=FULL_STATE_DICT"
                    )
        flat = optimizer_state(model, optimizer, FLAT)
        tensors = only_tensors(flat)
        options: dict[str, object] = {
            name: value for name, value in flat.items() if name not in tensors
        }
        if self.templates:  # each rank has its own names
            everyone: list[dict[str, object]] = [{}] * dist.get_world_size()
            dist.all_gather_object(everyone, options)
            for part in everyone:
                options.update(part)
        return tensors, options

    def _copy(self, key: tuple[Path, str], value: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that is kept for the next one; a DTensor keeps its layout (its shard is copied)."""
        from torch.distributed.tensor import DTensor

        local = value.detach()
        if isinstance(value, DTensor):
            local = value.to_local().detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
            pin = local.device.type != "cpu" and kind_of(local.device).pin_memory
            copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin)
            self._copies[key] = copy
        copy.copy_(local, non_blocking=True)
        if not isinstance(value, DTensor):
            return copy
        mesh = value.device_mesh
        if mesh.device_type != "cpu":
            mesh = dist.device_mesh.DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return DTensor.from_local(
            copy,
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    def check(self, folder: Path, strict: bool, models_only: bool = False) -> list[str]:
        """Notes on how the saved models differ from these; with `strict` a CheckpointMismatch. Reads no tensor."""
        notes = []
        for index, model in enumerate(self.models):
            path = model_shards(folder, index)
            saved = shard_shapes(path)
            if index in self.templates:
                state = only_tensors(self.templates[index].state_dict())
            elif is_fsdp1(model):
                # a rank does not see the shapes of what it has a slice of; `load` compares them
                continue
            else:
                state = _model_state(model)
            differences = compare_names(saved, state)
            if differences and strict:
                raise CheckpointMismatch(
                    f"{path} does not fit model {index}: {differences}. Nothing was loaded."
                )
            if differences:
                notes.append(f"model {index}: {differences}")
            if index not in self.templates:
                _fetch(path, state)
        if models_only:
            return notes
        for index, (model, optimizer) in enumerate(self.optimizers):
            path = optimizer_shards(folder, index)
            if not path.is_dir():
                raise CheckpointError(
                    f"{folder} does not hold the shards of optimizer {index}: {path.name} is "
                    "missing"
                )
            read_options(path)
            entries = shard_entries(path)
            if not self.templates and not is_fsdp1(model):
                _fetch(path, _like_parameters(entries, model))
            with laid_out(optimizer):
                if optimizer.state and not self.templates and not is_fsdp1(model):
                    # Other optimizers have no tensors to compare with before `load`.
                    _, tensors, _ = _optimizer_state(path, model, optimizer)
                    match_shards(path, tensors, strict=True)
        return notes

    def load(self, folder: Path, strict: bool, models_only: bool = False) -> None:
        """Read the shards of this rank from what any number of ranks has written."""
        for index, model in enumerate(self.models):
            weights: StateDict = _model_state(model)
            read_shards(model_shards(folder, index), weights, strict)
            set_model_state_dict(model, weights, options=StateDictOptions(strict=strict))
        if models_only:
            return
        for index, (model, optimizer) in enumerate(self.optimizers):
            path = optimizer_shards(folder, index)
            load_optimizer(path, model, optimizer, has_all=not self.templates)


def _fetch(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read from a bucket what a load is going to read for these tensors, and check it, before anything changes."""
    if not isinstance(folder, BucketPath) or not tensors:
        return
    from .bucket_shards import ShardReader

    reader = ShardReader(folder)
    with shards_damage(folder):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        fitting = match_shards(folder, tensors, strict=False)
        reader.fetch(create_default_local_load_plan(dict(fitting), metadata).items)


def _like_parameters(
    entries: Mapping[str, TensorStorageMetadata], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Tensors with the layout of those of an optimizer's state, which it may not have yet."""
    state = _model_state(model)
    tensors = {}
    for name, entry in entries.items():
        parameter = state.get(_owner_of(name, state) or "")
        if parameter is not None and parameter.shape == entry.size:
            tensors[name] = parameter
        else:
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return tensors


def _model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = only_tensors(get_model_state_dict(model))
    return {name: unwrapped(value) for name, value in state.items()}


# --- optimizers ----------------------------------------------------------------------------------------------------


def _without_state(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> set[str]:
    """The plain names of an optimizer's parameters that the shards in a folder hold no state of."""
    if not (folder / _OPTIONS).exists() and not _has_shards(folder):
        return set()  # no checkpoint: reading reports what is missing
    names_by_id = parameter_names(model)
    names: set[str] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.update(names_by_id.get(id(parameter), ()))
    saved = set()
    for name in (*shard_shapes(folder), *read_options(folder)):
        if not name.startswith("param_groups."):
            saved.add(_owner_of(name, names))
    return names.difference(saved)


def _optimizer_state(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, object], dict[str, torch.Tensor], set[str]]:
    """(flat state, its tensors to read from a folder, names of parameters that the folder has no state of).

    An optimizer that has not stepped yet gets its tensors here, so that there is memory to read to.
    """
    flat: dict[str, object] = dict(get_optimizer_state_dict(model, optimizer, options=FLAT))
    without = _without_state(folder, model, optimizer)
    tensors = {
        name: value
        for name, value in only_tensors(flat).items()
        if _owner_of(name, without) is None
    }
    return flat, tensors, without


def _owner_of(entry: str, names: Collection[str]) -> str | None:
    """The parameter whose state an entry of the flat form is; None where it is none of these."""
    owner = entry.removeprefix("state.")
    while owner and owner not in names:
        owner = owner.rpartition(".")[0]
    return owner or None


def load_optimizer(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strict: bool = True,
    has_all: bool = True,
) -> None:
    """Read an optimizer's shards; `has_all`: this rank has all parameters of the model, not those of some stages."""
    if is_fsdp1(model):
        _load_nested(path, model, optimizer, strict)
        return
    with laid_out(optimizer):
        flat, tensors, without = _optimizer_state(path, model, optimizer)
        read_shards(path, tensors, strict)
        state: StateDict = flat
        for name, value in read_options(path).items():
            if has_all or name in flat:
                state[name] = value
        state.update(tensors)
        with without_empty_groups(optimizer):
            set_optimizer_state_dict(model, optimizer, state, options=FLAT)
        drop_states(model, optimizer, without)


def _load_nested(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, strict: bool
) -> None:
    """Read an optimizer's shards into one of an FSDP1 model.

    torch takes the names of the flattened form from the state that a rank has, and a rank has none of a parameter
    whose slice is empty: the nested form is loaded.
    """
    without = _without_state(path, model, optimizer)
    groups = named_groups(model, optimizer)
    # By the beginning of their names in the flat form: the values that are read.
    targets: dict[str, dict[str, Any]] = {
        f"param_groups.{group['params'][0]}": group for group in groups if group["params"]
    }
    states: StateDict = {}
    before = dict(optimizer.state)
    optimizer.state.clear()
    try:
        names = itertools.chain.from_iterable(group["params"] for group in groups)
        if not without.issuperset(names):
            # torch makes a state of each parameter where there are no gradients; those of the checkpoint come later.
            optimizer.zero_grad()
            nested: StateDict = dict(get_optimizer_state_dict(model, optimizer))
            for name, values in nested["state"].items():
                if name not in without:
                    states[name] = values
                    targets[f"state.{name}"] = values
        tensors: dict[str, torch.Tensor] = {}
        for name, values in targets.items():
            tensors.update({f"{name}.{key}": v for key, v in only_tensors(values).items()})
        read_shards(path, tensors, strict)
        saved = {**read_options(path), **tensors}
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    for name, values in targets.items():
        for key in values:
            values[key] = saved.get(f"{name}.{key}", values[key])
    if states:
        loaded: StateDict = {"state": states, "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(strict=False))
        drop_states(model, optimizer, without)
        return
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


# --- writing -------------------------------------------------------------------------------------------------------


def _write_shards(
    checkpoint: Path,
    shards: _Shards,
    group: dist.ProcessGroup | None,
    compat: bool,
    error: BaseException | None,
) -> dict[str, FileRecord]:
    """Write the shards of this rank. torch's writer makes the folder, and raises an error of one rank on all of them.

    Returns the records of what was written to a bucket.

    `compat`: in torch's own format and under the API's names, with the options in the same files. `error`: one of this
    rank, which ends the writing on all of them.
    """
    folder = checkpoint / shards.folder
    state: dict[str, object] = dict(_each_its_own(shards.tensors))
    writer: dcp.StorageWriter
    if isinstance(folder, BucketPath):
        if compat and error is None:
            error = CheckpointError(
                "layout='compat': shards in torch's own format can be saved only to a local "
                "folder. Use layout='native'"
            )
        from .bucket_shards import ShardWriter

        shard_writer = ShardWriter(folder)
        save_entries(state, shard_writer, group, error)
        shards.index = shard_writer.index
        return {f"{shards.folder}/{name}": record for name, record in shard_writer.records.items()}
    if compat:
        state = {_api_prefix(folder).rstrip("."): {**state, **shards.options}}
        writer = dcp.FileSystemWriter(str(folder))
    else:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with named_errors(folder):
        save_entries(state, writer, group, error)
    return {}


def _finish_shards(checkpoint: Path, staged: Sequence[_Shards], compat: bool) -> list[str]:
    """After every rank has written its shards: rank 0 writes the documents next to them.

    Returns the names of the files whose checksums this rank computes.
    """
    rank = 0
    world_size = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    written: list[Path] = []
    for shards in staged if not isinstance(checkpoint, BucketPath) else ():
        for path in (checkpoint / shards.folder).rglob("*"):
            if path.is_file() and path.name not in (_OPTIONS, FILES):
                written.append(path)
    paths = sorted(written)[rank::world_size]
    documents: dict[Path, object] = {}
    if rank == 0:
        for shards in staged:
            folder = checkpoint / shards.folder
            if shards.index:
                documents[folder / INDEX] = shards.index
            if shards.options:
                options = encode(shards.options, TensorSink(inline=1 << 30), "options")
                documents[folder / _OPTIONS] = options
            is_model = folder.name.startswith(MODEL_NAME)
            if is_model and not compat:
                names = [path.name for path in folder.glob("*.safetensors")]
                documents[folder / FILES] = sorted(shards.index or names)
    # Errors of torch's writer are raised on all ranks; those of this one alone must not come between.
    for path, document in documents.items():
        with named_errors(path):
            path.write_text(json.dumps(document, allow_nan=False))
    paths += documents
    return [path.relative_to(checkpoint).as_posix() for path in paths]


class _Planner(dcp.DefaultSavePlanner):
    """Writes plain tensors of the lowest rank that has them: buffers, as of batch norm, differ between ranks.

    Args:
        error: of this rank, which has failed before. torch raises it on all ranks, which wait for its plan.
    """

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error

    def create_local_plan(self) -> SavePlan:
        if self.error is not None:
            raise self.error
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        written: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [
                item
                for item in plan.items
                if item.type is WriteItemType.SHARD or item.index not in written
            ]
            written.update(item.index for item in items)
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)


class PeerError(CheckpointError):
    """Other ranks could not write their shards. No rank has written all of its shards."""


def save_entries(
    state: dict[str, object],
    writer: dcp.StorageWriter,
    group: dist.ProcessGroup | None = None,
    error: BaseException | None = None,
) -> None:
    """Write entries with torch's writer. Every rank calls it, also one with an `error`, which ends it on all.

    Raises PeerError where only other ranks have failed. A rank that has failed raises its own error.
    """
    distributed = dist.is_initialized()
    try:
        dcp.save(
            state,
            storage_writer=writer,
            planner=_Planner(error),
            process_group=group,
            no_dist=not distributed,
        )
    except CheckpointException as failed:
        # torch raises the errors of all ranks on all of them, as a BaseException whose text is their tracebacks.
        errors = {rank: failure[0] for rank, failure in failed.failures.items()}
        rank = dist.get_rank() if distributed else 0
        if rank in errors:
            raise errors[rank] from None
        rows = [f"rank {peer}: {error_text(peer_error)}" for peer, peer_error in errors.items()]
        raise PeerError("; ".join(rows)) from None


def _each_its_own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, contiguous, and tied ones as copies: torch's writer puts them into one file."""
    seen: set[tuple[object, ...]] = set()
    separate = {}
    for name, value in tensors.items():
        local: Any = value
        if hasattr(local, "to_local"):
            local = local.to_local()
        memory = memory_of(local)
        if local.numel() and memory in seen:
            separate[name] = value.detach().clone()
        else:
            separate[name] = value.detach().contiguous()
        seen.add(memory)
    return separate


def read_options(folder: Path) -> dict[str, object]:
    """What was saved of an optimizer besides tensors: its groups' options, by the flat names."""
    path = folder / _OPTIONS
    if path.exists():
        with damage(path):
            options: dict[str, object] = decode(
                json_text.parse(read_regular(path, json_text.LIMIT)), {}, str(path)
            )
            return options
    if any(folder.glob("*.safetensors")) or not folder.is_dir():
        return {}
    from .torch_shards import PlainPlanner  # for folders of that format only

    prefix = _prefix(folder)
    with shards_damage(folder):
        entries = _reader(folder).read_metadata().state_dict_metadata
        plain = dict.fromkeys(
            name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)
        )
        load_entries(plain, folder, PlainPlanner(folder))
    return {name.removeprefix(prefix): value for name, value in plain.items()}


def _reader(folder: Path) -> dcp.StorageReader:
    if isinstance(folder, BucketPath):
        from .bucket_shards import ShardReader

        return ShardReader(folder)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with damage(path):
            read_header(path)
    for path in folder.glob("*.distcp"):
        with damage(path):
            require_regular(path)
    if files:
        return dcp.HuggingFaceStorageReader(str(folder))
    from .torch_shards import PlainReader  # for folders of that format only

    return PlainReader(folder)


def shard_entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    """{name: what is known of it} of all tensors whose shards lie in a folder, with the names that the folder uses."""
    if (folder / _OPTIONS).exists() and not _has_shards(folder):
        return {}  # for an optimizer without tensors (plain SGD), torch's writer writes no file
    with shards_damage(folder):
        entries = _reader(folder).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }


def _has_shards(folder: Path) -> bool:
    return any(
        path.name == ".metadata" or path.suffix in (".safetensors", ".distcp")
        for path in folder.iterdir()
    )


@contextlib.contextmanager
def shards_damage(folder: Path) -> Iterator[None]:
    """Convert errors from reading damaged shards to a CheckpointError that names their folder."""
    try:
        yield
    except CheckpointError:
        raise
    # torch collects the errors of its readers in a CheckpointException, which derives from BaseException.
    except (CheckpointException, SafetensorError, *READ_ERRORS) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(
            f"the shards in {folder} cannot be read: {str(cause)[:500] or repr(cause)}"
        ) from error


def read_shards(folder: Path, tensors: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Fill `tensors` (DTensors or plain ones) in place from shards of any layout.

    Raises CheckpointError that lists what is missing or of another shape; without `strict` those are left as they are.
    """
    wanted = match_shards(folder, tensors, strict)
    if wanted:
        load_entries(wanted, folder)


def match_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], strict: bool
) -> dict[str, torch.Tensor]:
    """The tensors that can be read from the shards in a folder, under its names. Raises as `read_shards` does."""
    if not tensors:
        return {}  # plain SGD has no tensors, and torch's writer leaves no file of shards
    saved = shard_shapes(folder)
    prefix = _prefix(folder)
    missing = []
    reshaped = []
    fitting = {}
    for name, tensor in tensors.items():
        if name not in saved:
            missing.append(name)
        elif saved[name] != tuple(tensor.shape):
            reshaped.append(f"{name} (saved {list(saved[name])}, here {list(tensor.shape)})")
        else:
            fitting[f"{prefix}{name}"] = tensor
    if strict and (missing or reshaped):
        raise CheckpointError(
            f"{folder} does not fit: missing {missing}; with a different shape {reshaped}"
        )
    return fitting


def load_entries(wanted: StateDict, folder: Path, planner: dcp.LoadPlanner | None = None) -> None:
    """Fill `wanted` in place, by the names that the folder uses. All of them must be there."""
    with warnings.catch_warnings(), shards_damage(folder):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=_reader(folder), planner=planner, no_dist=True)


def _prefix(folder: Path) -> str:
    """The API's own shards name everything below `model.` or `optimizer.`; ours do not."""
    if any(folder.glob("*.safetensors")):
        return ""
    return _api_prefix(folder)


def _api_prefix(folder: Path) -> str:
    if folder.name.startswith(MODEL_NAME):
        return "model."
    return "optimizer."


def read_unsharded(folder: Path) -> dict[str, torch.Tensor]:
    """Merge all tensors in a folder of shards in host memory."""
    entries = shard_entries(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    load_entries(tensors, folder)
    prefix = _prefix(folder)
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


def shard_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The unsharded shape of each tensor in a folder of shards, without the prefix of the API's names."""
    prefix = _prefix(folder)
    entries = shard_entries(folder)
    return {name.removeprefix(prefix): tuple(entry.size) for name, entry in entries.items()}


def read_optimizer(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    modules: Iterable[torch.nn.Module],
    groups: Sequence[Iterable[str]] | None = None,
) -> StateDict:
    """The unsharded state of an optimizer, in the form that `optimizer.load_state_dict` takes.

    Shards know parameters by name; `modules` are the models in which `optimizer` finds them, or `groups` has the names
    of each of its groups.
    """
    if groups is None:
        names_by_id: dict[int, str] = {}
        for module in modules:
            names_by_id.update({id(tensor): name for name, tensor in module.named_parameters()})
        groups = []
        for group in optimizer.param_groups:
            groups.append([names_by_id[id(parameter)] for parameter in group["params"]])
    names = [list(group) for group in groups]
    # What the shards have of a parameter: its state, and the options of its group.
    states: dict[str, dict[str, object]] = {name: {} for name in itertools.chain(*names)}
    options: dict[str, dict[str, object]] = {name: {} for name in states}
    values: dict[str, object] = {**read_options(folder), **read_unsharded(folder)}
    for key, value in values.items():
        kind, _, entry = key.partition(".")
        owner = _owner_of(f"state.{entry}", states)
        if owner is None:
            raise CheckpointError(
                f"{folder} holds {key}, which does not belong to any parameter of the prepared "
                "models"
            )
        name = entry.removeprefix(f"{owner}.")
        if kind == "state":
            states[owner][name] = value
        else:
            options[owner][name] = value
    state: dict[int, dict[str, object]] = {}
    param_groups = []
    numbers = itertools.count()
    for group, members in zip(optimizer.param_groups, names, strict=True):
        merged = {**group, "params": []}
        for name in members:
            number = next(numbers)
            merged["params"].append(number)
            if states[name]:
                state[number] = states[name]
        for name in reversed(members):
            merged.update(options[name])
        param_groups.append(merged)
    return {"state": state, "param_groups": param_groups}
