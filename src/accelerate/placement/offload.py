# SPDX-License-Identifier: Apache-2.0
"""Weights kept on disk: one flat file a weight and an index, or entries of safetensors files, read on access."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from ..core import json_text
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import atomic_write, require_regular, user_path
from ..core.modules import is_wrapper_subclass
from ..core.tensor_files import READ_ERRORS, dtype_name
from .names import Place, is_within
from .sizes import as_dtype
from .streaming import WeightStream
from .subclasses import convert_inner, data_address, is_quantized_tensor
from .tensors import TiedCopies, as_device
from .weight_files import SafetensorsFiles

INDEX_NAME = "index.json"
Index = MutableMapping[str, dict[str, Any]]


def path_of(folder: str | os.PathLike[str], name: str) -> Path:
    """The file of a weight in an offload folder. Raises CheckpointError for a name that leads out of it."""
    path = Path(folder, f"{name}.dat")
    has_folder = len(Path(name).parts) > 1
    parent = Path(os.path.realpath(path.parent))
    if has_folder and not parent.is_relative_to(os.path.realpath(folder)):
        raise CheckpointError(f"the weight name {name!r} leads out of the offload folder {folder}")
    return path


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Any, index: Index | None = None
) -> Any:
    """Write the bytes of one weight to `offload_folder/<weight_name>.dat`, and add it to `index`.

    Returns the index. A tensor that is mapped to an earlier file of that name keeps its values. A weight that torchao
    has quantized is a file of `torch.save`.
    """
    is_quantized = is_quantized_tensor(weight)
    if is_wrapper_subclass(weight) and not is_quantized:
        raise TypeError(
            f"{weight_name} is a {type(weight).__name__}, which contains more than its numbers: "
            "only plain tensors and torchao tensors can be written to an offload folder"
        )
    if weight.device.type == "meta":
        raise ValueError(
            f"{weight_name} is on the meta device, so there is no data to write to {offload_folder}"
        )
    path = path_of(offload_folder, weight_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file, never an old one cut short: weights that were read from that are mapped to it.
    path.unlink(missing_ok=True)
    if is_quantized:
        # A clone, since `torch.save` writes all that a view is a part of.
        torch.save(convert_inner(weight.detach(), lambda inner: inner.to("cpu").clone()), path)
    else:
        data = weight.detach().as_subclass(torch.Tensor).to("cpu").contiguous()
        path.write_bytes(data.reshape(-1).view(torch.uint8).numpy().data)
    if index is not None:
        index[weight_name] = index_entry(weight)
    return index


def index_entry(weight: torch.Tensor) -> dict[str, Any]:
    """The dtype and the shape of a weight for an index, and whether it is a quantized one of torchao's."""
    entry = {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}
    if is_quantized_tensor(weight):
        entry["subclass"] = "torchao"
    return entry


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """The weight in a file of `offload_weight`, by its entry in the index (`dtype`, `shape`).

    Its memory is the file's, read as it is touched; changes stay in this process and never reach the file.
    Raises CheckpointError where the file is missing or too short.
    """
    try:
        dtype = as_dtype(weight_info["dtype"])
        empty = torch.empty(tuple(weight_info["shape"]), dtype=dtype, device="meta")
        if "subclass" in weight_info:
            # It tells torch which classes a file of plain data may contain.
            import torchao.quantization  # noqa: F401

            require_regular(weight_file)
            weight: torch.Tensor = torch.load(weight_file, mmap=True, weights_only=True)
            return weight
        if not empty.numel():
            return torch.empty_like(empty, device="cpu")
        size = require_regular(weight_file)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the offloaded weight {weight_file} cannot be read: {error}"
        ) from None
    except READ_ERRORS as error:
        raise CheckpointError(
            f"the index entry of {weight_file} does not describe it: {error!r}"
        ) from error
    if size < empty.nbytes:
        raise CheckpointError(
            f"the offloaded weight {weight_file} cannot be read: it has {size} bytes, but the "
            f"index declares {empty.nbytes}"
        )
    try:
        flat = torch.from_file(
            os.fspath(weight_file), shared=False, size=empty.numel(), dtype=dtype
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"the offloaded weight {weight_file} cannot be read: {error}"
        ) from None
    return flat.view(empty.shape)


