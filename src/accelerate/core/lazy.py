# SPDX-License-Identifier: Apache-2.0
"""Names that a package exports without importing their homes: a table, resolved at first use."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

ROOT = __name__.partition(".")[0]
# Public names that neither the package nor its `utils` exports, and the modules that define them.
_DEFINED_IN = {
    **dict.fromkeys(["AcceleratorState", "GradientState", "PartialState"], "state"),
    **dict.fromkeys(
        ["DataLoaderDispatcher", "DataLoaderShard", "DataLoaderStateMixin"], "data_loader"
    ),
    **dict.fromkeys(
        ["AlignDevicesHook", "ModelHook", "SequentialHook", "add_hook_to_module"], "hooks"
    ),
    **dict.fromkeys(["LOGGER_TYPE_TO_CLASS", "GeneralTracker", "filter_trackers"], "tracking"),
    **dict.fromkeys(["load_accelerator_state", "save_accelerator_state"], "checkpointing"),
    **dict.fromkeys(["load_custom_state", "save_custom_state"], "checkpointing"),
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
}

# The other distribution of this name has a module where this one has a package. The file exists if pip installed one
# over the other, in either order.
if os.path.exists(os.path.join(os.path.dirname(os.path.dirname(__file__)), "tracking.py")):
    from .imports import warn_mixed

    warn_mixed()


def attach(
    module: str,
    exports: Mapping[str, Iterable[str]],
    submodules: Iterable[str] = (),
    all_public: bool = False,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `module`, which exports each home's names as its own.

    `exports` maps a home (a module path inside this package) to the names that live there; `submodules` are modules of
    `module` itself that may be reached as attributes. A name is resolved once and then is a plain attribute. With
    `all_public`, and in the modules of `utils`, every other public name can be imported too; see `public_names`.

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
        elif all_public or module.startswith(f"{ROOT}.utils."):
            value = public_name(module, name)
        else:
            raise _missing(module, name, public)
        setattr(sys.modules[module], name, value)
        return value

    return resolve, lambda: sorted({*vars(sys.modules[module]), *public}), public


def public_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of an API module from which every public name of the package can be imported.

    Scripts import names from the API module that uses them, not only from their own:
    `from accelerate.accelerator import DataLoaderConfiguration`.

    Example:
        if not TYPE_CHECKING:
            __getattr__ = public_names(__name__)
    """
    return functools.partial(public_name, module)


def public_name(module: str, name: str) -> Any:
    """Return what the package or its `utils` exports under this name; AttributeError, in the words of `module`."""
    if name in _DEFINED_IN:
        return getattr(_load(f"{ROOT}.{_DEFINED_IN[name]}"), name)
    # `from package import submodule` looks for an attribute first, which must not import all modules of `utils`.
    is_package = "__path__" in vars(sys.modules[module])
    if name.startswith("_") or (
        is_package and importlib.util.find_spec(f"{module}.{name}") is not None
    ):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    known = [*_DEFINED_IN]
    for package in (ROOT, f"{ROOT}.utils"):
        exporting = _load(package)
        if name in exporting.__all__:
            return getattr(exporting, name)
        known += exporting.__all__
    raise _missing(module, name, known)


def _missing(module: str, name: str, known: list[str]) -> AttributeError:
    """The error for a name that does not exist, with our version and the nearest name."""
    from .errors import suggestion
    from .version import implemented

    if name.startswith("_"):
        hint = ""
    else:
        hint = f" ({implemented()}{suggestion(name, known, '; did you mean {}?')})"
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


# Threads that import modules which import each other may get one that is not complete.
_IMPORTING = threading.RLock()


def _load(module: str) -> ModuleType:
    """Import a module with the garbage collector disabled, in one thread at a time.

    Imported objects are not garbage, and with torch loaded one collection takes longer than importing this package.
    """
    with _IMPORTING:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return importlib.import_module(module)
        finally:
            if collecting:
                gc.enable()
