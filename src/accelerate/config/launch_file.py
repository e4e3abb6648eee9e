# SPDX-License-Identifier: Apache-2.0
"""Launch configuration files: where they are, the keys they may hold, each value with its line; writing them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..core import env, json_text
from ..core.constants import FSDP_SHARDING_STRATEGY
from ..core.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from ..core.errors import ConfigurationError, MissingConfigurationError, suggestion
from ..core.files import atomic_write, read_regular
from ..core.option import Option, brief
from ..core.options import options

SAGEMAKER = "AMAZON_SAGEMAKER"
# What a file may hold at most; a launch takes a few kilobytes.
_SIZE = 256 << 10  # bytes
# distributed_type -> the switch of `accelerate launch` of the same meaning
SWITCHES = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
    "MULTI_GPU": "multi_gpu",
}
_KINDS = tuple(kind.value for kind in DistributedType)
# Keys that no flag of `accelerate launch` stands for.
CLUSTER_ONLY = (
    Option("compute_environment", "text", choices=tuple(kind.value for kind in ComputeEnvironment)),
    Option("distributed_type", "text", choices=_KINDS),
    Option("tpu_name", "text"),
    Option("tpu_zone", "text"),
    Option("command_file", "text"),
    Option("commands", "list"),
    Option("mpirun_ccl", "int", key="mpirun_config.mpirun_ccl"),
    # The API's files hold it with DeepSpeed's options; our own may hold it for every strategy.
    Option("deepspeed_accumulation", "int", key="deepspeed_config.gradient_accumulation_steps"),
)

SAGEMAKER_KEYS = (
    Option("compute_environment", "text", choices=tuple(kind.value for kind in ComputeEnvironment)),
    Option("distributed_type", "text", choices=tuple(kind.value for kind in SageMakerDistributedType)),
    Option("mixed_precision", "text", choices=options()["mixed_precision"].choices),
    Option("num_machines", "int"),
    *(Option(name, "switch") for name in ("use_cpu", "debug", "enable_cpu_affinity")),
    *(
        Option(name, "text")
        for name in (
            "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "gpu_ids", "base_job_name",
            "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file",
        )
    ),
)  # fmt: skip

# Spellings of older files. None: the key is gone and has no effect any more.
FORMER: dict[str, str | None] = {
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "fsdp_config.min_num_params": "fsdp_config.fsdp_min_num_params",
    "fsdp_config.fsdp_sync_module_state": "fsdp_config.fsdp_sync_module_states",
    "use_mps_device": None,
    "mpirun_config.num_processes": None,
}
FORMER_VALUES: dict[str, dict[Any, str]] = {
    "fsdp_config.fsdp_sharding_strategy": dict(enumerate(FSDP_SHARDING_STRATEGY, start=1)),
    "distributed_type": {"TPU": "XLA", "MPS": "NO"},
    "fp8_config.backend": {"FP8": "te"},
}


@functools.cache
def cluster_keys() -> dict[str, Option]:
    """Dotted key -> what it holds, for files of LOCAL_MACHINE."""
    table = {option.file_key: option for option in options().values() if option.file_key}
    table.update({option.file_key: option for option in CLUSTER_ONLY})
    return table


@functools.cache
def sagemaker_keys() -> dict[str, Option]:
    """Dotted key -> what it holds, for files of AMAZON_SAGEMAKER."""
    table = {option.name: option for option in SAGEMAKER_KEYS}
    table.update(
        {key: option for key, option in cluster_keys().items() if key.startswith("dynamo_config.")}
    )
    return table


def canonical(key: str, table: dict[str, Option]) -> str | None:
    """The key under which the table has it: itself, an older spelling, or with or without its section's prefix.

    The empty string for a key that is gone, None for one that never was.
    """
    if key in table:
        return key
    if key in FORMER:
        return FORMER[key] or ""
    section, dot, name = key.partition(".")
    # `fsdp_config` has options fsdp_..., `parallelism_config` has parallelism_config_...
    if not dot:
        return None
    for prefix in (section.removesuffix("config"), f"{section}_"):
        for spelling in (prefix + name, name.removeprefix(prefix)):
            if f"{section}.{spelling}" in table:
                return f"{section}.{spelling}"
    return None


def default_folder() -> Path:
    """Where configuration files live: HF_HOME, else XDG_CACHE_HOME, else ~/.cache, and the API's subfolders."""
    home = env.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "accelerate"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "accelerate"


def default_file() -> Path:
    """The configuration file used when none is named; it need not exist."""
    folder = default_folder()
    yaml = folder / "default_config.yaml"
    plain = folder / "default_config.json"
    if plain.is_file() and not yaml.is_file():
        return plain
    return yaml


class Setting(NamedTuple):
    """A value and where it came from: a flag, a variable, a line of a file, or the default."""

    value: Any
    origin: str


class LaunchFile(NamedTuple):
    """A file that was read and found right.

    data: its content with today's keys. values: option name -> value with its origin. notes: what was read
    under an older spelling.
    """

    path: Path
    data: dict[str, Any]
    values: dict[str, Setting]
    notes: Sequence[str] = ()

    @property
    def is_sagemaker(self) -> bool:
        """Whether the file configures a launch on Amazon SageMaker."""
        return self.data.get("compute_environment") == SAGEMAKER


