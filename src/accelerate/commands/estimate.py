# SPDX-License-Identifier: Apache-2.0
"""`accelerate estimate-memory MODEL`: what a model takes to load and to train, from its configuration alone.

The model is built on the meta device: no weight is downloaded, read or allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import json_text
from ..core.enums import SHORT_DTYPES, CustomDtype
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from .parser import Formatter, Parser, exit_on, table

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("timm", "transformers")
DTYPES = ("float32", "float16", "int8", "int4")
# Seconds in which the Hub must accept a connection.
HUB_TIMEOUT = 0.5
CONFIG = "config.json"


@dataclass(frozen=True)
class Training:
    """Bytes that training with Adam holds, activations left out."""

    weights: int
    copies: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return self.weights + self.copies + self.gradients + self.moments


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model whose floating point values are of one dtype. `training` is None where Adam cannot train it."""

    dtype: str
    largest: int
    total: int
    training: Training | None


def footprint(model: nn.Module, dtype: str) -> Footprint:
    """What a float32 model (it may be on the meta device) takes in a dtype. Tied weights count once."""
    import torch

    from ..placement.sizes import compute_module_sizes, get_max_layer_size

    kind: Any = CustomDtype.INT4 if dtype == "int4" else getattr(torch, dtype)
    sizes = compute_module_sizes(model, dtype=kind)
    children: list[Any] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    largest, _ = get_max_layer_size(children, sizes, _unsplit(model))
    return Footprint(dtype, int(largest), int(sizes[""]), training(model, dtype))


def _unsplit(model: nn.Module) -> list[str]:
    """The classes whose modules are never split, as the model and its modules name them."""
    return sorted({name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()})


def training(model: nn.Module, dtype: str) -> Training | None:
    """Float32 weights and buffers, a gradient and Adam's two moments of each weight that is trained.

    In 16 bits it is mixed precision: the weights stay float32, and the forward pass keeps a 16-bit copy of each.
    """
    if dtype not in ("float32", "float16", "bfloat16"):
        return None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    trained = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    copies = sum(2 * weight.numel() for weight in model.parameters()) if dtype != "float32" else 0
    return Training(weights=weights, copies=copies, gradients=trained, moments=2 * trained)


def build(
    name: str, library: str | None = None, trust_remote_code: bool = False, token: str | None = None
) -> nn.Module:
    """The float32 model of a Hub id, a folder with a config.json, such a file, or module:function, on the meta device.

    ConfigurationError if it cannot be built: unknown, gated, offline, no such library, code that is not trusted.
    """
    if not name.strip():
        raise ConfigurationError(
            f"the model is empty: give a folder, a {CONFIG}, a name on the Hub or module:function"
        )
    path = Path(name).expanduser()
    if ":" in name and not path.exists():
        from ..planning.model import from_function

        return from_function(name)
    if path.is_dir():
        path = path / CONFIG
        if not path.is_file():
            raise ConfigurationError(f"the folder {name} has no {CONFIG}")
    elif not path.is_file():
        if name.startswith((".", "/", "~")) or name.endswith(".json"):
            raise ConfigurationError(f"{name}: there is no such file or folder")
        path = _from_hub(name, token)
    config = _read(path)
    library = library or _library_of(config, name)
    if not is_available(library):
        raise ConfigurationError(f"{name} is a model of {library}, which is not installed: pip install {library}")
    if library == "timm":
        return _of_timm(name, path)
    return _of_transformers(name, path, trust_remote_code, token)


def _from_hub(name: str, token: str | None) -> Path:
    """The model's config.json from the Hub, or from the local cache of it."""
    if not is_available("huggingface_hub"):
        raise ConfigurationError(
            f"{name} is no file or folder here, and models of the Hub need huggingface_hub, which is not installed: "
            "pip install transformers"
        )
    from huggingface_hub import constants, errors, hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG, token=token, local_files_only=not _answers(constants.ENDPOINT)))
    except errors.GatedRepoError:
        why = "it is gated: accept its terms on the Hub, then sign in with `hf auth login` (or set HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        why = "the Hub has no such model, or it is private: check its name; for a private one, `hf auth login`"
    except errors.LocalEntryNotFoundError:
        why = "the Hub cannot be reached and the model is not in the local cache: give a folder or a config.json"
    except errors.EntryNotFoundError:
        why = f"it has no {CONFIG} on the Hub, so that its architecture is not known"
    except errors.HFValidationError:
        why = "there is no such file or folder, and an id of the Hub is NAME or NAMESPACE/NAME"
    except (errors.HfHubHTTPError, OSError) as error:
        why = f"its {CONFIG} cannot be read from the Hub: {_one_line(error)}"
    raise ConfigurationError(f"model {name}: {why}")


def _answers(url: str) -> bool:
    """Whether a server, or the proxy before it, accepts a connection. Without this, huggingface_hub tries for long."""
    server = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(server.scheme)
    if proxy and not urllib.request.proxy_bypass(server.hostname or ""):
        server = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    answered: list[bool] = []

    def connect() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(
                (server.hostname or "", server.port or (80 if server.scheme == "http" else 443)), timeout=HUB_TIMEOUT
            ),
        ):
            answered.append(True)

    # A thread, because the timeout of a connection does not limit the look-up of the name.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return bool(answered)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json_text.read(path, limit=16 << 20, numbers=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not the configuration of a model: it has no keys")
    return config


def _library_of(config: dict[str, Any], name: str) -> str:
    if "model_type" in config or "auto_map" in config:
        return "transformers"
    if "architecture" in config and ("pretrained_cfg" in config or "num_features" in config):
        return "timm"
    raise ConfigurationError(
        f"the configuration of {name} does not name the library of the model: give --library_name "
        f"({' or '.join(LIBRARIES)})"
    )


