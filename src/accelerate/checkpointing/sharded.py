# SPDX-License-Identifier: Apache-2.0
"""Sharded state: each rank writes and reads its own shards, through torch.distributed.checkpoint.

The shards are safetensors files. Other values are in a JSON document next to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
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
from ..core.constants import MODEL_NAME
from ..core.devices import kind_of
from ..core.errors import CheckpointError
from ..core.files import named_errors, read_regular, require_regular
from ..core.safetensors_header import read_header
from ..core.torch_files import READ_ERRORS
from ..parallel.fsdp.state import (
    drop_states,
    is_fsdp1,
    named_groups,
    optimizer_state,
    parameter_names,
    unwrapped,
)
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from .documents import TensorSink, damage, decode, encode
from .files import memory_of, only_tensors
from .layout import model_shards, optimizer_shards
from .matching import CheckpointMismatch, compare_names
from .ranks import error_text
from .run_state import StateDict

_OPTIONS = "options.json"
# the names of the files of shards: a part of them does not tell that there were more
FILES = "files.json"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedState:
    """The models and optimizers of a run that save shards: the `sharded` part of a `RunState`.

    Every rank calls every method.
    """

    def __init__(
        self, models: Sequence[PreparedModel], optimizers: Sequence[PreparedOptimizer] = ()
    ) -> None:
        self.update(models, optimizers)
        self._group: dist.ProcessGroup | None = None
        # copies of the last background save, used again
        self._host: dict[tuple[Path, str], torch.Tensor] = {}

    def update(
        self, models: Sequence[PreparedModel], optimizers: Sequence[PreparedOptimizer] = ()
    ) -> None:
        """Take the objects of the next save; the group of background saves stays.

        Raises CheckpointError for an optimizer whose parameters are in none of the models.
        """
        self.models: list[tuple[int, torch.nn.Module]] = [
            (index, prepared.inner) for index, prepared in enumerate(models)
        ]
        self.optimizers: list[tuple[int, torch.nn.Module, torch.optim.Optimizer]] = [
            (index, _model_of(index, one), one.inner) for index, one in enumerate(optimizers)
        ]
        # By model: a module whose state has the names and shapes of the entire model, where ranks hold different ones.
        templates = ((index, prepared.template) for index, prepared in enumerate(models))
        self.templates: dict[int, torch.nn.Module] = {
            index: template for index, template in templates if template is not None
        }

    def is_collective(self, in_background: bool) -> bool:
        """Whether `stage` communicates.

        FSDP1 gathers what a rank's slices belong to, pipelines the options; a mesh for copies of DTensors is made by
        all ranks.
        """
        models = [model for _, model in self.models]
        from_devices = in_background and any(
            p.device.type != "cpu" for model in models for p in model.parameters()
        )
        return bool(self.templates) or from_devices or any(map(is_fsdp1, models))

    def prepare_background(self) -> None:
        """Make the process group on which shards are written in the background."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def stage(
        self, blocking: bool = True, compat: bool = False
    ) -> Callable[[Path, BaseException | None], list[str]]:
        """Capture the current shards of this rank, and return a function that writes them to a folder.

        Its second argument is an error of this rank: then no rank writes. It returns the names of files whose
        checksums this rank is to compute.

        Args:
            blocking: if False, the shards are copied to host memory, and writing them uses the group that
                `prepare_background` makes.
            compat: write the API's format.
        """
        jobs: list[tuple[Path, dict[str, torch.Tensor], dict[str, object]]] = [
            (model_shards(Path(), index), self._model_state(model), {})
            for index, model in self.models
        ]
        for index, model, optimizer in self.optimizers:
            _check_by_tensor(optimizer)
            flat = optimizer_state(model, optimizer, FLAT)
            tensors = only_tensors(flat)
            rest: dict[str, object] = {
                name: value for name, value in flat.items() if name not in tensors
            }
            if self.templates:  # each rank has its own names
                everyone: list[dict[str, object]] = [{}] * dist.get_world_size()
                dist.all_gather_object(everyone, rest)
                rest = {name: value for part in everyone for name, value in part.items()}
            jobs.append((optimizer_shards(Path(), index), tensors, rest))
        if not blocking:
            jobs = [
                (
                    path,
                    {name: self._copy((path, name), value) for name, value in state.items()},
                    rest,
                )
                for path, state, rest in jobs
            ]
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def write(folder: Path, error: BaseException | None = None) -> list[str]:
            group = None if blocking else self._group
            try:
                for path, tensors, rest in jobs:
                    write_shards(folder / path, tensors, rest, group, compat, error)
            except PeerError:
                return []  # the rank that has failed reports it
            # Every rank has written its shards. Each one has a share of the checksums.
            if dist.is_initialized():
                rank, world = (dist.get_rank(), dist.get_world_size())
            else:
                rank, world = (0, 1)
            written = sorted(
                file for path, _, _ in jobs for file in (folder / path).rglob("*") if file.is_file()
            )
            share = [file for file in written if file.name not in (_OPTIONS, FILES)][rank::world]
            documents: dict[Path, object] = {
                folder / path / _OPTIONS: encode(dict(rest), TensorSink(inline=1 << 30), "options")
                for path, _, rest in jobs
                if rest and rank == 0
            }
            if rank == 0 and not compat:
                folders = [model_shards(folder, index) for index, _ in self.models]
                documents.update(
                    {
                        path / FILES: sorted(file.name for file in path.glob("*.safetensors"))
                        for path in folders
                    }
                )
            # Errors of torch's writer are raised on all ranks; those of this one alone must not come between.
            for path, document in documents.items():
                with named_errors(path):
                    path.write_text(json.dumps(document, allow_nan=False))
            share += documents
            return [file.relative_to(folder).as_posix() for file in share]

        return write

    def _copy(self, key: tuple[Path, str], value: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that is kept for the next one; a DTensor keeps its layout (its shard is copied)."""
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            local = value.to_local().detach()
        else:
            local = value.detach()
        place = self._host.get(key)
        if place is None or place.shape != local.shape or place.dtype != local.dtype:
            pin = local.device.type != "cpu" and kind_of(local.device).pin_memory
            place = self._host[key] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin)
        place.copy_(local, non_blocking=True)
        if not isinstance(value, DTensor):
            return place
        mesh = value.device_mesh
        if mesh.device_type != "cpu":
            mesh = dist.device_mesh.DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return DTensor.from_local(
            place, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    def check(self, folder: Path, strict: bool, models_only: bool = False) -> list[str]:
        """Notes on how the saved models differ from these; with `strict` a CheckpointMismatch. Reads no tensor."""
        notes = []
        for index, model in self.models:
            path = model_shards(folder, index)
            saved = model_shapes(path)
            template = self.templates.get(index)
            if template is None and is_fsdp1(model):
                # a rank does not see the shapes of what it has a slice of; `load` compares them
                continue
            if template is None:
                state = self._model_state(model)
            else:
                state = only_tensors(template.state_dict())
            found = compare_names(saved, state)
            if found and strict:
                raise CheckpointMismatch(
                    f"{path} does not fit model {index}: {found}. Nothing was loaded."
                )
            notes += [f"model {index}: {found}"] if found else []
        for index, model, optimizer in () if models_only else self.optimizers:
            path = optimizer_shards(folder, index)
            if not path.is_dir():
                raise CheckpointError(
                    f"{folder} holds no shards of optimizer {index}: {path.name} is missing"
                )
            read_options(path)
            shard_entries(path)
            if optimizer.state and not self.templates and not is_fsdp1(model):
                # Other optimizers have no tensors to compare with before `load`.
                _, tensors, _ = _optimizer_state(path, model, optimizer)
                match_shards(path, tensors, strict=True)
        return notes

    def load(self, folder: Path, strict: bool, models_only: bool = False) -> None:
        """Read the shards of this rank from what any number of ranks has written."""
        for index, model in self.models:
            weights: StateDict = self._model_state(model)
            read_shards(model_shards(folder, index), weights, strict)
            set_model_state_dict(model, weights, options=StateDictOptions(strict=strict))
        for index, model, optimizer in () if models_only else self.optimizers:
            load_optimizer(
                optimizer_shards(folder, index), model, optimizer, has_all=not self.templates
            )

    @staticmethod
    def _model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: unwrapped(value)
            for name, value in only_tensors(get_model_state_dict(model)).items()
        }


def _check_by_tensor(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            # What torch flattens.
            if not isinstance(value, (torch.Tensor, int, float, dict)):
                raise CheckpointError(
                    f"the state {name!r} of {type(optimizer).__name__} is a {type(value).__name__}, which cannot be "
                    "saved in shards: set state_dict_type=FULL_STATE_DICT"
                )


def _without_state(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> set[str]:
    """The plain names of an optimizer's parameters that the shards in a folder hold no state of."""
    known = parameter_names(model)
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {name for parameter in stepped for name in known.get(id(parameter), ())}
    if not (folder / _OPTIONS).exists() and not any(_shard_files(folder)):
        return set()  # no checkpoint: reading reports what is missing
    prefix = _prefix(folder)
    saved = [name.removeprefix(prefix) for name in shard_entries(folder)]
    saved += [name for name in read_options(folder) if name.startswith("state.")]
    return names - {_owner_of(name, names) for name in saved}


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
        for name, value in flat.items()
        if isinstance(value, torch.Tensor) and _owner_of(name, without) is None
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
    flat, tensors, without = _optimizer_state(path, model, optimizer)
    read_shards(path, tensors, strict)
    options = {name: value for name, value in read_options(path).items() if name in flat or has_all}
    state: StateDict = {**flat, **options, **tensors}
    groups = optimizer.param_groups
    # torch 2.13 cannot read a group without parameters, as that of the norms where only LoRA trains.
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    finally:
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]
    drop_states(model, optimizer, without)


