# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft in checkpoints: the files that peft reads, and the checksums of the base in the manifest."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import CheckpointError
from ..core.files import atomic_write, follow_links, user_path
from ..core.json_text import JSONObject
from ..core.tensor_files import write_atomically
from ..core.trees import leaves, replace_leaves
from ..parallel.adapters import (
    CONFIG_FILE,
    PICKLED_FILE,
    WEIGHTS_FILE,
    AdapterNames,
    adapter_folder,
    adapter_names,
    base_name,
    config_text,
)
from ..parallel.materialize import from_first, named_parameters, named_tensors
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..parallel.sharded import ShardedModel
from ..parallel.unwrap import is_peft_model
from ..state import PartialState
from ..torch_internals.tensor_memory import version_of
from .checksums import checksums, differing
from .files import Segment, host_view, segments
from .gathering import PlacesByRank, gather_on_host
from .layout import CheckpointMismatch, numbered
from .run_state import RunState, state_template
from .source import CheckpointReader, ModelWeights, weights_file
from .weights import is_writer


@dataclass
class AdapterLayout:
    """What is known of a prepared model's adapters.

    Fields:
        trained: {name: whether it trains} of all parameters when `names` were found.
        names: the tensors of the adapters; None where the model cannot be saved as adapters.
        base: the checksums of all other parameters, which are frozen; empty until they are needed.
        versions: of these parameters when `base` was computed, which tell whether they were written since.
        places: where the shards of the adapters and of their optimizer's state belong.
    """

    trained: dict[str, bool]
    names: AdapterNames | None
    base: dict[str, str] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    places: PlacesByRank = field(default_factory=dict)


class AdapterModel(PreparedModel):
    """The adapters of a prepared model of peft, as what a checkpoint has of it. The base is known by its checksums."""

    def __init__(self, prepared: PreparedModel, layout: AdapterLayout, names: AdapterNames) -> None:
        super().__init__(prepared.module, prepared.precision)
        self.prepared = prepared
        self.layout = layout
        self.names = names
        self.is_partial: bool = prepared.is_partial
        self.device: torch.device | None = None
        if prepared.is_partial:
            self.device = getattr(prepared, "device", None)

    @classmethod
    def of(cls, prepared: PreparedModel, known: AdapterLayout | None) -> AdapterModel | None:
        """The adapters of a model; None where a checkpoint has to have the entire model.

        Args:
            prepared: a prepared model.
            known: of an earlier call for it.
        """
        is_gathered = prepared.is_partial and not isinstance(prepared, ShardedModel)
        if prepared.template is not None or is_gathered:
            return None  # pipelines, DeepSpeed, FSDP1
        if not is_peft_model(prepared.module):
            return None
        trained = {
            name: parameter.requires_grad for name, parameter in named_parameters(prepared.inner)
        }
        if known is None or known.trained != trained:
            known = AdapterLayout(trained, adapter_names(prepared.module))
        if known.names is None:
            return None
        return cls(prepared, known, known.names)

    @property
    def inner(self) -> nn.Module:
        """The module inside the wrappers of the layout."""
        return self.prepared.inner

    @property
    def hooked(self) -> nn.Module:
        """The model that hooks get."""
        return self.prepared.hooked

    @property
    def base(self) -> Mapping[str, str]:
        """The checksums of the frozen parameters that no adapter has."""
        return self.layout.base

    @functools.cached_property
    def _frozen(self) -> dict[str, torch.Tensor]:
        """The parameters of the base by their names in it."""
        adapter: set[str] = set()
        for entries in self.names.values():
            adapter.update(entries.values())

        def is_replaced(name: str) -> bool:
            """Whether every adapter trains another module (of `modules_to_save`) instead of this one."""
            for other in self.names:
                replaced = name.replace(".original_module.", f".modules_to_save.{other}.")
                if replaced not in adapter:
                    return False
            return True

        frozen: dict[str, torch.Tensor] = {}
        for name, parameter in named_parameters(self.inner):
            is_base = name not in adapter and not is_replaced(name)
            if is_base or name.split(".")[-2] == "base_layer":
                frozen[base_name(name)] = parameter
        return frozen

    def _compute_base(self) -> None:
        """Compute the checksums of the base, for which ranks communicate. Each rank reads its shards."""
        self.layout.versions = [version_of(parameter) for parameter in self._frozen.values()]
        self.layout.base = checksums(self._frozen, self.device)

    def _check_base(self) -> None:
        """Compute the checksums again where a rank has written its parameters since."""
        versions = [version_of(parameter) for parameter in self._frozen.values()]
        is_written = versions != self.layout.versions
        if self.device is not None:
            written = torch.tensor(int(is_written), device=self.device)
            dist.all_reduce(written, dist.ReduceOp.MAX)
            is_written = bool(written)
        if is_written or not self.layout.base:
            self._compute_base()

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the adapters by their names in the model, with the shapes of the plain model."""
        self.prepared.reshard()
        tensors = dict(named_tensors(self.inner, remove_duplicate=False))
        adapters = {}
        for entries in self.names.values():
            for name in entries.values():
                adapters[name] = tensors[name]
        return adapters

    def before_load(self) -> None:
        """Compute the checksums of the base, which may have been written in a way that versions do not show."""
        self.prepared.reshard()
        self._compute_base()

    def checkpoint_state_dict(self) -> dict[str, Any]:
        """The adapters under the names of the model: if `is_partial`, on the host of rank 0, empty on other ranks.

        Raises:
            CheckpointError: on every rank, for a tensor that does not have what the ranks have trained.
        """
        self.prepared.reshard()
        self._check_base()
        with torch.inference_mode(False), torch.no_grad():
            tensors = self.tensors
            if self.device is None:
                return dict(tensors)
            trained = checksums(tensors, self.device)
            joined = gather_on_host(tensors, self.device, self.layout.places)
            wrong = [name for name, text in checksums(joined).items() if text != trained[name]]
            wrong = from_first(wrong, self.device)
            if wrong:
                raise CheckpointError(
                    f"the adapter was not saved: {', '.join(wrong[:5])} as collected on rank 0 "
                    "differs from what the ranks have trained"
                )
        return joined

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take the adapters' tensors, by their names in the model. Every rank calls it."""
        self.prepared.load_state_dict(state, strict=False)

    def prepared_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        """An optimizer that trains the adapters."""
        if self.device is None:
            return PreparedOptimizer(optimizer, self)
        return AdapterOptimizer(optimizer, self)


