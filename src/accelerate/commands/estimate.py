# SPDX-License-Identifier: Apache-2.0
"""`accelerate estimate-memory MODEL`: what a model takes to load and to train, from its configuration alone.

The model is built on the meta device: no weight is downloaded, read or allocated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import json_text
from ..core.enums import SHORT_DTYPES, CustomDtype
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from ..core.objects import flat_list
from .parser import command_parser, exit_on, table

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("timm", "transformers")
DTYPES = ("float32", "float16", "int8", "int4")
HUB_TIMEOUT = 10  # seconds in which the Hub must answer
CONFIG = "config.json"


class Footprint(NamedTuple):
    """Bytes of a model whose floating point values are of one dtype.

    `training` is what training with Adam holds, activations left out; None where Adam cannot train it.
    """

    dtype: str
    largest: int
    total: int
    training: int | None


def footprint(model: nn.Module, dtype: str) -> Footprint:
    """What a float32 model (it may be on the meta device) takes in a dtype. Tied weights count once."""
    import torch

    from ..placement.sizes import compute_module_sizes, get_max_layer_size, members_of

    kind: Any = CustomDtype.INT4 if dtype == "int4" else getattr(torch, dtype)
    sizes = compute_module_sizes(model, dtype=kind)
    # The classes whose modules are never split, as the model and its modules name them.
    unsplit = set(
        flat_list([getattr(module, "_no_split_modules", None) for module in model.modules()])
    )
    largest, _ = get_max_layer_size(members_of("", model), sizes, sorted(unsplit))
    return Footprint(dtype, int(largest), int(sizes[""]), training(model, dtype))


def training(model: nn.Module, dtype: str) -> int | None:
    """Float32 weights and buffers, a gradient and Adam's two moments of each weight that is trained.

    In 16 bits it is mixed precision: the weights stay float32, and the forward pass keeps a 16-bit copy of each.
    """
    if dtype not in ("float32", "float16", "bfloat16"):
        return None
    weights = sum(
        tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()]
    )
    trained = sum(
        weight.numel() * weight.element_size()
        for weight in model.parameters()
        if weight.requires_grad
    )
    if dtype != "float32":
        copies = sum(2 * weight.numel() for weight in model.parameters())
    else:
        copies = 0
    return weights + copies + 3 * trained


def build(
    name: str, library: str | None = None, trust_remote_code: bool = False, token: str | None = None
) -> nn.Module:
    """The float32 model of a Hub id, a folder with a config.json, such a file, or module:function, on the meta device.

    ConfigurationError if it cannot be built: unknown, gated, offline, no such library, code that is not trusted.
    """
    path = Path(name).expanduser()
    if ":" in name and not path.exists():
        from ..planning.model import from_function

        return from_function(name)
    if path.is_dir():
        path = path / CONFIG
        if not path.is_file():
            raise ConfigurationError(f"the folder {name} does not contain a {CONFIG}")
    elif not path.is_file():
        if name.startswith((".", "/", "~")) or name.endswith(".json"):
            raise ConfigurationError(f"{name} does not exist")
        path = _from_hub(name, token)
    config = _read(path)
    library = library or _library_of(config, name)
    if not is_available(library):
        raise ConfigurationError(
            f"{name} is a {library} model, and {library} is not installed: pip install {library}"
        )
    try:
        if library == "timm":
            return _of_timm(name, path)
        return _of_transformers(name, path, trust_remote_code, token)
    # The library, and a model's own code, raise whatever they like.
    except Exception as error:
        if "trust_remote_code" in str(error):
            hint = ". --trust_remote_code runs the model's own code"
        else:
            hint = ""
        raise ConfigurationError(
            f"{library} cannot build {name} from {path}: {_one_line(error)}{hint}"
        ) from error


def _from_hub(name: str, token: str | None) -> Path:
    """The model's config.json from the local cache of the Hub, or else from the Hub if it answers."""
    if not is_available("huggingface_hub"):
        raise ConfigurationError(
            f"{name} is not a file or folder here, and models from the Hub need huggingface_hub, "
            "which is not installed: pip install transformers"
        )
    from huggingface_hub import hf_hub_download, model_info, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, CONFIG)
        if isinstance(cached, str):
            return Path(cached)
        # without a network, a download is tried for 20 s
        model_info(name, token=token, timeout=HUB_TIMEOUT)
        return Path(hf_hub_download(name, CONFIG, token=token))
    # The Hub's own errors, and those of its HTTP library, of which there have been several.
    except Exception as error:
        raise ConfigurationError(
            f"{name} is not a file or folder here, is not in the local cache, and its {CONFIG} "
            f"cannot be downloaded from the Hub ({_one_line(error)}). Check the name, pass a "
            "folder, or sign in with `hf auth login` (or set HF_TOKEN) for a gated or private "
            "model"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json_text.read(path, limit=16 << 20, numbers=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a model configuration: it does not have any keys")
    return config


def _library_of(config: dict[str, Any], name: str) -> str:
    if "model_type" in config or "auto_map" in config:
        return "transformers"
    if "architecture" in config and ("pretrained_cfg" in config or "num_features" in config):
        return "timm"
    raise ConfigurationError(
        f"the configuration of {name} does not name the model's library: add --library_name "
        f"({' or '.join(LIBRARIES)})"
    )


def _of_transformers(
    name: str, path: Path, trust_remote_code: bool, token: str | None
) -> nn.Module:
    import torch
    import transformers

    # The library's messages about tokens and templates have nothing to do with the model's size.
    transformers.logging.set_verbosity_error()
    local = Path(name).expanduser()
    # The file is at hand; only a model's own code needs more of the Hub.
    if local.exists():
        source = str(local)
    elif trust_remote_code:
        source = name
    else:
        source = str(path.parent)
    config = transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, token=token
    )
    config.dtype = torch.float32
    with torch.device("meta"):
        for architecture in config.architectures or []:
            if hasattr(transformers, architecture):
                model: nn.Module = getattr(transformers, architecture)(config)
                return model
        # A model with its own code says there which of the library's automatic classes build it.
        automatic = getattr(config, "auto_map", None) or {}
        name_of_class = next(
            (name for name in automatic if name.startswith("AutoModelFor")), "AutoModel"
        )
        model = getattr(transformers, name_of_class).from_config(
            config, trust_remote_code=trust_remote_code
        )
        return model


def _of_timm(name: str, path: Path) -> nn.Module:
    import timm
    import torch

    if Path(name).expanduser().exists():
        source = f"local-dir:{path.parent}"
    else:
        source = add_timm_hub_prefix(name)
    with torch.device("meta"):
        model: nn.Module = timm.create_model(source, pretrained=False)
        return model


def _one_line(error: BaseException) -> str:
    """A foreign error in one line."""
    text = " ".join(str(error).split())
    if len(text) > 300:
        return f"{type(error).__name__}: {text[:297]}..."
    return f"{type(error).__name__}: {text}"


def create_ascii_table(headers: list[str], rows: list[list[str]], title: str) -> str:
    """A table of text below a title.

    Args:
        headers: the name of each column.
        rows: the cells of each row.
        title: the line above the table.
    """
    return f"{title}\n\n{table(rows, headers)}"


def report(name: str, model: nn.Module, found: list[Footprint]) -> str:
    """The tables of the command."""
    from ..core.objects import size_of

    count = sum(weight.numel() for weight in model.parameters())
    rows = [
        (
            row.dtype,
            size_of(row.largest),
            size_of(row.total),
            size_of(row.training) if row.training else "-",
        )
        for row in found
    ]
    lines = [
        f"Memory of {name} ({type(model).__name__}, {count:,} parameters)",
        "",
        table(rows, ("dtype", "largest layer", "total size", "training with Adam")),
        "",
    ]
    if any(row.training for row in found):
        lines.append(
            "Activations are not included, because they depend on the batch. `accelerate plan` "
            "traces them."
        )
    if any(not row.training for row in found):
        lines.append(
            "int8 and int4: as if every weight were quantized; layers that stay in 16 bits need "
            "more."
        )
    return "\n".join(lines)


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`, or add it to `subparsers`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned.
    """
    description = (
        "Estimate the memory that a model needs for loading and training. The model is built "
        "from its configuration on the meta device; weights are not loaded."
    )
    made = command_parser("estimate-memory", description, estimate_command, subparsers)
    made.add_argument(
        "model_name",
        help="Folder with a config.json, the file itself, a name on the Hugging Face Hub, or "
        "module:function that returns a torch.nn.Module.",
    )
    made.add_argument(
        "--library_name",
        choices=LIBRARIES,
        help="The model's library, if the configuration does not name it.",
    )
    made.add_argument(
        "--dtypes",
        nargs="+",
        type=lambda text: SHORT_DTYPES.get(text, text),
        choices=(*DTYPES, "bfloat16"),
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"Dtypes to show: {', '.join(DTYPES)} (the default), and bfloat16 (or bf16).",
    )
    made.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="Run Python code that comes with the model. Use this only for code that you have "
        "read.",
    )
    return made


# The name that every command has.
parser = estimate_command_parser


def estimate_command(args: argparse.Namespace) -> None:
    """Run the command with parsed arguments. Exits with 2 if the model cannot be built."""
    with exit_on(ConfigurationError):
        model = build(args.model_name, args.library_name, args.trust_remote_code)
    print(report(args.model_name, model, [footprint(model, dtype) for dtype in args.dtypes]))


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    estimate_command(estimate_command_parser().parse_args(argv))


# The functions of the API that scripts import from here.


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> nn.Module:
    """Build a model from its configuration, without memory for its weights.

    Args:
        model_name: the id on the Hugging Face Hub, a folder with a `config.json`, or such a file.
        library_name: "transformers" or "timm"; None to take it from the configuration.
        trust_remote_code: run the model's own Python code.
        access_token: a token of the Hub. By default the one of `hf auth login` or `HF_TOKEN` is used.

    Returns:
        The model, on the meta device.

    Raises:
        ConfigurationError: the model cannot be found or built; the message names the reason.
    """
    return build(model_name, library_name, trust_remote_code, access_token)


def check_has_model(error: BaseException) -> str:
    """Return the library ("timm" or "transformers") that raised `error` for an unknown model; "unknown" for others."""
    text = str(error)
    if is_available("timm") and isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if (
        is_available("transformers")
        and isinstance(error, OSError)
        and "does not appear to have a file named" in text
    ):
        return "transformers"
    return "unknown"


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Estimate the memory that training with Adam takes, without activations.

    Args:
        bytes: bytes of the model's weights in float32.
        mixed_precision: "float32", or "float16" for mixed precision. Others cannot be trained.
        msamp_config: an optimization level of MS-AMP. It is not used: that library takes part in no estimate.

    Returns:
        Bytes of the `model`, the `optimizer`'s states and the `gradients`, and of the largest moment of a `step`;
        -1 each where the dtype cannot be trained.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}
    if mixed_precision in ("float16", "bfloat16"):
        # The gradients: in float32, and next to them a half-precision copy of the weights during the backward pass.
        return {
            "model": bytes,
            "optimizer": 2 * bytes,
            "gradients": bytes + bytes // 2,
            "step": 2 * bytes,
        }
    return {"model": -1, "optimizer": -1, "gradients": -1, "step": -1}


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return the rows of `accelerate estimate-memory`, from its parsed arguments.

    Returns:
        For each dtype: its name, the bytes of the largest layer, the bytes of the model, and what
        `estimate_training_usage` returns.
    """
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    unquantized = footprint(model, "float32").total
    footprints = [footprint(model, dtype) for dtype in args.dtypes]
    return [
        [row.dtype, row.largest, row.total, estimate_training_usage(unquantized, row.dtype)]
        for row in footprints
    ]


def add_timm_hub_prefix(model_name: str) -> str:
    """The name of a model of the Hub as `timm.create_model` takes it; names of timm's own models stay."""
    if "/" not in model_name:
        return model_name
    return f"hf-hub:{model_name.removeprefix('hf-hub:')}"


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """What the Hub knows of a model; "gated" where access has to be granted, "repo" where there is no such model."""
    from huggingface_hub import errors, model_info

    try:
        return model_info(repo, token=token)
    except errors.GatedRepoError:
        return "gated"
    except errors.RepositoryNotFoundError:
        return "repo"
