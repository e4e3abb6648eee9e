# SPDX-License-Identifier: Apache-2.0
"""What other packages add by entry points: strategies, transforms and precisions of their own, found by name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from .errors import ConfigurationError, suggestion

# kind -> the group of entry points under which a package registers it
GROUPS = {
    "strategy": "accelerate.strategies",
    "transform": "accelerate.transforms",
    "precision": "accelerate.precisions",
}


def names(kind: str) -> list[str]:
    """The names that installed packages have registered for a kind."""
    return sorted({entry.name for entry in metadata.entry_points(group=GROUPS[kind])})


def load(kind: str, name: str, own: Iterable[str] = ()) -> Any:
    """What a package registered under `name`. The error for an unknown one names those of this package, `own`, too.

    Raises ConfigurationError for a name that nobody has registered, that two packages have, or that does not load.
    """
    found = list(metadata.entry_points(group=GROUPS[kind], name=name))
    if not found:
        known = sorted([*own, *names(kind)])
        raise ConfigurationError(
            f"no installed package registers a {kind} {name!r} (entry points {GROUPS[kind]!r}); there are: "
            f"{', '.join(known) or 'none'}{suggestion(name, known)}"
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
            f"the {kind} {name!r} ({found[0].value}) does not load: {error}"
        ) from error