class AdapterOptimizer(PreparedOptimizer):
    """An optimizer of sharded adapters."""

    model: AdapterModel

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's full state: on the host of rank 0, empty on other ranks."""
        device = self.model.device
        assert device is not None
        self.model.prepared.reshard()
        state = self.inner.state_dict()
        tensors = {str(n): tensor for n, tensor in enumerate(leaves(state))}
        joined = gather_on_host(tensors, device, self.model.layout.places)
        if dist.get_rank() != 0:
            return {}
        ordered = [joined[name] for name in tensors]
        gathered: dict[str, Any] = replace_leaves(state, ordered)
        return gathered

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a full state, which only rank 0 needs to have; every rank calls it."""
        self.model.prepared.prepared_optimizer(self.optimizer).load_state_dict(state)


def with_adapters(
    run: RunState, known: MutableMapping[PreparedModel, AdapterLayout]
) -> RunState | None:
    """The run with the adapters of peft models whose base is frozen, instead of these models; None without any.

    Args:
        run: the run with entire models.
        known: what earlier calls have found out of each model.
    """
    parts: list[PreparedModel] = []
    adapters: dict[PreparedModel | None, AdapterModel] = {}
    for model in run.models:
        part = AdapterModel.of(model, known.get(model))
        parts.append(part or model)
        if part is not None:
            adapters[model] = part
            known[model] = part.layout
    if not adapters or any(part.saves_shards for part in parts):
        return None
    optimizers = []
    for trained in run.optimizers:
        owner = adapters.get(trained.model)
        if owner is not None:
            trained = owner.prepared_optimizer(trained.optimizer)
        optimizers.append(trained)
    return replace(run, models=parts, optimizers=optimizers, sharded=None, entire=run)


def adapters_folder(index: int) -> str:
    """The folder of a model's adapters in a checkpoint, from which `PeftModel.from_pretrained` reads."""
    return numbered("adapter", index, "")