def read(path: str | Path) -> LaunchFile:
    """Read and check a YAML or JSON file. ConfigurationError names file, line, key and the nearest valid one."""
    path = Path(path).expanduser()
    try:
        text = json_text.decode_text(read_regular(path, _SIZE))
    except FileNotFoundError:
        raise MissingConfigurationError(
            f"the configuration file {path} does not exist; `accelerate config` writes one"
        ) from None
    except (OSError, json_text.JSONTextError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigurationError(f"the configuration file {path} cannot be read: {why}") from None
    data, lines = _parse(text, path)
    return _Reader(path, lines).read(data)


def _parse(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping a file holds, and the line of each dotted key."""
    import yaml

    if path.suffix == ".json":
        text = text.replace("\t", " ")  # YAML has JSON's syntax, but no tabs
    try:
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            data = loader.construct_document(node)
        else:
            data = {}
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        raise ConfigurationError(
            f"{path}:{mark.line + 1}:{mark.column + 1}: not YAML: {error.problem}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from None
    if node is None:
        raise ConfigurationError(f"{path}: the file is empty; `accelerate config` writes one")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{path}:{node.start_mark.line + 1}: expected `key: value` lines")
    return data, _lines(node, path)


def _lines(node: Any, path: Path, prefix: str = "") -> dict[str, int]:
    """Dotted key -> line, two levels deep. A key that stands twice is an error."""
    lines: dict[str, int] = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if name in lines:
            raise ConfigurationError(
                f"{path}:{line}: the key {name} appears twice, first on line {lines[name]}"
            )
        lines[name] = line
        if not prefix and value.id == "mapping":
            lines.update(_lines(value, path, f"{name}."))
    return lines


class _Reader:
    """One pass over a file's mapping: each key found in the table, each value in its type."""

    def __init__(self, path: Path, lines: dict[str, int]) -> None:
        self.path = path
        self.lines = lines
        self.notes: list[str] = []
        self.values: dict[str, Setting] = {}
        self.data: dict[str, Any] = {}
        self.table: dict[str, Option] = {}

    def at(self, key: str) -> str:
        line = self.lines.get(key)
        if line:
            return f"{self.path}:{line}"
        return str(self.path)

    def read(self, data: dict[str, Any]) -> LaunchFile:
        sagemaker = data.get("compute_environment") == SAGEMAKER
        self.table = sagemaker_keys() if sagemaker else cluster_keys()
        inside = {key.partition(".")[0] for key in self.table if "." in key}
        for key, value in data.items():
            if key in inside:
                self._section(str(key), value)
            elif sagemaker and key == "additional_args":
                self.data["additional_args"] = value
            elif key == "fp16" and "mixed_precision" not in data:
                self.notes.append(f"{self.at('fp16')}: fp16 is now mixed_precision")
                self._one(
                    "mixed_precision", "fp16" if value in (True, "true", "yes") else "no", "fp16"
                )
            elif key != "fp16":
                self._one(str(key), value, str(key))
        if not sagemaker:
            self._derive()
        return LaunchFile(self.path, self.data, self.values, self.notes)

    def _section(self, section: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, dict):
            raise ConfigurationError(
                f"{self.at(section)}: {section} must hold `key: value` lines, not {brief(value)}"
            )
        self.data.setdefault(section, {})
        for key, inner in value.items():
            self._one(f"{section}.{key}", inner, f"{section}.{key}")

    def _one(self, key: str, value: Any, written: str) -> None:
        name = canonical(key, self.table)
        if name is None:
            raise ConfigurationError(f"{self.at(written)}: unknown key {key}{self._near(key)}")
        if name == "":
            self.notes.append(f"{self.at(written)}: {key} no longer has an effect and was removed")
            return
        if key in FORMER:
            self.notes.append(f"{self.at(written)}: {key} is now {name}")
        former = FORMER_VALUES.get(name, {})
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value in former:
            self.notes.append(f"{self.at(written)}: {key} {value} is now {former[value]}")
            value = former[value]
        option = self.table[name]
        try:
            value = option.convert(None if value == "" else value, where=name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.at(written)}: {error}") from None
        section, _, inner = name.rpartition(".")
        if section:
            target = self.data.setdefault(section, {})
        else:
            target = self.data
        target[inner] = value
        if value is not None:
            self.values[option.name] = Setting(value, self.at(written))

    def _near(self, key: str) -> str:
        section, dot, name = key.partition(".")
        if dot:
            sections = sorted(
                other.partition(".")[2] for other in self.table if other.startswith(f"{section}.")
            )
            return suggestion(name, sections) or f"; known keys: {', '.join(sections)}"
        sections = [other.partition(".")[0] for other in self.table]
        return suggestion(key, sections) or (
            "; `accelerate config show --all` lists the options, and `accelerate config` writes a file"
        )

    def _derive(self) -> None:
        """Switches that the API's files express by distributed_type and by sections."""
        kind = self.values.get("distributed_type")
        if kind is not None and kind.value in SWITCHES:
            self.values.setdefault(SWITCHES[kind.value], Setting(True, kind.origin))
        if self.data.get("parallelism_config"):
            self.values.setdefault(
                "use_parallelism_config", Setting(True, self.at("parallelism_config"))
            )
        accumulation = self.values.pop("deepspeed_accumulation", None)
        if accumulation is not None:
            self.values.setdefault("gradient_accumulation_steps", accumulation)


def text_of(path: Path, data: dict[str, Any]) -> str:
    """Return a configuration as a file has it: JSON if the name of the file ends in .json, else YAML."""
    settings = {
        key: value for key, value in sorted(data.items()) if value is not None and value != {}
    }
    if path.suffix == ".json":
        return json.dumps(settings, indent=2, sort_keys=True) + "\n"
    import yaml

    text: str = yaml.safe_dump(settings)
    return text


def write(path: str | Path, data: dict[str, Any]) -> Path:
    """Write a configuration atomically, and return its path."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "w") as file:
        file.write(text_of(path, data))
    return path
