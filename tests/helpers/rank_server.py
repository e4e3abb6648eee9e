# SPDX-License-Identifier: Apache-2.0
"""The processes of `rank_pool`: a server that imports once and forks ranks and scripts, and a rank in a new process.

rank_server.py serve CONTROL CHANNEL PARENT
rank_server.py fresh END PARENT
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# What most cases import when they first use it: half a second of each, were it not here already.
PRELOADED = (
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "accelerate",
    "accelerate.accelerator",
    "accelerate.parallel.ddp.comm_hooks",
    "accelerate.parallel.fsdp.strategy",
    "accelerate.parallel.pipeline.strategy",
    "accelerate.utils",
)
_PR_SET_PDEATHSIG = 1
_OURS = ("rank_pool.py", "rank_server.py")


def _die_with(parent: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _load(name: str, file: str, path: list[str]) -> None:
    """Import the module of a case under the name that it has in the test process, its asserts rewritten by pytest."""
    sys.path[:] = path
    if name in sys.modules:
        return
    from _pytest.assertion.rewrite import rewrite_asserts

    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module: ModuleType = importlib.util.module_from_spec(spec)
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source, file)
    sys.modules[name] = module
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    for other in getattr(module, "PRELOADED", ()):
        # What the cases import themselves, and may be absent.
        with contextlib.suppress(ImportError):
            importlib.import_module(other)


def _run_case(content: bytes) -> Any:
    function, args, kwargs = pickle.loads(content)
    return function(*args, **kwargs)


def _outcome(content: bytes) -> dict[str, Any]:
    """What a rank reports: the pickled value, or the error."""
    try:
        return {"value": pickle.dumps(_run_case(content))}
    except BaseException as error:
        now = time.monotonic()
        from _pytest.outcomes import Skipped

        # The frames above the case's own are ours.
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).name in _OURS:
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
        what = traceback.format_exception_only(type(error), error)
        return {
            "error": {
                "time": now,
                "what": "".join(what).strip(),
                "trace": "".join(lines),
                "skipped": error.msg if isinstance(error, Skipped) else None,
            }
        }


def _be_rank(rank: int, connection: Connection, request: dict[str, Any]) -> None:
    """Run one case on this process and report; return once all ranks have."""
    folder = Path(request["folder"])
    for name, descriptor in (("out", 1), ("err", 2)):
        with open(folder / f"{rank}.{name}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    stacks = open(folder / f"{rank}.stacks", "w")  # noqa: SIM115 - open as long as the process lives
    _print_native_stacks()
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        # A process that is killed loses what lies in its buffers.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    _begin_alike(rank, request["dtype"])
    outcome = _outcome(request["content"])
    sys.stdout.flush()
    sys.stderr.flush()
    _send(connection, outcome)
    if "error" in outcome:
        # The others learn of it by the end of this process, should they wait for it.
        _end_now(1)
    connection.recv_bytes()


def _print_native_stacks() -> None:
    """Have torch print each native thread's stack on a fatal signal. faulthandler, enabled after this, is first."""
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)


def _begin_alike(rank: int, dtype: Any) -> None:
    """Random numbers that differ between ranks, as those of unseeded processes, but are the same in every run."""
    import numpy
    import torch

    torch.set_default_dtype(dtype)

    random.seed(1000 + rank)
    numpy.random.seed(1000 + rank)
    torch.manual_seed(1000 + rank)


