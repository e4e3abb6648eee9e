# SPDX-License-Identifier: Apache-2.0
"""Run a function of a test on several ranks of this machine: forked from a process that has imported torch already.

A pytest process (each worker of pytest-xdist) keeps one *rank server* (`rank_server.py`), which imports torch,
accelerate and the test modules once. Each case gets ranks of its own, forked from the server within milliseconds: no
state of one case can reach another, and a rank that hangs or dies takes nothing with it.

A test that runs on the ranks themselves is decorated; its parameters are those of any test, and sent with pickle:

    @on_ranks(2, 4)
    @pytest.mark.parametrize("precision", ["no", "bf16"])
    def test_matches_single_process(precision, tmp_path):    # test_matches_single_process[4-bf16], and so on
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        ...

A test that runs in the test process uses the fixture `ranks`, which returns what the ranks return:

    def test_resume(ranks, tmp_path):
        ranks(2).run(first_half, tmp_path)
        losses = ranks(4).run(second_half, tmp_path)

A test module names in `PRELOADED` what its cases import late and slowly (models of transformers): the server imports
that once, the test process never.

Where the first import matters (variables that a library reads when it is imported, exit codes, the interpreter's end),
`fresh=True` starts new interpreters instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import operator
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

SERVER = Path(__file__).with_name("rank_server.py")
LARGEST = 4
# Seconds until the ranks of a case are killed, unless it names a limit; at latest so long before pytest's own limit.
LIMIT = 120.0
MARGIN = 10.0
# Seconds that the other ranks have to end after the first has failed, and in which all that have returned must end.
GRACE = 5.0
LEAVE = 20.0
# In the report of a rank whose crash was in a thread without Python: one of gloo's. conftest.py repeats such a case.
NATIVE_CRASH = "the crash was in a native thread"
# Seconds in which a rank writes its stacks down, and in which a server starts.
STACKS = 2.0
START = 150.0
# What a launch outside may have left in the environment.
_FOREIGN = ("ACCELERATE_", "TORCHELASTIC_")
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class RankFailure(AssertionError):
    """A case that failed on a rank.

    Attributes:
        rank: the rank that failed first; of a case that reached its limit, the first that had not returned.
        reason: "error", "exit" (the process ended by itself) or "timeout".
    """

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason


@dataclass
class Output:
    """What one rank has printed."""

    stdout: str
    stderr: str


@dataclass
class _Rank:
    """One rank of a running case, and how it ended."""

    rank: int
    connection: Connection
    folder: Path
    pid: int = 0
    value: Any = None
    error: dict[str, Any] | None = None
    status: int | None = None
    state: str = "runs"
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{self.rank}.{name}").read_text(errors="replace")
        return ""


class RankPool:
    """The rank server of this pytest process. Started by the first case, replaced when it has ended."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._channel: socket.socket | None = None

    @classmethod
    @functools.cache
    def shared(cls) -> RankPool:
        """The one that all tests of this process use."""
        pool = cls()
        atexit.register(pool.close)
        return pool

    def close(self) -> None:
        """End the server, and with it whatever ranks are left."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        for end in (self._control, self._channel):
            if end is not None:
                end.close()
        self._server = self._control = self._channel = None

    def _start(self) -> Connection:
        if self._server is not None and self._server.poll() is None and self._control is not None:
            return self._control
        self.close()
        control, theirs = socket.socketpair()
        channel, their_channel = socket.socketpair()
        env = environment(None)
        # Asking the driver for its devices would make the GPU unusable in forked processes.
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        with theirs, their_channel:
            descriptors = (theirs.fileno(), their_channel.fileno())
            self._server = subprocess.Popen(
                [sys.executable, str(SERVER), "serve", *map(str, descriptors), str(os.getpid())],
                pass_fds=descriptors, env=env, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._control, self._channel = Connection(control.detach()), channel
        if not self._control.poll(START):
            self.close()
            raise RuntimeError(f"the rank server did not start within {START} s")
        _receive(self._control)
        return self._control

    def fork(self, request: dict[str, Any], ends: list[int], what: str = "ranks") -> list[int]:
        """The process ids of new ranks, or of a script; `ends` are the descriptors that they get."""
        control = self._start()
        assert self._channel is not None
        _send(control, {"do": what, **request, "ends": len(ends)})
        socket.send_fds(self._channel, [b"."], ends)
        answer = _receive(control)
        while "status" in answer:
            # A rank of an earlier case, which was killed.
            answer = _receive(control)
        if "error" in answer:
            raise RankFailure(answer["error"], 0, "error")
        return list(answer["pids"])

    def ended(self) -> Connection:
        """Where the server says that ranks have ended: `{"pid": ..., "status": ...}`."""
        assert self._control is not None
        return self._control


class Ranks:
    """`nproc` ranks for one function at a time. `outputs` has what they printed in the last run, in rank order.

    Args:
        pool: the server that forks them.
        nproc: the number of ranks, 1 to 4.
        fresh: new interpreters instead of forked processes: slower by the import of torch, and they end the way a
            script ends.
        deadline: a time of `time.monotonic()` at which every run of these ranks is over.
    """

    def __init__(
        self, pool: RankPool, nproc: int, fresh: bool = False, deadline: float = float("inf")
    ) -> None:
        if not 1 <= nproc <= LARGEST:
            raise ValueError(f"nproc={nproc}: a test runs on 1 to {LARGEST} ranks")
        self._pool = pool
        self._nproc = nproc
        self._fresh = fresh or not hasattr(os, "pidfd_open")
        self._deadline = deadline
        self.outputs: list[Output] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str | None] | None = None,
        timeout: float = LIMIT,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on each rank; what the ranks return, in rank order.

        Each rank starts with the variables of torchrun (none where it is alone), random numbers seeded by its rank,
        the folder and the default dtype of the test process, and all else as after importing torch, accelerate and the
        module of the function. It makes its process group itself, as a script does. What ranks print becomes output
        of the test.

        Args:
            function: a function at the top level of a module, sent by its name.
            args, kwargs: its arguments, sent with pickle.
            env: environment variables to set; None removes one.
            timeout: seconds until all ranks are killed; less where pytest's own limit would come first.

        Raises:
            RankFailure: a rank raised an error, ended by itself, or did not return in time. The message has the
                traceback of the rank that failed first, and each rank's stacks where they hang.
            TypeError: the function or an argument cannot be sent.
        """
        __tracebackhide__ = True
        job = _job(function, args, kwargs)
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            with self._started(Path(folder), job, env) as ranks:
                limit = round(min(timeout, self._deadline - time.monotonic()), 1)
                reason = self._follow(ranks, limit)
            self.outputs = [Output(rank.read("out"), rank.read("err")) for rank in ranks]
            failure = _failure(ranks, reason, limit)
            skipped = [
                rank.error["skipped"]
                for rank in ranks
                if rank.error and rank.error["skipped"] is not None
            ]
        if skipped and reason == "error":
            pytest.skip(skipped[0])
        if failure is not None:
            raise failure
        self._show()
        return [rank.value for rank in ranks]

    def _show(self) -> None:
        for rank, output in enumerate(self.outputs):
            for stream, text in ((sys.stdout, output.stdout), (sys.stderr, output.stderr)):
                if text:
                    print(f"--- rank {rank}\n{text}", file=stream, end="")

    @contextlib.contextmanager
    def _started(
        self, folder: Path, job: dict[str, Any], env: Mapping[str, str | None] | None
    ) -> Iterator[list[_Rank]]:
        # This process hosts the rendezvous store, so that its port cannot be taken between choice and use.
        alone = self._nproc == 1
        store = None if alone else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pairs = [socket.socketpair() for _ in range(self._nproc)]
        ranks = [
            _Rank(number, Connection(mine.detach()), folder)
            for number, (mine, _) in enumerate(pairs)
        ]
        environments = [
            rank_environment(rank, self._nproc, store, env) for rank in range(self._nproc)
        ]
        request = {
            **job,
            "folder": str(folder),
            "cwd": os.getcwd(),
            "dtype": torch.get_default_dtype(),
        }
        try:
            try:
                if self._fresh:
                    for rank, (_, theirs) in zip(ranks, pairs, strict=True):
                        _start_fresh(
                            rank,
                            theirs.fileno(),
                            {**request, "rank": rank.rank},
                            environments[rank.rank],
                        )
                else:
                    request |= {"environments": environments}
                    pids = self._pool.fork(request, [theirs.fileno() for _, theirs in pairs])
                    for rank, pid in zip(ranks, pids, strict=True):
                        rank.pid = pid
            finally:
                for _, theirs in pairs:
                    theirs.close()
            yield ranks
        except BaseException:
            self._kill(ranks, stacks=False)
            raise
        finally:
            for rank in ranks:
                rank.connection.close()
            del store

    def _follow(self, ranks: list[_Rank], limit: float) -> str:
        """Wait for all ranks; why it is over: "", "error", "exit" or "timeout"."""
        deadline, reason = time.monotonic() + limit, ""
        while any(rank.state == "runs" for rank in ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                self._kill([rank for rank in ranks if rank.state == "runs"], stacks=True)
                reason = reason or "timeout"
                break
            self._hear(ranks, left)
            failed = next((rank for rank in ranks if rank.state in ("error", "exit")), None)
            if failed is not None and not reason:
                # The others cannot go on without it; what they wait for is of use only where they do not notice.
                deadline, reason = min(deadline, time.monotonic() + GRACE), failed.state
        # The exit status of a rank whose connection has closed is on its way.
        deadline = time.monotonic() + GRACE
        while any(rank.state == "closed" for rank in ranks) and time.monotonic() < deadline:
            self._hear(ranks, deadline - time.monotonic())
        if not reason:
            reason = self._let_go(ranks)
        self._kill([rank for rank in ranks if rank.status is None], stacks=False)
        return (
            "exit" if reason == "error" and any(rank.state == "exit" for rank in ranks) else reason
        )

    def _let_go(self, ranks: list[_Rank]) -> str:
        """Let the ranks end, all of which have returned, or ended by themselves; what went wrong, if anything."""
        # Connections stay open until the last rank has what it waits for.
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(b"end")
        deadline = time.monotonic() + LEAVE
        while any(rank.status is None for rank in ranks) and time.monotonic() < deadline:
            self._hear(ranks, deadline - time.monotonic())
        if late := [rank for rank in ranks if rank.status is None]:
            self._kill(late, stacks=True)
            return "timeout"
        for rank in ranks:
            if rank.state == "closed" or rank.status:
                rank.state = "exit"
        return "exit" if any(rank.state == "exit" for rank in ranks) else ""

    def _hear(self, ranks: list[_Rank], seconds: float) -> None:
        """Take in what ranks have sent, and who has ended."""
        if self._fresh:
            # Processes of our own: looked at often, since nothing tells of their end.
            seconds = min(seconds, 0.02)
        open_ones = {rank.connection: rank for rank in ranks if rank.state == "runs"}
        control = [] if self._fresh else [self._pool.ended()]
        for ready in wait([*open_ones, *control], seconds):
            if ready in open_ones:
                rank = open_ones[ready]
                try:
                    message = _receive(rank.connection)
                except (EOFError, OSError):
                    # Its process has ended or is about to: the exit status says how.
                    rank.state = "closed"
                    continue
                rank.state = "error" if "error" in message else "returned"
                rank.error = message.get("error")
                rank.value = None if rank.error else pickle.loads(message["value"])
            else:
                try:
                    message = _receive(self._pool.ended())
                except (EOFError, OSError):
                    self._pool.close()
                    raise RankFailure(
                        "the rank server has died, and the ranks with it", 0, "exit"
                    ) from None
                for rank in ranks:
                    if rank.pid == message["pid"]:
                        rank.status = message["status"]
        for rank in ranks:
            if rank.process is not None and rank.status is None:
                rank.status = rank.process.poll()
            if rank.status is not None and rank.state in ("runs", "closed"):
                # What it sent last may still lie in the socket.
                if rank.state == "runs" and rank.connection.poll(0):
                    continue
                rank.state = "exit"

    def _kill(self, ranks: list[_Rank], stacks: bool) -> None:
        alive = [rank for rank in ranks if rank.status is None and rank.pid]
        for rank in alive:
            if rank.state in ("runs", "returned"):
                rank.state = "killed" if stacks else "cut off"
        if stacks:
            for rank in alive:
                _signal(rank.pid, signal.SIGUSR1)
            deadline = time.monotonic() + STACKS
            # The last thread of the dump is the main one, which runs the case.
            while time.monotonic() < deadline and not all(
                "_run_case" in rank.read("stacks") for rank in alive
            ):
                time.sleep(0.02)
        for rank in alive:
            _signal(rank.pid, signal.SIGKILL, whole_group=True)
        deadline = time.monotonic() + GRACE
        while any(rank.status is None for rank in alive) and time.monotonic() < deadline:
            with contextlib.suppress(RankFailure):
                self._hear(alive, 0.1)


class _Body:
    """The function under a test that `on_ranks` has decorated, sent by the test's name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__

    def __call__(self, **kwargs: Any) -> Any:
        test = operator.attrgetter(self.__qualname__)(sys.modules[self.__module__])
        return test.__wrapped__(**kwargs)


def on_ranks(
    *nproc: int,
    thorough: Sequence[int] = (),
    fresh: bool = False,
    env: Mapping[str, str | None] | None = None,
    timeout: float = LIMIT,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the test runs on each of `nproc` ranks, once for each number of them.

    The test's parameters are fixtures and parametrised values of the test process; `nproc` among them is the number of
    ranks. See `Ranks.run` for what each rank starts with.

    Args:
        nproc: numbers of ranks.
        thorough: numbers of ranks that show again what the others show; such cases are marked `thorough`.
        fresh, env, timeout: as `Ranks` and `Ranks.run` have them.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        taken = list(inspect.signature(function).parameters.values())

        @functools.wraps(function)
        def test(ranks: Callable[..., Ranks], nproc: int, **kwargs: Any) -> None:
            if any(parameter.name == "nproc" for parameter in taken):
                kwargs["nproc"] = nproc
            try:
                ranks(nproc, fresh=fresh).run(_Body(function), env=env, timeout=timeout, **kwargs)
            except RankFailure as failure:
                # All there is to see has happened on the ranks.
                report = str(failure)
            else:
                return
            pytest.fail(report, pytrace=False)

        own = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("ranks", "nproc")
        ]
        others = [parameter for parameter in taken if parameter.name != "nproc"]
        test.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
        sizes = [*nproc, *(pytest.param(number, marks=pytest.mark.thorough) for number in thorough)]
        return pytest.mark.parametrize("nproc", sizes)(test)

    return decorate


def _job(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What a rank needs to call the function."""
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    if not hasattr(function, "__qualname__") or getattr(module, "__file__", None) is None:
        raise TypeError(
            f"{function!r} is in no file: ranks need a function at the top level of a module"
        )
    try:
        content = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)} cannot be sent to ranks: {error}. The function must be at "
            "the top level of its module, and its arguments must be picklable"
        ) from error
    assert module is not None
    return {
        "module": module.__name__,
        "file": module.__file__,
        "content": content,
        "path": sys.path[:],
    }


