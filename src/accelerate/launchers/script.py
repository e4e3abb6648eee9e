# SPDX-License-Identifier: Apache-2.0
"""Run a script or module in this process as `python script.py` would, without a second interpreter or extra frames."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from pathlib import Path
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from .spec import Program

# Modules stay alive with their namespaces: the code that called us still runs in the former __main__.
_former_main: list[types.ModuleType] = []
_entered: list[Program] = []


def is_entered() -> bool:
    """Whether this process has begun to run a script."""
    return bool(_entered)


def become(program: Program, variables: dict[str, str | None]) -> None:
    """Set the variables and run the program here. Another program replaces this process."""
    env.publish(variables)
    if program.kind == "program":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(program.name, program.argv())
    elif program.kind == "module":
        _run(*_module(program.name), program)
    else:
        _run(*_script(program.name), program)


def _script(path: str) -> tuple[Any, types.ModuleType, str]:
    """Code, new __main__ and first search path of a script, a folder or a zip file with a __main__.py."""
    if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise ConfigurationError(f"{path!r} contains no __main__.py")
        return _from_spec(spec, path)
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    return code, main, os.path.dirname(os.path.realpath(path))


def _module(name: str) -> tuple[Any, types.ModuleType, str]:
    # The search path must be the module's own before its parent packages are imported.
    _set_search_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ConfigurationError(f"{name!r} is not a module that can be started")
    return _from_spec(spec, os.getcwd())


def _from_spec(spec: importlib.machinery.ModuleSpec, search: str) -> tuple[Any, types.ModuleType, str]:
    code = spec.loader.get_code(spec.name) if spec.loader is not None else None  # type: ignore[attr-defined]
    if code is None:
        raise ConfigurationError(f"{spec.name!r} contains no code that can be started")
    main = types.ModuleType("__main__")
    main.__file__, main.__loader__, main.__package__, main.__spec__ = spec.origin, spec.loader, spec.parent, spec
    main.__dict__["__cached__"] = spec.cached
    return code, main, search


def _set_search_path(folder: str) -> None:
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = folder


def _run(code: Any, main: types.ModuleType, search: str, program: Program) -> None:
    main.__dict__["__builtins__"] = __builtins__
    _former_main.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    # `python -m` shows the module's file as the first argument.
    first = str(main.__file__) if program.kind == "module" else program.name
    sys.argv[:] = [first, *program.args]
    _set_search_path(search)
    _entered.append(program)
    try:
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        _hide_launcher_frames(code)
        raise


def _hide_launcher_frames(code: types.CodeType) -> None:
    """Have the traceback of an uncaught exception begin at the script's own first frame."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        own = trace
        while own is not None and own.tb_frame.f_code is not code:
            own = own.tb_next
        # An error without a frame of the script has no traceback to keep.
        inner(kind, error.with_traceback(own), own)

    sys.excepthook = hook
