# SPDX-License-Identifier: Apache-2.0
"""The environment, crossed in this one place: one table of fields and variables; read, publish, patch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .errors import ConfigurationError

T = TypeVar("T")

# field -> variable. What the launcher publishes, the library reads back under the same field.
VARIABLES: dict[str, str] = {
    # a run
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_cpu": "ACCELERATE_USE_CPU",
    "torch_device": "ACCELERATE_TORCH_DEVICE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "debug": "ACCELERATE_DEBUG_MODE",
    "debug_timeout": "ACCELERATE_DEBUG_TIMEOUT",
    "exact": "ACCELERATE_EXACT",
    "strategy": "ACCELERATE_STRATEGY",
    "transforms": "ACCELERATE_TRANSFORMS",
    "config_file": "ACCELERATE_CONFIG_FILE",
    "log_level": "ACCELERATE_LOG_LEVEL",
    "cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    "oversubscribe": "ACCELERATE_OVERSUBSCRIBE",
    "allow_cp_standalone": "ACCELERATE_ALLOW_CP_STANDALONE",
    "fork_launched": "FORK_LAUNCHED",
    "downcast_bf16": "ACCELERATE_DOWNCAST_BF16",
    # compile
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "dynamo_mode": "ACCELERATE_DYNAMO_MODE",
    "dynamo_use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "dynamo_use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    # strategies
    "use_fsdp": "ACCELERATE_USE_FSDP",
    "use_deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "use_megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
    "use_parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    # who am I
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "omp_num_threads": "OMP_NUM_THREADS",
}

# Fields and variables that are read as something else than text. A run checks them all at its start, also those that
# only several processes would need: a value that cannot be read is a mistake, whoever needs it.
_FLAGS = (
    "use_cpu", "debug", "exact", "cpu_affinity", "allow_cp_standalone", "fork_launched", "downcast_bf16",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation",
    "use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config",
    "ACCELERATE_INIT_INCLUDE_BUFFERS", "ACCELERATE_USE_SAGEMAKER",
    "ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD",
    "FSDP_OFFLOAD_PARAMS", "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
)  # fmt: skip
# (least, greatest) that is accepted.
_NUMBERS: dict[str, tuple[int, int | None]] = {
    "rank": (0, None),
    "world_size": (1, None),
    "local_rank": (0, None),
    "local_world_size": (1, None),
    "node_rank": (0, None),
    "master_port": (0, 65535),
    "restart_count": (0, None),
    "gradient_accumulation_steps": (1, None),
    "ACCELERATE_NUM_PROCESSES": (1, None),
    "ACCELERATE_NUM_MACHINES": (1, None),
    "ACCELERATE_MACHINE_RANK": (0, None),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": (0, 3),
    "FSDP_MIN_NUM_PARAMS": (0, None),
    "PARALLELISM_CONFIG_PP_NUM_MICROBATCHES": (1, None),
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": (1, None),
    "FSDP_VERSION": (1, 2),
    **{f"PARALLELISM_CONFIG_{name}_SIZE": (1, None) for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP", "PP")},
}
_DECIMALS = ("debug_timeout", "ACCELERATE_GRADIENT_CLIPPING")

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def variable(field: str) -> str:
    """The variable of a field of the table; any other name is taken as a variable itself."""
    return VARIABLES.get(field, field)


def get(field: str, default: str | None = None) -> str | None:
    """The text of a field's variable; an empty variable counts as unset."""
    return os.environ.get(variable(field)) or default


def get_flag(field: str, default: bool = False) -> bool:
    text = get(field)
    return default if text is None else parse_bool(text, where=variable(field))


def get_int(field: str) -> int | None:
    text = get(field)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{variable(field)}={text!r} is not a whole number") from None


def get_float(field: str) -> float | None:
    text = get(field)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{variable(field)}={text!r} is not a number") from None


def check_run() -> None:
    """Check the typed variables of a run. ConfigurationError names the variable, its value and what is accepted."""
    for field in _DECIMALS:
        if get(field) != "auto":
            get_float(field)
    for variable_name, limits in _typed().items():
        text = os.environ.get(variable_name)
        if not text or text == "auto":
            continue
        if limits is None:
            parse_bool(text, where=variable_name)
            continue
        least, greatest = limits
        accepted = f"{least} to {greatest}" if greatest is not None else f"{least} or more"
        try:
            number = int(text)
        except ValueError:
            raise ConfigurationError(
                f"{variable_name}={text[:100]!r} is not a whole number: use {accepted}, or unset it"
            ) from None
        if number < least or (greatest is not None and number > greatest):
            raise ConfigurationError(f"{variable_name}={text[:100]!r} is out of range: use {accepted}, or unset it")


@functools.cache
def _typed() -> dict[str, tuple[int, int | None] | None]:
    """{variable: its limits, None for a flag}."""
    found: dict[str, tuple[int, int | None] | None] = {variable(field): None for field in _FLAGS}
    return found | {variable(field): limits for field, limits in _NUMBERS.items()}


def all_with_prefix(prefix: str) -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith(prefix)}


def publish(values: Mapping[str, Any]) -> None:
    """Set fields for this process and its children. None removes one."""
    for field, value in values.items():
        if value is None:
            os.environ.pop(variable(field), None)
        else:
            os.environ[variable(field)] = as_text(value)


def child_environment(extra: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A copy of this environment with fields changed, for a process to be started. None removes one."""
    env = dict(os.environ)
    for field, value in (extra or {}).items():
        if value is None:
            env.pop(variable(field), None)
        else:
            env[variable(field)] = as_text(value)
    return env


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def parse_bool(text: str, where: str = "value") -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    raise ConfigurationError(f"{where}={shown!r} is not a truth value: use one of true, false, yes, no, on, off, 1, 0")


# The API's own helpers, public as accelerate.utils.*


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 (or True or False with `to_bool`) for the usual words of truth; ValueError for any other."""
    found = parse_bool(value)
    return found if to_bool else int(found)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The first variable of `env_keys` that holds a number of at least 0, else `default`."""
    for key in env_keys:
        found = int(os.environ.get(key, -1))
        if found >= 0:
            return found
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    return get_flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the named libraries that this process has imported already."""
    import sys

    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """`NAME=value` lines for an environment file; what could break a line is left out with a warning."""
    import warnings

    lines = []
    forbidden = (";", "\n", "<", ">", " ")
    for key, value in current_env.items():
        text = str(value)
        if text and key and not any(char in key + text for char in forbidden):
            lines.append(f"{key}={text}\n")
        else:
            warnings.warn(f"{key}={text!r} is left out: it holds a character that would break the environment line")
    return lines


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """An empty environment inside the block; the former one afterwards, whatever the block set."""
    saved = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Variables set (upper-cased) inside the block and put back afterwards."""
    names = {key.upper(): str(value) for key, value in kwargs.items()}
    saved = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, text in saved.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorator of a function, or of a test class: ACCELERATE_* variables set inside are gone afterwards."""
    if inspect.isclass(func_or_cls):
        for name, member in list(vars(func_or_cls).items()):
            if callable(member) and (name.startswith("test") or name in ("setUp", "tearDown", "setup_method")):
                setattr(func_or_cls, name, _purging(member))
        return func_or_cls
    return _purging(func_or_cls)  # type: ignore[arg-type, return-value]


def _purging(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        saved = all_with_prefix("ACCELERATE_")
        try:
            return function(*args, **kwargs)
        finally:
            for name in all_with_prefix("ACCELERATE_"):
                del os.environ[name]
            os.environ.update(saved)

    return wrapper
