# SPDX-License-Identifier: Apache-2.0
"""What `accelerate export` does: the model of a checkpoint as the folder that `from_pretrained`, or peft, reads."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..core.constants import FSDP_MODEL_NAME, MODEL_NAME, SAFE_MODEL_NAME
from ..core.errors import CheckpointError, ConfigurationError
from ..core.files import atomic_write
from ..core.json_text import JSONObject
from ..core.tensor_files import dtype_name, read_header
from ..parallel.adapters import adapter_folder, base_name
from ..parallel.materialize import complete
from ..parallel.unwrap import canonical_name
from ..placement.sizes import convert_file_size_to_int
from .checksums import checksums, differing
from .compat import load_pickled
from .documents import damage
from .export import Piece, export_model, write_weights
from .files import BlockIO, only_tensors, without_aliases
from .layout import (
    MANIFEST,
    CheckpointMismatch,
    check_files,
    checkpoints_dir,
    list_checkpoints,
    read_manifest,
)
from .merging import WINDOW, read_tensors, shard_tensors
from .source import compare_names
from .weights import plan_shards

# The files and folders of models in a checkpoint, with their numbers. The main one has none in the names of files.
_MODELS = re.compile(
    rf"(?:{SAFE_MODEL_NAME}|{MODEL_NAME}|{FSDP_MODEL_NAME})(?:_(\d+))?\.(?:safetensors|bin)"
    rf"|{FSDP_MODEL_NAME}_(\d+)|adapter(?:_(\d+))?"
)
HUB_TIMEOUT = 10.0  # seconds in which the Hub must answer
_ELSE = "Load it with load_state in the training script, and call accelerate.export(model, folder) there"


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    base: str | None,
    merge_adapters: bool,
    max_shard_size: int | str,
) -> str:
    """Write the model of a checkpoint, of any layout, as `accelerate.export` writes a model. One process does it.

    Args:
        checkpoint: a checkpoint with one model, or the file or folder of one of its models.
        folder: the folder, which is created.
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
    if path.is_file() or (path.parent / MANIFEST).exists():
        source = path.parent
    else:
        source = path
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source)):
        raise ConfigurationError(
            f"{folder} is inside the checkpoint {source}: use a folder outside it"
        )
    try:
        limit = convert_file_size_to_int(max_shard_size)
    except ValueError as error:
        raise ConfigurationError(f"--max_shard_size {max_shard_size}: {error}") from None
    is_adapter = path.name.startswith("adapter")
    pieces = [] if is_adapter else _pieces(path)
    if merge_adapters:
        if is_adapter:
            model = _adapted_base(path, row, base)
        else:
            model = _saved_model(path, row, pieces, base)
        if list(model.active_adapters) != row["active"]:
            model.base_model.set_adapter(row["active"])
        export_model(model, folder, True, limit)
        return f"a model with merged adapters ({', '.join(row['active'])})"
    if is_adapter:
        if base is not None:
            raise ConfigurationError(
                f"--base: {path} has adapters, which are exported without it. Add --merge_adapters to merge them"
            )
        _copy_files(path, folder)
        return "peft adapters"
    tensors: dict[str, torch.Tensor] = {}
    for piece in pieces:
        tensors.update(piece.light)
    if _is_of_peft(row, pieces):
        raise ConfigurationError(
            f"{path} has adapters and their base. Add --merge_adapters to export a merged model"
        )
    configs: dict[str, str] = {
        name: row[name] for name in ("config", "generation_config") if name in row
    }
    if base is not None:
        configs = _configs_of(base, path, tensors)
    write_weights(pieces, folder, limit, is_writer=True)
    for name, text in configs.items():
        content = json.loads(text)
        if name == "config":
            dtypes = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
            content["dtype"] = dtype_name(next(dtypes, torch.float32))
        with atomic_write(folder / f"{name}.json", "w") as file:
            json.dump(content, file, indent=2)
    if configs:
        return "a model with its config.json"
    return (
        "weights without a config.json, because the checkpoint does not have one (for "
        "transformers, --base adds one)"
    )


