# SPDX-License-Identifier: Apache-2.0
"""Which optional packages are installed: one table by name. No package is imported to find out."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

from packaging.version import Version, parse

from .constants import STR_OPERATION_TO_FUNC

F = TypeVar("F", bound=Callable[..., Any])

# Packages whose distribution must be installed, as a module of the name alone may be something else; each with the
# name of the distribution. Any other package is available where its module is found.
DISTRIBUTIONS: dict[str, str] = {
    **{
        name: name
        for name in (
            "aim", "bitsandbytes", "datasets", "deepspeed", "peft", "ray", "timm", "torch_xla", "torchao", "torchdata",
            "torchvision", "transformers",
        )
    },
    "msamp": "ms-amp",
    "transformer_engine": "transformer-engine",
}  # fmt: skip


@functools.cache
def is_available(name: str) -> bool:
    """Whether an optional package is installed. A stray folder of its name does not count."""
    distribution = DISTRIBUTIONS.get(name)
    spec = importlib.util.find_spec(name)
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
    """Return the installed version of a distribution."""
    return parse(importlib.metadata.version(distribution))


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    """Return whether a version compares to another as `operation` states.

    Args:
        library_or_version: name of an installed package, or a parsed version.
        operation: one of "<", "<=", "==", "!=", ">=" and ">".
        requirement_version: the version on the right of the operation.

    Raises:
        ValueError: the operation is unknown.

    Example:
        >>> compare_versions("torch", ">=", "2.11")
        True
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(
            f"`operation` must be one of {list(STR_OPERATION_TO_FUNC)}, received {operation}"
        )
    if isinstance(library_or_version, str):
        found = version_of(library_or_version)
    else:
        found = library_or_version
    return STR_OPERATION_TO_FUNC[operation](found, parse(requirement_version))


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
