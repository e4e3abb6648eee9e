# SPDX-License-Identifier: Apache-2.0
"""Which optional packages are here: one table, asked by name. No package is imported to find out."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from packaging.version import Version, parse

F = TypeVar("F", bound=Callable[..., Any])

# name asked -> (module to look for, distribution whose metadata must exist; None where the module is enough)
PACKAGES: dict[str, tuple[str, str | None]] = {
    "aim": ("aim", "aim"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "boto3": ("boto3", None),
    "clearml": ("clearml", None),
    "comet_ml": ("comet_ml", None),
    "datasets": ("datasets", "datasets"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "dvclive": ("dvclive", None),
    "import_timer": ("import_timer", None),
    "lomo_optim": ("lomo_optim", None),
    "matplotlib": ("matplotlib", None),
    "megatron": ("megatron", None),
    "mlflow": ("mlflow", None),
    "msamp": ("msamp", "ms-amp"),
    "pandas": ("pandas", None),
    "peft": ("peft", "peft"),
    "pynvml": ("pynvml", None),
    "amdsmi": ("amdsmi", None),
    "pytest": ("pytest", None),
    "ray": ("ray", "ray"),
    "rich": ("rich", None),
    "sagemaker": ("sagemaker", None),
    "schedulefree": ("schedulefree", None),
    "swanlab": ("swanlab", None),
    "tensorboard": ("tensorboard", None),
    "tensorboardX": ("tensorboardX", None),
    "timm": ("timm", "timm"),
    "torch_xla": ("torch_xla", "torch_xla"),
    "torchao": ("torchao", "torchao"),
    "torchdata": ("torchdata", "torchdata"),
    "torchvision": ("torchvision", "torchvision"),
    "trackio": ("trackio", None),
    "transformer_engine": ("transformer_engine", "transformer-engine"),
    "transformers": ("transformers", "transformers"),
    "triton": ("triton", None),
    "wandb": ("wandb", None),
}

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@functools.cache
def is_available(name: str) -> bool:
    """Whether an optional package of the table is installed. A stray folder of its name does not count."""
    module, distribution = PACKAGES.get(name, (name, None))
    spec = importlib.util.find_spec(module)
    if spec is None or (spec.origin is None and distribution is None and spec.loader is None):
        return False
    if distribution is None:
        return True
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def version_of(distribution: str) -> Version:
    return parse(importlib.metadata.version(distribution))


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a library's installed version (or a version given) stands in `operation` to `requirement_version`."""
    if operation not in OPERATORS:
        raise ValueError(f"`operation` must be one of {list(OPERATORS)}, received {operation}")
    found = version_of(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return OPERATORS[operation](found, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version without its local part (`+cpu`) stands in `operation` to `version`."""
    import torch

    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)


def required(name: str, function: F) -> F:
    """`function`, with a clear ImportError at the call where package `name` is missing."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_available(name):
            raise ImportError(f"{function.__name__} needs the package {name}: pip install {name}")
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
