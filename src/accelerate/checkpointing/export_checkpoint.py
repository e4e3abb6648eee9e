# SPDX-License-Identifier: Apache-2.0
"""What `accelerate export` does: the model of a checkpoint as the folder that `from_pretrained`, or peft, reads."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..core.constants import FSDP_MODEL_NAME, MODEL_NAME, SAFE_MODEL_NAME
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import atomic_write
from ..core.json_text import JSONObject
from ..core.safetensors_header import read_header
from ..parallel.adapters import adapter_folder
from ..parallel.unwrap import canonical_name
from ..placement.sizes import convert_file_size_to_int
from .blocks import BlockIO
from .checksums import checksums, differing
from .compat import load_pickled
from .documents import damage
from .export import Piece, export, write_weights
from .layout import checkpoints_dir, list_checkpoints
from .manifest import MANIFEST, check_files, read_manifest
from .matching import CheckpointMismatch, compare_names
from .merging import WINDOW, read_tensors, shard_tensors
from .tensorfile import only_tensors, without_aliases
from .weights import plan_shards

# The files and folders of models in a checkpoint, with their numbers. The main one has none in the names of files.
_MODELS = re.compile(
    rf"(?:{SAFE_MODEL_NAME}|{MODEL_NAME}|{FSDP_MODEL_NAME})(?:_(\d+))?\.(?:safetensors|bin)"
    rf"|{FSDP_MODEL_NAME}_(\d+)|adapter(?:_(\d+))?"
)
_ELSE = "Load it with load_state in the training script, and call accelerate.export(model, folder) there"


def export_checkpoint(
    checkpoint: Path, folder: Path, base: str | None, merge_adapters: bool, max_shard_size: int | str
) -> str:
    """Write the model of a checkpoint, of any layout, as `accelerate.export` writes a model. One process does it.

    Args:
        checkpoint: a checkpoint with one model, or the file or folder of one of its models.
        folder: is created.
        base: the name or folder of the model that the adapters were trained on; of a checkpoint that does not have
            the configuration of its model, a model that has it.
        merge_adapters: add the adapters that were active to the base, and write that.
        max_shard_size: the largest size of a file.

    Returns:
        What the folder has, for a message.

    Raises:
        CheckpointError: there is no model, or a damaged one, or it is one of another base.
        ConfigurationError: the arguments do not go together.
    """
    path, row = _find_model(checkpoint)
    try:
        limit = convert_file_size_to_int(max_shard_size)
    except ValueError as error:
        raise ConfigurationError(f"--max_shard_size {max_shard_size}: {error}") from None
    if path.name.startswith("adapter"):
        return _export_adapters(path, row, folder, base, merge_adapters, limit)
    if merge_adapters:
        raise ConfigurationError(f"--merge_adapters: {path} is a model without adapters. Leave the option out")
    pieces = _pieces(path)
    tensors = {name: tensor for piece in pieces for name, tensor in piece.light.items()}
    if any(name.startswith("base_model.model.") for name in tensors):
        raise CheckpointError(f"{path} is an entire model of peft, whose base was trained too. {_ELSE}")
    configs: dict[str, str] = {name: row[name] for name in ("config", "generation_config") if name in row}
    if base is not None:
        configs = _configs_of(base, path, tensors)
    write_weights(pieces, folder, limit, is_writer=True)
    for name, text in configs.items():
        content = json.loads(text)
        if name == "config":
            dtypes = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
            content["dtype"] = str(next(dtypes, torch.float32)).removeprefix("torch.")
        with atomic_write(folder / f"{name}.json", "w") as file:
            json.dump(content, file, indent=2)
    return (
        "a model with its config.json"
        if configs
        else "weights without config.json, which the checkpoint does not have; --base adds one"
    )


def _find_model(checkpoint: Path) -> tuple[Path, JSONObject]:
    """The file or folder of a checkpoint's model, after its checksums were compared, and its row in the manifest."""
    paths = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else []
    # A folder with a manifest is a checkpoint that the user has called so.
    paths = [path for path in paths if _MODELS.fullmatch(path.name) and not (path / MANIFEST).exists()]
    if not paths and checkpoint.exists() and _MODELS.fullmatch(checkpoint.name):
        paths = [checkpoint]
    if not paths:
        folders = (checkpoint, checkpoints_dir(checkpoint))
        inside = [path for folder in folders for _, path in list_checkpoints(folder)]
        hint = f": give one of those in it, such as {inside[-1]}" if inside else ""
        raise CheckpointError(f"{checkpoint} is not a checkpoint with a model{hint}")
    if len(paths) > 1:
        raise CheckpointError(f"{checkpoint} has several models: give one of them, such as {paths[-1]}")
    path = paths[0]
    if not (path.parent / MANIFEST).exists():
        return path, {}
    manifest = read_manifest(path.parent)
    with BlockIO() as io:
        names = [name for name in manifest.files if name == path.name or name.startswith(f"{path.name}/")]
        check_files(io, path.parent, manifest, names)
    match = _MODELS.fullmatch(path.name)
    return path, manifest.models[int(next(filter(None, match.groups()), 0))] if match else {}


