# SPDX-License-Identifier: Apache-2.0
"""What is installed: optional packages, what other packages add to this one, and whose files these are."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version, parse

from .constants import STR_OPERATION_TO_FUNC
from .errors import ConfigurationError, suggestion
from .messages import PREFIX
from .version import API_VERSION, __version__

F = TypeVar("F", bound=Callable[..., Any])

# What other packages register by entry points: kind -> the group.
GROUPS = {
    "strategy": "accelerate.strategies",
    "transform": "accelerate.transforms",
    "precision": "accelerate.precisions",
}

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
    """Return whether a version compares to another as `operation` says.

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
    """Whether torch's version, without its local part (`+cpu`), compares to `version` as `operation` says."""
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


def extension_names(kind: str) -> list[str]:
    """The names that installed packages have registered for a kind."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUPS[kind])})


def load_extension(kind: str, name: str, own: Iterable[str] = ()) -> Any:
    """What a package registered under `name`. The error for an unknown one names those of this package, `own`, too.

    Raises ConfigurationError for a name that nobody has registered, that two packages have, or that does not load.
    """
    found = list(importlib.metadata.entry_points(group=GROUPS[kind], name=name))
    if not found:
        known = sorted([*own, *extension_names(kind)])
        raise ConfigurationError(
            f"no installed package registers a {kind} {name!r} (entry points {GROUPS[kind]!r}); "
            f"registered names: {', '.join(known) or 'none'}{suggestion(name, known)}"
        )
    if len({entry.value for entry in found}) > 1:
        owners = ", ".join(
            f"{entry.value} ({entry.dist.name if entry.dist else '?'})" for entry in found
        )
        raise ConfigurationError(
            f"several packages register a {kind} {name!r}: {owners}. Uninstall all but one"
        )
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the {kind} {name!r} ({found[0].value}) cannot be loaded: {error}"
        ) from error


FOLDER = Path(__file__).parent.parent
IMPLEMENTATION = f"independent implementation of the Accelerate API {API_VERSION}"
REMEDY = (
    "Run `pip uninstall -y accelerate` until it finds nothing, delete the folder if it still "
    "exists, and install the distribution that you want"
)


def warn_mixed() -> None:
    """Warn that files of another distribution lie among ours."""
    warnings.warn(
        f"{PREFIX}{FOLDER} contains the files of two distributions named accelerate, so imports may fail or behave "
        f"wrongly. {REMEDY}.",
        RuntimeWarning,
        stacklevel=2,
    )


def installation_problems() -> list[str]:
    """Compare our version with the metadata of the installed distributions: a sentence for each problem."""
    installed = importlib.metadata.distributions(name="accelerate")
    others = [
        f"{one.version} in {one.locate_file('')}" for one in installed if one.version != __version__
    ]
    if not others:
        return []
    return [
        f"the files in {FOLDER} are version {__version__}, but the metadata, from which client "
        f"packages read the version, belongs to {', '.join(others)}. Install this package again. "
        f"If the metadata belongs to another distribution: {REMEDY}"
    ]