def _find_model(checkpoint: Path) -> tuple[Path, JSONObject]:
    """The file or folder of a checkpoint's model, after its checksums were compared, and its row in the manifest."""
    paths = []
    if checkpoint.is_dir():
        for path in sorted(checkpoint.iterdir()):
            # A folder with a manifest is a checkpoint that the user has called so.
            if _MODELS.fullmatch(path.name) and not (path / MANIFEST).exists():
                paths.append(path)
    if not paths and checkpoint.exists() and _MODELS.fullmatch(checkpoint.name):
        paths = [checkpoint]
    if not paths and not checkpoint.exists():
        raise CheckpointError(f"{checkpoint} does not exist")
    if not paths:
        inside = [*list_checkpoints(checkpoint), *list_checkpoints(checkpoints_dir(checkpoint))]
        hint = ""
        if inside:
            hint = f": choose one of the checkpoints in it, such as {inside[-1][1]}"
        raise CheckpointError(f"{checkpoint} is not a checkpoint with a model{hint}")
    if len(paths) > 1:
        raise CheckpointError(
            f"{checkpoint} has several models: choose one of them, such as {paths[-1]}"
        )
    path = paths[0]
    if not (path.parent / MANIFEST).exists():
        return path, {}
    manifest = read_manifest(path.parent)
    names = [name for name in manifest.files if name.partition("/")[0] == path.name]
    with BlockIO() as io:
        check_files(io, path.parent, manifest, names)
    match = _MODELS.fullmatch(path.name)
    if match is None:
        return path, {}
    index = int(next(filter(None, match.groups()), 0))
    return path, manifest.models[index]


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
        tensors = {}
        for name, entry in entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        file = safe_open(path, framework="pt")  # maps the file

        def read(group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: file.get_tensor(name) for name in group}

    else:
        tensors, _ = without_aliases(only_tensors(load_pickled(path, mmap=True)))
        read = dict

    def plain(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {}
        for name, tensor in values.items():
            plain_name = canonical_name(name.removeprefix(prefix))
            named[plain_name] = tensor
        return named

    def read_plain(group: dict[str, torch.Tensor], is_writer: bool) -> dict[str, torch.Tensor]:
        return plain(read(group))

    pieces = []
    for names in plan_shards(tensors, WINDOW):
        group = {name: tensors[name] for name in names}
        pieces.append(Piece(plain(group), functools.partial(read_plain, group)))
    return pieces


def _configs_of(base: str, path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The texts of the configurations of a model of transformers. Raises CheckpointMismatch if tensors do not fit."""
    import transformers

    config = _load(base, transformers.AutoConfig.from_pretrained)
    with torch.device("meta"):
        model = _model_class(config.architectures)(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differences = compare_names(shapes, model.state_dict(keep_vars=True))
    if differences:
        raise CheckpointMismatch(f"{path} does not fit the configuration of {base}: {differences}")
    configs = {"config": config.to_json_string()}
    with contextlib.suppress(ConfigurationError):  # not every model has one
        configs["generation_config"] = _load(
            base, transformers.GenerationConfig.from_pretrained
        ).to_json_string()
    return configs


def _load(base: str, from_pretrained: Callable[..., Any]) -> Any:
    """What `from_pretrained` reads of a folder or of the Hub's local cache, or else of the Hub if it answers."""
    import huggingface_hub

    try:
        return from_pretrained(base, local_files_only=True)
    except (OSError, ValueError) as error:
        if Path(base).is_dir():
            raise ConfigurationError(
                f"--base {base} cannot be loaded: {_first_line(error)}"
            ) from error
    try:
        # Without a network, transformers asks for several files several times, which takes minutes.
        huggingface_hub.model_info(base, timeout=HUB_TIMEOUT)
        return from_pretrained(base)
    except Exception as error:
        raise ConfigurationError(
            f"--base {base} is not a folder, not in the local cache, and not on the Hub: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _model_class(architectures: list[str] | None) -> Any:
    import transformers

    name = (architectures or ["its model"])[0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ConfigurationError(f"{name} is not a transformers model. {_ELSE}")
    return found


# --- adapters ------------------------------------------------------------------------------------------------------


def _is_of_peft(row: JSONObject, pieces: list[Piece]) -> bool:
    names = itertools.chain.from_iterable(piece.light for piece in pieces)
    return "adapter_configs" in row or any(name.startswith("base_model.model.") for name in names)


def _copy_files(path: Path, folder: Path) -> None:
    for source in path.rglob("*.*"):
        target = folder / source.relative_to(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as file, atomic_write(target) as copy:
            shutil.copyfileobj(file, copy)


def _saved_model(path: Path, row: JSONObject, pieces: list[Piece], base: str | None) -> Any:
    """A model of peft that was saved with its base. Raises CheckpointMismatch if the tensors do not fit it."""
    if not _is_of_peft(row, pieces):
        raise ConfigurationError(
            f"--merge_adapters: {path} is a model without adapters. Remove the option"
        )
    if base is not None:
        raise ConfigurationError(f"--base: {path} has adapters and their base. Remove the option")
    kind, config, is_quantized = _configuration(path, row)
    if is_quantized:
        raise ConfigurationError(
            f"--merge_adapters: the base in {path} is quantized. {_ELSE}, without merging"
        )
    import peft

    state: dict[str, torch.Tensor] = {}
    for piece in pieces:
        state.update(piece.read(True))
    with torch.device("meta"):
        model = kind(config)
    # Layers of adapters compute buffers of the base's weights.
    _assign(model, {base_name(name): tensor for name, tensor in state.items()})
    for name, text in row["adapter_configs"].items():
        # Without the name of its base, of which peft would warn: this one has none.
        adapter = peft.PeftConfig.from_peft_type(
            **{**json.loads(text), "base_model_name_or_path": None}
        )
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, adapter, autocast_adapter_dtype=False)
        else:
            model = peft.get_peft_model(model, adapter, name, autocast_adapter_dtype=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differences = compare_names(shapes, model.state_dict(keep_vars=True))
    if differences:
        raise CheckpointMismatch(
            f"{path} does not fit the configurations in its manifest: {differences}"
        )
    _assign(model, state)
    return model


def _assign(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give a model the tensors that fit, without copies. All names of a tied parameter get one object."""
    light = model.state_dict(keep_vars=True)
    fitting = {
        name: torch.nn.Parameter(tensor, requires_grad=False)
        if isinstance(light[name], torch.nn.Parameter)
        else tensor
        for name, tensor in state.items()
        if name in light and light[name].shape == tensor.shape
    }
    model.load_state_dict(complete(fitting, light), strict=False, assign=True)


def _adapted_base(path: Path, row: JSONObject, base: str | None) -> Any:
    """A base with the adapters of a checkpoint. Raises CheckpointMismatch for another base."""
    if base is None:
        raise ConfigurationError(
            f"--merge_adapters: name the base of the adapters in {path} (--base NAME_OR_FOLDER)"
        )
    kind, config, is_quantized = _configuration(path, row)
    import peft

    dtypes = Counter(text.split()[0] for text in row["base"].values() if "float" in text)
    if dtypes:
        dtype = getattr(torch, dtypes.most_common(1)[0][0])
    else:
        dtype = torch.float32
    # Maps the files of the base that have this dtype.
    model = _load(base, functools.partial(kind.from_pretrained, config=config, dtype=dtype))
    _check_base(path, row["base"], model, base, is_quantized)
    for number, name in enumerate(row["adapters"]):
        place = path / adapter_folder(name)
        if number == 0:
            model = peft.PeftModel.from_pretrained(model, place, name)
        else:
            model.load_adapter(place, name)
    return model


def _configuration(path: Path, row: JSONObject) -> tuple[Any, Any, bool]:
    """The class of a model's base, its configuration without quantization, and whether it was quantized."""
    if "config" not in row or "active" not in row:
        raise CheckpointError(
            f"{path}: the checkpoint does not contain the model's configuration. {_ELSE}"
        )
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # It warns of weights that a base does not have, which adapters then have or the checksums show.
    transformers.utils.logging.set_verbosity_error()
    config = json.loads(row["config"])
    is_quantized = config.pop("quantization_config", None) is not None
    kind = _model_class(config["architectures"])
    return kind, kind.config_class.from_dict(config), is_quantized


def _check_base(
    path: Path, saved: Mapping[str, str], model: torch.nn.Module, base: str, is_quantized: bool
) -> None:
    """Raise CheckpointMismatch unless a model has the parameters on which the adapters were trained.

    Those that were quantized cannot be compared.
    """
    present = checksums(dict(model.named_parameters()))
    saved = {
        name: text
        for name, text in saved.items()
        if name in present
        and (not is_quantized or text.split("]")[0] == present[name].split("]")[0])
    }
    wrong = list(differing(saved, {name: present[name] for name in saved}))
    if wrong:
        raise CheckpointMismatch(
            f"{base} is not the base of the adapters in {path}: {len(wrong)} of {len(saved)} tensors differ, such as "
            f"{', '.join(wrong[:3])}"
        )