def _of_transformers(name: str, path: Path, trust_remote_code: bool, token: str | None) -> nn.Module:
    import torch
    import transformers

    # The library's messages about tokens and templates have nothing to do with the model's size.
    transformers.logging.set_verbosity_error()
    local = Path(name).expanduser()
    # The file is at hand; only a model's own code needs more of the Hub.
    source = str(local) if local.exists() else name if trust_remote_code else str(path.parent)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, token=token)
        config.dtype = torch.float32
        with torch.device("meta"):
            model: nn.Module = _transformers_class(config, source, trust_remote_code, token)(config)
            return model
    # The library, and a model's own code, raise whatever they like.
    except Exception as error:
        hint = ". --trust_remote_code runs the model's own code" if "trust_remote_code" in str(error) else ""
        raise ConfigurationError(f"transformers cannot build {name} from {path}: {_one_line(error)}{hint}") from error


def _transformers_class(config: Any, source: str, trust_remote_code: bool, token: str | None) -> Any:
    """The class that the configuration names, of the library or of the model's own code; else the base model's."""
    import transformers

    architectures = config.architectures or []
    if trust_remote_code:
        for reference in (getattr(config, "auto_map", None) or {}).values():
            if isinstance(reference, str) and reference.rpartition(".")[2] in architectures:
                from transformers.dynamic_module_utils import get_class_from_dynamic_module

                return get_class_from_dynamic_module(reference, source, token=token)
    for architecture in architectures:
        found = getattr(transformers, architecture, None)
        if found is not None:
            return found
    return transformers.AutoModel.from_config


def _of_timm(name: str, path: Path) -> nn.Module:
    import timm
    import torch

    source = f"local-dir:{path.parent}" if Path(name).expanduser().exists() else f"hf-hub:{name}"
    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(source, pretrained=False)
            return model
    except Exception as error:
        raise ConfigurationError(f"timm cannot build {name} from {path}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """A foreign error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:297]}..." if len(text) > 300 else f"{type(error).__name__}: {text}"


def report(name: str, model: nn.Module, found: list[Footprint]) -> str:
    """The tables of the command."""
    from ..core.objects import convert_bytes

    count = sum(weight.numel() for weight in model.parameters())
    rows = [
        (
            row.dtype,
            convert_bytes(row.largest),
            convert_bytes(row.total),
            convert_bytes(row.training.total) if row.training else "-",
        )
        for row in found
    ]
    lines = [
        f"Memory of {name} ({type(model).__name__}, {count:,} parameters)",
        "",
        table(rows, ("dtype", "largest layer", "total size", "training with Adam")),
    ]
    trained = [(row.dtype, row.training) for row in found if row.training]
    if trained:
        details = [
            (dtype, *map(convert_bytes, (part.weights, part.copies, part.gradients, part.moments)))
            for dtype, part in trained
        ]
        headers = ("training", "weights", "16-bit copies", "gradients", "Adam's moments")
        lines += [
            "",
            table(details, headers),
            "",
            "Activations come on top: they depend on the batch. `accelerate plan` traces them.",
        ]
    else:
        lines.append("")
    if any(not row.training for row in found):
        lines.append("int8 and int4: as if every weight were quantised; layers that stay in 16 bits come on top.")
    return "\n".join(lines)


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`, or add it to `subparsers`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned.
    """
    description = (
        "Estimate the memory that a model needs for loading and for training. It is built from its configuration "
        "on the meta device: no weights are loaded. 1 KB is 1024 bytes."
    )
    if subparsers is None:
        made: argparse.ArgumentParser = Parser(prog="accelerate estimate-memory", description=description)
    else:
        made = subparsers.add_parser(
            "estimate-memory", description=description, allow_abbrev=False, formatter_class=Formatter
        )
        made.set_defaults(func=estimate_command)
    made.add_argument(
        "model_name",
        help="Folder with a config.json, the file itself, a name on the Hugging Face Hub, or module:function, which "
        "returns a torch.nn.Module.",
    )
    made.add_argument(
        "--library_name",
        "--library-name",
        choices=LIBRARIES,
        help="Library of the model, if the configuration does not name it.",
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
        "--trust-remote-code",
        action="store_true",
        help="Run Python code that is distributed with the model. Use it only for code that you have read.",
    )
    return made


# The name that every command has.
parser = estimate_command_parser


def estimate_command(args: argparse.Namespace) -> None:
    """Run the command with parsed arguments. Exits with 2 if the model cannot be built."""
    with exit_on(ConfigurationError, command="accelerate estimate-memory"):
        model = build(args.model_name, args.library_name, args.trust_remote_code)
    print(report(args.model_name, model, [footprint(model, dtype) for dtype in args.dtypes]))


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    estimate_command(estimate_command_parser().parse_args(argv))


# The functions of the API that scripts import from here.


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
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
    if is_available("transformers") and isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
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
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes + bytes // 2, "step": 2 * bytes}
    return {"model": -1, "optimizer": -1, "gradients": -1, "step": -1}


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return the rows of `accelerate estimate-memory`, from its parsed arguments.

    Returns:
        For each dtype: its name, the bytes of the largest layer, the bytes of the model, and what
        `estimate_training_usage` returns.
    """
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    unquantized = footprint(model, "float32").total
    found = [footprint(model, dtype) for dtype in args.dtypes]
    return [[row.dtype, row.largest, row.total, estimate_training_usage(unquantized, row.dtype)] for row in found]
