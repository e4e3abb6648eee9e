# SPDX-License-Identifier: Apache-2.0
"""Names that a package exports without importing their homes: a table, resolved at first use."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

ROOT = __name__.partition(".")[0]


def attach(
    module: str, exports: Mapping[str, Iterable[str]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `module`, which exports each home's names as its own.

    `exports` maps a home (a module path inside this package) to the names that live there; `submodules` are modules of
    `module` itself that may be reached as attributes. A name is resolved once and then is a plain attribute.

    Example:
        __getattr__, __dir__, __all__ = attach(__name__, {"core.trees": ["send_to_device"]})
    """
    homes = {name: f"{ROOT}.{home}" for home, names in exports.items() for name in names}
    children = frozenset(submodules)
    public = sorted({*homes, *children})

    def resolve(name: str) -> Any:
        if name in homes:
            value = getattr(_load(homes[name]), name)
        elif name in children:
            value = _load(f"{module}.{name}")
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module]), *public})

    return resolve, listing, public


def _load(module: str) -> ModuleType:
    """The module, imported without garbage collections: what an import makes stays, and torch leaves so much to look
    through that one collection costs more than all of this package.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()