def environment(extra: Mapping[str, str | None] | None) -> dict[str, str]:
    """This environment with `extra` (None removes a variable), without what another launch may have left in it."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
    for name in _RANK_VARIABLES:
        env.pop(name, None)
    env.setdefault("OMP_NUM_THREADS", "1")
    for name, text in (extra or {}).items():
        if text is None:
            env.pop(name, None)
        else:
            env[name] = text
    return env


def rank_environment(
    rank: int, nproc: int, store: TCPStore | None, extra: Mapping[str, str | None] | None
) -> dict[str, str]:
    """The environment of a rank: as torchrun sets it, none of its variables for one process; None removes one."""
    own: dict[str, str | None] = {}
    if store is not None:
        own = {
            "RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
    return environment({**own, **(extra or {})})


def _start_fresh(rank: _Rank, end: int, request: dict[str, Any], env: dict[str, str]) -> None:
    rank.process = subprocess.Popen(
        [sys.executable, str(SERVER), "fresh", str(end), str(os.getpid())],
        pass_fds=[end], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    rank.pid = rank.process.pid
    _send(rank.connection, request)


def _failure(ranks: list[_Rank], reason: str, limit: float) -> RankFailure | None:
    if not reason:
        return None
    late = [rank for rank in ranks if rank.state == "killed"]
    errors = sorted(
        (rank for rank in ranks if rank.error), key=lambda rank: (rank.error or {})["time"]
    )
    died = [rank for rank in ranks if rank.state == "exit"]
    lines: list[str] = []
    # A rank that dies takes its connections along: errors of others follow from it.
    first = next(iter([*died, *errors, *late]), ranks[0])
    if reason == "timeout":
        first = late[0] if late else first
        who = ", ".join(str(rank.rank) for rank in late)
        lines.append(
            f"ranks {who} of {len(ranks)} did not return within {limit:g} s, and were killed"
        )
    elif first in died:
        stacks = first.read("stacks").rstrip()
        lines.append(f"rank {first.rank} of {len(ranks)} {_end(first.status)}")
        if (
            first.status == -signal.SIGSEGV
            and "\nThread" in stacks
            and "Current thread" not in stacks
        ):
            lines.append(NATIVE_CRASH)
        lines.append(stacks)
    elif first.error:
        lines.append(f"rank {first.rank} of {len(ranks)} failed: {first.error['what']}")
        lines.append(first.error["trace"].rstrip())
    for rank in ranks:
        if rank is first and reason != "timeout":
            continue
        if rank.error:
            after = rank.error["time"] - first.error["time"] if first.error else 0.0
            later = f" ({after:.1f} s later)" if after > 0 else ""
            lines.append(f"rank {rank.rank}: {rank.error['what'].splitlines()[0]}{later}")
        elif rank.state == "killed":
            lines.append(f"--- rank {rank.rank} was here:\n{rank.read('stacks').rstrip()}")
        elif rank in died:
            lines.append(f"rank {rank.rank} {_end(rank.status)}")
        else:
            lines.append(f"rank {rank.rank}: returned")
    for rank in ranks:
        for name in ("out", "err"):
            if text := rank.read(name):
                lines.append(f"--- rank {rank.rank} std{name}\n{text.rstrip()}")
    report = "\n".join(line for line in lines if line)
    if NATIVE_CRASH in lines:
        # Shown at the end of the tests, also where the second attempt passes.
        warnings.warn(report, stacklevel=2)
    return RankFailure(report, first.rank, reason)


def _end(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def _signal(pid: int, number: int, whole_group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
    if whole_group:
        # A rank leads a process group of its own: workers of its loaders go with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _send(connection: Connection, message: Any) -> None:
    # Not `send`: torch teaches that one to hand tensors over in shared memory.
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