def _load_nested(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, strict: bool
) -> None:
    """Read an optimizer's shards into one of an FSDP1 model.

    torch 2.13 does not load its own flattened form there: it takes the names of the entries from the state that this
    rank has, and a rank has none of a parameter whose slice is empty.
    """
    without = _without_state(path, model, optimizer)
    groups = named_groups(model, optimizer)
    places = [(f"param_groups.{group['params'][0]}", group) for group in groups if group["params"]]
    entries: StateDict = {}
    before = dict(optimizer.state)
    optimizer.state.clear()
    try:
        if not without.issuperset(name for group in groups for name in group["params"]):
            # torch makes a state of each parameter where there are no gradients; those of the checkpoint come later.
            optimizer.zero_grad()
            state: StateDict = dict(get_optimizer_state_dict(model, optimizer))
            entries = {
                name: values for name, values in state["state"].items() if name not in without
            }
            places += [(f"state.{name}", values) for name, values in entries.items()]
        tensors = {
            f"{name}.{key}": value
            for name, values in places
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        read_shards(path, tensors, strict)
        read = {**read_options(path), **tensors}
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    for name, values in places:
        values.update({key: read[f"{name}.{key}"] for key in values if f"{name}.{key}" in read})
    if entries:
        found: StateDict = {"state": entries, "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, found, options=StateDictOptions(strict=False))
        drop_states(model, optimizer, without)
        return
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _model_of(index: int, optimizer: PreparedOptimizer) -> torch.nn.Module:
    if optimizer.model is None:
        raise CheckpointError(
            f"optimizer {index} ({type(optimizer.inner).__qualname__}) steps parameters that are not those of one "
            "prepared model. Sharded state is saved by model: give each model its own optimizer."
        )
    return optimizer.model.inner


def write_shards(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    rest: Mapping[str, object],
    group: dist.ProcessGroup | None = None,
    compat: bool = False,
    error: BaseException | None = None,
) -> None:
    """Write this rank's shards of `tensors` (DTensors, or plain tensors that all ranks have) below `folder`.

    `compat`: in torch's own format and under the API's names, with `rest` in the same files. `error`: one of this
    rank, which ends the writing on all of them.
    torch's writer makes the folder, and raises an error of one rank on all of them.
    """
    state: dict[str, object] = dict(_each_its_own(tensors))
    if compat:
        state = {_api_prefix(folder).rstrip("."): {**state, **rest}}
        writer: dcp.StorageWriter = dcp.FileSystemWriter(str(folder))
    else:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with named_errors(folder):
        save_entries(state, writer, group, error)


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
        own = failed.failures.get(dist.get_rank() if distributed else 0)
        if own is not None:
            raise own[0] from None
        rows = (
            f"rank {rank}: {error_text(failure[0])}" for rank, failure in failed.failures.items()
        )
        raise PeerError("; ".join(rows)) from None


def _each_its_own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, contiguous, and tied ones as copies: torch's writer puts them into one file."""
    seen: set[tuple[object, ...]] = set()
    separate = {}
    for name, value in tensors.items():
        local = value.to_local() if hasattr(value, "to_local") else value
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
    if (folder / _OPTIONS).exists() and not any(_shard_files(folder)):
        return {}  # for an optimizer without tensors (plain SGD), torch's writer writes no file
    with shards_damage(folder):
        entries = _reader(folder).read_metadata().state_dict_metadata
        return {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def _shard_files(folder: Path) -> Iterator[Path]:
    return (
        path
        for path in folder.iterdir()
        if path.name == ".metadata" or path.suffix in (".safetensors", ".distcp")
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
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((failure[0] for failure in failures), error)
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
    prefix = _prefix(folder)
    saved = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in shard_entries(folder).items()
    }
    missing = [name for name in tensors if name not in saved]
    other = [
        name
        for name, value in tensors.items()
        if name in saved and saved[name] != tuple(value.shape)
    ]
    if strict and (missing or other):
        shapes = [
            f"{name} (saved {list(saved[name])}, here {list(tensors[name].shape)})"
            for name in other
        ]
        raise CheckpointError(
            f"{folder} does not fit: missing {missing}; of another shape {shapes}"
        )
    return {
        f"{prefix}{name}": value
        for name, value in tensors.items()
        if name in saved and name not in other
    }


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


def model_shapes(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """Return the unsharded shape of each entry of a saved model."""
    prefix = _prefix(folder)
    return {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in shard_entries(folder).items()
    }


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
    values: dict[str, object] = {**read_options(folder), **read_unsharded(folder)}
    if groups is None:
        names = {
            id(parameter): name
            for module in modules
            for name, parameter in module.named_parameters()
        }
        groups = [
            [names[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
    by_name: dict[str, dict[str, object]] = {}
    options: dict[str, dict[str, object]] = {}
    known = sorted((name for group in groups for name in group), key=len, reverse=True)
    for key, value in values.items():
        kind, _, rest = key.partition(".")
        owner = next((name for name in known if rest.startswith(f"{name}.")), None)
        if owner is None:
            raise CheckpointError(
                f"{folder} holds {key}, which belongs to no parameter of the prepared models"
            )
        (by_name if kind == "state" else options).setdefault(owner, {})[rest[len(owner) + 1 :]] = (
            value
        )
    state, found, position = {}, [], 0
    for group, members in zip(optimizer.param_groups, map(list, groups), strict=True):
        saved = next((options[name] for name in members if name in options), {})
        positions = list(range(position, position + len(members)))
        found.append(
            {**{k: v for k, v in group.items() if k != "params"}, **saved, "params": positions}
        )
        state.update(
            {
                at: by_name[name]
                for at, name in zip(positions, members, strict=True)
                if name in by_name
            }
        )
        position += len(members)
    return {"state": state, "param_groups": found}
