# SPDX-License-Identifier: Apache-2.0
"""Run a script or module in this process as `python script.py` would, without a second interpreter or extra frames."""

from __future__ import annotations

import os
import runpy
import sys
import types

from ..core import env
from .spec import Program

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
    is_module = program.kind == "module"
    if not sys.flags.safe_path and sys.path:
        if is_module:
            sys.path[0] = os.getcwd()
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(program.name))
    sys.argv[:] = [program.name, *program.args]
    _entered.append(program)
    try:
        if is_module:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.name, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        _hide_launcher_frames()
        raise


def _hide_launcher_frames() -> None:
    """Have the traceback of an uncaught exception begin at the script's own first frame."""
    inner = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        own = trace
        while own is not None and own.tb_frame.f_code is not become.__code__:
            own = own.tb_next
        while own is not None and own.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            own = own.tb_next
        # An error without a frame of the script has no traceback to keep.
        inner(kind, error.with_traceback(own), own)

    sys.excepthook = hook