def _pieces(path: Path) -> list[Piece]:
    """The tensors of a saved model under the names of the plain model, some of them at a time."""
    read: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    prefix = ""
    if path.is_dir():
        tensors, prefix = shard_tensors(path)
        read = functools.partial(read_tensors, path)
    elif path.suffix == ".safetensors":
        with damage(path):
            entries = read_header(path).entries
        tensors = {name: torch.empty(e.shape, dtype=e.dtype, device="meta") for name, e in entries.items()}
        file = safe_open(path, framework="pt")  # maps the file
        read = lambda group: {name: file.get_tensor(name) for name in group}  # noqa: E731
    else:
        tensors, _ = without_aliases(only_tensors(load_pickled(path, mmap=True)))
        read = dict

    def plain(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {canonical_name(name.removeprefix(prefix)): tensor for name, tensor in values.items()}

    groups = [{name: tensors[name] for name in names} for names in plan_shards(tensors, WINDOW)]
    return [Piece(plain(group), lambda _, group=group: plain(read(group))) for group in groups]  # type: ignore[misc]


def _configs_of(base: str, path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The texts of the configurations of a model of transformers. Raises CheckpointMismatch if tensors do not fit."""
    import transformers

    with _reading(base):
        config = transformers.AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = _model_class(config.architectures)(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if differences := compare_names(shapes, model.state_dict(keep_vars=True)):
        raise CheckpointMismatch(f"{path} does not fit the configuration of {base}: {differences}")
    configs = {"config": config.to_json_string()}
    with contextlib.suppress(OSError):  # not every model has one
        configs["generation_config"] = transformers.GenerationConfig.from_pretrained(base).to_json_string()
    return configs


@contextlib.contextmanager
def _reading(base: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--base {base} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def _model_class(architectures: list[str] | None) -> Any:
    import transformers

    name = (architectures or ["its model"])[0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ConfigurationError(f"{name} is not a model of transformers. {_ELSE}")
    return found


# --- adapters ------------------------------------------------------------------------------------------------------


def _export_adapters(
    path: Path, row: JSONObject, folder: Path, base: str | None, merge_adapters: bool, limit: int
) -> str:
    if not merge_adapters:
        if base is not None:
            raise ConfigurationError(
                f"--base: {path} has adapters, which are exported without it. Add --merge_adapters to merge them"
            )
        for source in path.rglob("*.*"):
            target = folder / source.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(source, "rb") as file, atomic_write(target) as copy:
                shutil.copyfileobj(file, copy)
        return "adapters of peft"
    if base is None:
        raise ConfigurationError(f"--merge_adapters: give the base of the adapters in {path} (--base NAME_OR_FOLDER)")
    if "config" not in row:
        raise CheckpointError(f"{path}: the checkpoint does not have the configuration of the base. {_ELSE}")
    import peft
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = json.loads(row["config"])
    is_quantized = config.pop("quantization_config", None) is not None
    dtypes = Counter(text.split()[0] for text in row["base"].values() if "float" in text)
    kind = _model_class(config["architectures"])
    dtype = getattr(torch, dtypes.most_common(1)[0][0]) if dtypes else torch.float32
    with _reading(base):
        # Maps the files of the base that have this dtype.
        model = kind.from_pretrained(base, config=kind.config_class.from_dict(config), dtype=dtype)
    _check_base(path, row["base"], model, base, is_quantized)
    for number, name in enumerate(row["adapters"]):
        place = path / adapter_folder(name)
        if number == 0:
            model = peft.PeftModel.from_pretrained(model, place, name)
        else:
            model.load_adapter(place, name)
    model.base_model.set_adapter(row["active"])
    export(model, folder, merge_adapters=True, max_shard_size=limit)
    return f"a model with merged adapters ({', '.join(row['active'])})"


def _check_base(path: Path, saved: Mapping[str, str], model: torch.nn.Module, base: str, is_quantized: bool) -> None:
    """Raise CheckpointMismatch unless a model has the parameters on which the adapters were trained.

    Those that were quantized cannot be compared.
    """
    present = checksums(dict(model.named_parameters()))
    if is_quantized:
        saved = {
            name: text for name, text in saved.items() if text.split("]")[0] == present.get(name, "").split("]")[0]
        }
    wrong = list(differing(saved, {name: present[name] for name in saved if name in present}))
    if wrong:
        raise CheckpointMismatch(
            f"{base} is not the base of the adapters in {path}: {len(wrong)} of {len(saved)} tensors differ, such as "
            f"{', '.join(wrong[:3])}"
        )