def _end_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork(rank: int, end: int, request: dict[str, Any], close: list[int]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _die_with(parent)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in close:
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environments"][rank])
        _be_rank(rank, Connection(end), request)
        code = 0
    except EOFError:
        pass  # The test process has gone.
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing of the server's may run here: no exit handlers, no loop.
        _end_now(code)


def _fork_script(request: dict[str, Any], ends: list[int], close: list[int]) -> int:
    """The process id of a script's process, or 0 in that process. `ends`: its three standard streams."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    _die_with(parent)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in close:
        os.close(descriptor)
    for target, descriptor in enumerate(ends):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    return 0


def _main_module(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The code of a script, and the namespace of the `__main__` that it runs in."""
    path, *arguments = request["argv"]
    sys.argv = [path, *arguments]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([str(Path(path).resolve().parent), *given, *request["path"]])
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    # At its end the interpreter would collect all that the server has imported, for a second.
    atexit.register(gc.freeze)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__


def serve(control_end: int, channel_end: int, parent: int) -> dict[str, Any] | None:
    """Fork ranks and scripts on request, and say when they have ended, until the test process closes the connection.

    Returns:
        In the process of a script, the request for it; in the server None, at its end.
    """
    _die_with(parent)
    # Ctrl-C is for the test process, which then kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, channel = Connection(control_end), socket.socket(fileno=channel_end)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    _send(control, "ready")
    running: dict[int, int] = {}
    # Where the exit statuses of scripts are written, by process id.
    reports: dict[int, int] = {}
    while True:
        for ready in wait([control, *running]):
            if ready is not control:
                assert isinstance(ready, int)
                pid = running.pop(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                _kill_group(pid)
                if (report := reports.pop(pid, None)) is None:
                    _send(control, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})
                else:
                    _report_end(report, os.waitstatus_to_exitcode(status))
                continue
            try:
                request = _receive(control)
            except EOFError:
                return None
            _, ends, _, _ = socket.recv_fds(channel, 1, request["ends"])
            if request["do"] == "script":
                gc.collect()
                gc.freeze()
                report, *streams = ends
                pid = _fork_script(request, streams, [report, *running, *reports.values()])
                if not pid:
                    control.close()
                    channel.close()
                    return request
                running[os.pidfd_open(pid)] = pid
                reports[pid] = report
                for end in streams:
                    os.close(end)
                _send(control, {"pids": [pid]})
                continue
            try:
                _load(request["module"], request["file"], request["path"])
                _check_threads(request["module"])
            except BaseException:
                _send(
                    control,
                    {
                        "error": f"the rank server cannot import the module:\n{traceback.format_exc()}"
                    },
                )
            else:
                gc.collect()
                gc.freeze()
                shared = [control_end, channel_end, *running, *reports.values()]
                pids = [
                    _fork(rank, end, request, [*shared, *(other for other in ends if other != end)])
                    for rank, end in enumerate(ends)
                ]
                for pid in pids:
                    running[os.pidfd_open(pid)] = pid
                _send(control, {"pids": pids})
            for end in ends:
                os.close(end)


def _report_end(report: int, code: int) -> None:
    # Nobody may wait for it.
    with contextlib.suppress(BrokenPipeError):
        os.write(report, str(code).encode())
    os.close(report)


def _kill_group(pid: int) -> None:
    """End what a rank has left behind: workers of its loaders."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _check_threads(module: str) -> None:
    """A forked process has none of the threads of the server, and whatever locks they held stay locked."""
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        raise RuntimeError(
            f"{count} threads run after importing {module}: its cases need `ranks(..., fresh=True)`"
        )


def fresh(end: int, parent: int) -> None:
    """Be one rank in this new interpreter, and leave it the ordinary way."""
    _die_with(parent)
    connection = Connection(end)
    request = _receive(connection)
    try:
        _load(request["module"], request["file"], request["path"])
    except BaseException:
        trace = traceback.format_exc()
        error = {
            "time": time.monotonic(),
            "what": trace.splitlines()[-1],
            "trace": trace,
            "skipped": None,
        }
        _send(connection, {"error": error})
        _end_now(1)
    _be_rank(request["rank"], connection, request)


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[2:]]
    # The helpers' folder stands first on the path of a script; the test process says where it belongs.
    if sys.argv[1] == "serve":
        if (asked := serve(*arguments)) is not None:
            # Here, and not in a function, so that the script ends the way a script ends: with all of the interpreter.
            exec(*_main_module(asked))
    else:
        fresh(*arguments)