def save_offload_index(
    index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Add `index` to `offload_folder/index.json`; an empty index is not written."""
    if not index:
        return
    path = Path(offload_folder, INDEX_NAME)
    entries: dict[str, Any] = {}
    if path.is_file():
        entries = _read_index(offload_folder)
    with atomic_write(path, "w") as file:
        json.dump({**entries, **index}, file, indent=2)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make an offload folder; raises ConfigurationError where no file can be written to it."""
    user_path(folder, "offload folder")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"the offload folder {folder} cannot be written to ({error.strerror or error}): use "
            "another folder"
        ) from error


def offload_state_dict(
    save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]
) -> None:
    """Write every weight of a state dict and their index to the folder `save_dir`."""
    check_folder(save_dir)
    index: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to submodules.

    Args:
        state_dict: name -> tensor.
        submodule_names: names of submodules; `""` is the model itself.

    Returns:
        The entries, under their full names.
    """
    entries: dict[str, torch.Tensor] = {}
    for name in submodule_names:
        entries.update((key, value) for key, value in state_dict.items() if is_within(key, name))
    return entries


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """A read-only view of the entries of a mapping whose keys begin with a prefix. Its keys lack the prefix.

    Args:
        dataset: name -> tensor.
        prefix: what the names begin with.
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset: Any = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self.dataset[f"{self.prefix}{key}"]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    @property
    def stream(self) -> WeightStream | None:
        """What fetches these weights ahead; None if they are in a mapping that has no such stream."""
        return getattr(self.dataset, "stream", None)

    def can_stream(self, key: str, device: torch.device, tied: TiedCopies) -> bool:
        """Return whether a weight may be fetched ahead: `OffloadedWeightsLoader.can_stream`."""
        return bool(self.dataset.can_stream(f"{self.prefix}{key}", device, tied))


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, some in memory (`state_dict`), others on disk, read at each access.

    `save_folder` is a folder of `offload_state_dict`; `index` contains its entries, or entries that name a
    tensor of a safetensors file: `{"safetensors_file": path, "weight_name": name, "dtype": dtype}`. `device` is the
    device of weights from safetensors files, by default the CPU. Raises ValueError without a source.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Place | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights."
            )
        if index is None and save_folder is not None:
            index = _read_index(save_folder)
        self.state_dict: Mapping[str, torch.Tensor] = state_dict or {}
        self.save_folder = save_folder
        self.index: Mapping[str, Any] = index or {}
        self.all_keys: list[str] = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        # Further names of a weight, for parameters that are tied and were stored under one name.
        self.aliases: dict[str, str] = {}
        self.stream: WeightStream = WeightStream()
        self._files = SafetensorsFiles()
        for entry in self.index.values():
            # One that cannot be read yet fails where it is needed.
            with contextlib.suppress(KeyError, CheckpointError, OSError):
                self._files.open(entry["safetensors_file"])

    def can_stream(self, key: str, device: torch.device, tied: TiedCopies) -> bool:
        """Return whether a weight may be fetched before the module that needs it runs on `device`.

        Weights in memory gain nothing from it on the CPU. A tied one that is on an accelerator already, by the address
        of the original in `tied`, serves as it is.
        """
        value = self.state_dict.get(self.aliases.get(key, key))
        if value is None:
            return self.device is None or as_device(self.device).type == "cpu"
        if value.device.type != "cpu":
            return False
        if type(value) not in (torch.Tensor, torch.nn.Parameter) and not is_quantized_tensor(value):
            return False
        if not self.stream.copies_to(device):
            return False
        return not tied.get(data_address(value))

    def __getitem__(self, key: str) -> torch.Tensor:
        key = self.aliases.get(key, key)
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            if self.save_folder is None:
                raise CheckpointError(
                    f"the index names {key} as a file in an offload folder, but no folder was "
                    "passed"
                )
            return load_offloaded_weight(path_of(self.save_folder, key), entry)
        tensor = self._files.tensor(entry["safetensors_file"], entry.get("weight_name", key))
        if self.device is not None:
            tensor = tensor.to(as_device(self.device))
        return tensor.to(dtype=as_dtype(entry.get("dtype")))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index or key in self.aliases


def _read_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(folder, INDEX_NAME)
    try:
        index = json_text.read(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} does not contain {INDEX_NAME}: no weights were offloaded to it"
        ) from None
    except (OSError, json_text.JSONTextError) as error:
        raise CheckpointError(f"the index {path} cannot be read: {error}") from error
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise CheckpointError(f"the index {path} does not map weight names to their entries")
    return index