def adapter_files(
    part: AdapterModel, state: Mapping[str, torch.Tensor], safe: bool, below: str = ""
) -> tuple[dict[str, list[Segment]], dict[str, object]]:
    """The files of a model's adapters below a folder: ({name: segments}, {name: value for torch.save})."""
    files: dict[str, list[Segment]] = {}
    pickled: dict[str, object] = {}
    for adapter, names in part.names.items():
        folder = f"{below}{adapter_folder(adapter)}"
        files[f"{folder}{CONFIG_FILE}"] = [config_text(part.module, adapter)]
        tensors = {key: state[name] for key, name in names.items()}
        if safe:
            files[f"{folder}{WEIGHTS_FILE}"] = segments(tensors)
        else:
            pickled[f"{folder}{PICKLED_FILE}"] = tensors
    return files, pickled


def save_adapters(
    part: AdapterModel,
    save_directory: str | os.PathLike[str],
    safe: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Write the adapters of a model as `PeftModel.save_pretrained` does. Every rank calls it if `part.is_partial`."""
    folder = follow_links(user_path(save_directory, "save_model: save_directory"), "save_model")
    state = part.checkpoint_state_dict()
    if not is_writer(PartialState(), save_on_each_node):
        return
    files, pickled = adapter_files(part, state, safe)
    for name in (*files, *pickled):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, value in pickled.items():
        write_atomically(value, folder / name)
        # peft reads this one first.
        (folder / name).with_name(WEIGHTS_FILE).unlink(missing_ok=True)
    for name, pieces in files.items():
        with atomic_write(folder / name) as file:
            for piece in pieces:
                if isinstance(piece, torch.Tensor):
                    piece = host_view(piece.cpu().contiguous())
                file.write(piece)


@dataclass
class AdapterWeights(ModelWeights):
    """The saved adapters of one model, by the names in the model; `base`: the saved checksums of the base."""

    base: dict[str, str] = field(default_factory=dict)

    def compare(self, index: int, part: PreparedModel, strict: bool) -> list[str]:
        """As for any model, and the checksums of the base."""
        assert isinstance(part, AdapterModel)
        other = list(differing(self.base, part.base))
        notes = []
        if other:
            text = (
                f"the base of model {index} is not the base of the adapter: {len(other)} of "
                f"{len(part.base)} frozen tensors differ, such as {', '.join(other[:3])}"
            )
            if strict:
                raise CheckpointMismatch(
                    f"{self.path}: {text}. Nothing was loaded. Load the base model of this adapter."
                )
            notes.append(text)
        return notes + super().compare(index, part, strict)

    def present_entries(self, part: PreparedModel) -> Mapping[str, object]:
        """The tensors of the adapters."""
        assert isinstance(part, AdapterModel)
        return part.tensors


def adapter_weights(source: CheckpointReader, index: int, row: JSONObject) -> AdapterWeights:
    """The adapters of a checkpoint. Raises CheckpointMismatch where the run's model does not have adapters only."""
    folder = source.folder / adapters_folder(index)
    part = source.run.models[index]
    if not isinstance(part, AdapterModel):
        raise CheckpointMismatch(
            f"{folder} has the adapters ({', '.join(row['adapters'])}) of model {index} without "
            "the base. Prepare the PeftModel with a frozen base instead of a "
            f"{type(state_template(part)).__name__} whose weights all train"
        )
    shapes: dict[str, tuple[int, ...] | None] = {}
    reads: list[tuple[Mapping[str, str], Callable[[], Mapping[str, object]]]] = []
    for adapter in row["adapters"]:
        names = part.names.get(adapter, {})
        below = folder / adapter_folder(adapter)
        saved, read = weights_file(
            source.io, below / WEIGHTS_FILE, below / PICKLED_FILE, source.allow_pickle
        )
        for key, shape in saved.items():
            name = names.get(key, f"{adapter}: {key}")
            shapes[name] = shape
        reads.append((names, read))

    def read_all() -> dict[str, object]:
        values = {}
        for names, read in reads:
            entries = read()
            for key, value in entries.items():
                if key in names:
                    values[names[key]] = value
        return values

    return AdapterWeights(folder, shapes, read_all, {}, base=row["base"])
