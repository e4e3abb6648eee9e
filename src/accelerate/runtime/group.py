# SPDX-License-Identifier: Apache-2.0
"""Birth and death of the process group: who we talk to, how long we wait, and how each process leaves cleanly."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import sys
import tempfile
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..core import env
from ..core.device_kinds import DeviceKind
from ..core.errors import CommunicationError, ConfigurationError
from ..core.stacks import is_users
from ..core.topology import Topology
from ..torch_internals import process_group
from . import backends, communication, hang_watch, marks
from .agreement import pauses

# Seconds for which rank 0, which may host the store, waits for the others at its end.
FAREWELL = 30.0
# Seconds for which a failed process that hosts the run's store keeps it for the others.
LINGER = 2.0
# Seconds in which a group closes whose collectives are through; less where the process has failed.
CLOSE = 2.0
CLOSE_FAILED = 0.5


class _Exit:
    """What the end of this process needs to know."""

    armed = False
    owner = False
    # The run's store, once this rank has reported that it leaves, and the number of ranks that it keeps it for.
    store: Any = None
    waits_for = 0
    timeout: timedelta | None = None  # of the default group; None: torch's default
    failed = False
    groups = 0  # that this process has joined: each has keys of its own in the run's store
    previous_hook: Any = None
    # Process groups that outlive the interpreter; `_hold` has them too.
    never_freed: ClassVar[list[dist.ProcessGroup]] = []


def start(
    topology: Topology,
    backend: str,
    timeout: timedelta | None = None,
    init_method: str | None = None,
) -> str:
    """Join the default process group of a run and return its backend. A group that is there already is kept.

    Raises ConfigurationError where the main address is missing or the backend is not in this torch.
    """
    if not dist.is_initialized():
        if init_method is None:
            _check_address(topology)
            # Slurm and MPI do not set torch's variables for the address.
            env.publish({"MASTER_ADDR": topology.master_addr, "MASTER_PORT": topology.master_port})
        backends.register(backend)
        if not dist.is_backend_available(backend):
            raise ConfigurationError(
                f"rank {topology.rank}: this torch build does not include the collective backend "
                f"{backend!r}"
            )
        seconds = env.value("ACCELERATE_COLLECTIVE_TIMEOUT")
        if timeout is None and seconds is not None:
            timeout = timedelta(seconds=seconds)
            # Groups that are made later take torch's defaults.
            for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
                setattr(dist.distributed_c10d, name, timeout)
        process_group.keep_out_of_defaults()
        store = None
        if _Exit.groups > 0:
            rendezvous = dist.rendezvous(
                init_method or "env://", topology.rank, topology.world_size
            )
            store = _of_next_group(next(rendezvous)[0])
            init_method = None
        _Exit.groups += 1
        dist.init_process_group(
            backend,
            init_method,
            timeout,
            rank=topology.rank,
            world_size=topology.world_size,
            store=store,
        )
        _Exit.owner, _Exit.timeout, _Exit.store = True, timeout, None
    _arm()
    marks.start()
    hang_watch.start(_Exit.timeout)
    return str(dist.get_backend())


def _of_next_group(store: dist.Store) -> dist.Store:
    """A store with other keys, for a default group that follows another in this process.

    torch gives each default group the same keys: in a store that outlives a group, as the launcher's does, ranks may
    connect to the addresses of the group that has ended, and wait for each other for ever (pytorch#55967).
    """
    return dist.PrefixStore(f"group_{_Exit.groups}", store)


def with_host(kind: DeviceKind) -> str:
    """The backends of a group that sends tensors of a kind of device, and tensors in host memory."""
    if kind.backend == "gloo":
        return kind.backend
    return f"cpu:gloo,{kind.type}:{kind.backend}"


def start_alone(kind: DeviceKind) -> None:
    """Make a group of one process where there is none, since functions such as `fully_shard` require one."""
    if not dist.is_initialized():
        process_group.keep_out_of_defaults()
        store: dist.Store
        if hasattr(dist, "HashStore"):
            store = dist.HashStore()
        else:  # Windows
            store = dist.FileStore(f"{tempfile.gettempdir()}/accelerate-{uuid.uuid4().hex}", 1)
        dist.init_process_group(backend=with_host(kind), store=store, rank=0, world_size=1)
        _Exit.owner = True
    _arm()


def _check_address(topology: Topology) -> None:
    absent = []
    if topology.master_addr is None:
        absent.append("MASTER_ADDR")
    if topology.master_port is None:
        absent.append("MASTER_PORT")
    if absent:
        raise ConfigurationError(
            f"rank {topology.rank} of {topology.world_size} ({topology.launcher}) cannot find the "
            f"others: {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not set. Set "
            "the address and a free port of rank 0's machine on every rank, or start the script "
            "with `accelerate launch` or torchrun. With --num_processes 1, `accelerate launch` "
            "ignores variables that this shell only inherited."
        )


def is_running() -> bool:
    """Whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def stop(group: dist.ProcessGroup | None = None) -> None:
    """Leave a group (the default one, when None is given). Called twice, the second call does nothing."""
    if not is_running():
        return
    if group in (None, dist.group.WORLD):
        hang_watch.stop()
        if _Exit.owner:
            _report_leaving()
    process_group.let_threads_end()
    dist.destroy_process_group(group)
    if group is None:
        _Exit.owner = False
        # DDP's reducer and work handles hold the group's threads alive in cycles; they must go while Python lives.
        gc.collect()


def interrupt() -> Callable[[], None]:
    """Leave the default group in the middle of a collective. Every rank must call this.

    A rank that waits in a collective with this one gets an error. Objects of the old group (DDP modules) cannot be
    used afterwards.

    Returns:
        A function that joins a new group of the same ranks.

    Raises:
        RuntimeError: there are other groups than the default one, which could not be recreated.
    """
    if len(process_group.all_groups()) > 1:
        raise RuntimeError(
            f"rank {dist.get_rank()} left a collective in which others may be waiting, and the "
            "process group cannot be recreated because the run has other groups. Restart the run"
        )
    old: Any = dist.group.WORLD
    backend, rank, size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store = _of_next_group(old.get_group_store())
    _Exit.groups += 1
    owner = _Exit.owner
    if backend != "gloo":
        # Only gloo's connections close with the group; the kernels of others wait for their abort.
        old.abort()
    _disarm_modules()
    del old
    stop()

    def join() -> None:
        dist.init_process_group(
            backend=backend, store=store, rank=rank, world_size=size, timeout=_Exit.timeout
        )
        _Exit.owner = owner
        marks.start()
        hang_watch.start(_Exit.timeout)

    return join


def _disarm_modules() -> None:
    """Take the group from DDP's modules: as long as one holds it, its connections stay open."""
    for module in gc.get_objects():
        # `isinstance` would make lazy objects import their modules.
        if issubclass(type(module), DistributedDataParallel):
            for name in ("process_group", "reducer", "logger"):
                module.__dict__.pop(name, None)


def _arm() -> None:
    """Register the end of this process, once."""
    if _Exit.armed:
        return
    _Exit.armed = True
    _Exit.previous_hook = sys.excepthook
    sys.excepthook = _note_failure
    atexit.register(leave)
    threading.Thread(
        target=_hold, args=(_Exit.never_freed,), name="accelerate-hold", daemon=True
    ).start()
    # A process that native code ends, as gloo does for data of another size, writes where it was.
    if not faulthandler.is_enabled():
        # A notebook's standard error is no file.
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            faulthandler.enable()


def _hold(groups: list[dist.ProcessGroup]) -> None:
    """Keep process groups for ever: the interpreter does not free the frame of a daemon thread at its end."""
    threading.Event().wait()


def _note_failure(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Before the traceback is printed: report the error to the other ranks, and add what is known of a lost rank."""
    _Exit.failed = True
    if isinstance(error, AttributeError) and isinstance(error.obj, DistributedDataParallel):
        error.add_note(
            f"The model is inside DistributedDataParallel: use accelerator.unwrap_model(model).{error.name}"
        )
    try:
        # A CommunicationError has been shared where it was raised.
        if is_running() and dist.get_world_size() > 1 and not isinstance(error, CommunicationError):
            _share_failure(error, trace)
    finally:
        _Exit.previous_hook(kind, error, trace)


def _share_failure(error: BaseException, trace: TracebackType | None) -> None:
    frames = traceback.extract_tb(trace)
    # The innermost line of the user's own code; an error without a traceback has none.
    at = "a line of a library"
    for frame in frames:
        if is_users(frame.filename):
            at = f"{frame.filename}:{frame.lineno}"
    if communication.is_lost(error):
        error.add_note(communication.explanation("a torch collective", error, at=at))
    else:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        marks.post(marks.CAUSES, marks.FAILED, error=text, at=at)


def leave() -> None:
    """Close the group before the interpreter is finalized, so that the exit code is that of the script.

    Called at exit. A forked process has no exit handlers and must call it. After a run without errors the ranks first
    report that they leave, and rank 0, which may host the store, leaves last.
    """
    failed = _has_failed()
    hang_watch.stop(failed)
    if is_running() and _Exit.owner:
        _part(failed)
    elif _Exit.store is not None and not failed:
        # `end_training` has left the group, and others may be on their way to it.
        _await_others(FAREWELL)
    process_group.let_threads_end()


def _has_failed() -> bool:
    """Whether this process ends because of an exception, also if another library has replaced our hook."""
    handled = sys.exc_info()[1]
    if isinstance(handled, SystemExit):
        if handled.code:
            return True
    elif handled is not None:
        return True
    if _Exit.failed:
        return True
    is_interactive = hasattr(sys, "ps1")
    return not is_interactive and getattr(sys, "last_value", None) is not None


def _report_leaving() -> None:
    """Report that this rank leaves, once. Rank 0, which may host the store, keeps it."""
    if _Exit.store is None:
        group: Any = dist.group.WORLD
        _Exit.store = group.get_group_store()
        _Exit.waits_for = 0
        if group.rank() == 0:
            _Exit.waits_for = group.size() - 1
        marks.leave()


def _await_others(limit: float) -> None:
    """Keep the store until the other ranks need it no longer, on rank 0."""
    if _Exit.waits_for:
        with contextlib.suppress(RuntimeError, ValueError):
            for waited in pauses(_Exit.waits_for + 1, limit):
                if _Exit.store.add("accelerate/done", 0) >= _Exit.waits_for or waited >= limit:
                    return


def _part(failed: bool) -> None:
    """Report that this rank leaves, and close the group. Rank 0 keeps the store until the others need it no longer."""
    _report_leaving()
    # Before the wait, so that a rank in a collective with this one gets an error at once.
    failed = not _close(failed) or failed
    if not failed:
        _await_others(FAREWELL)
    elif _Exit.waits_for and not env.get_flag("TORCHELASTIC_USE_AGENT_STORE"):
        # The other ranks read why their collectives fail, from the store that this process hosts.
        with contextlib.suppress(RuntimeError, ValueError):
            hang_watch.announce_end(_Exit.store)
        _await_others(LINGER)


def _close(failed: bool) -> bool:
    """Close the group, and its connections where nothing else refers to them. Returns whether it was done in time.

    The destructor of gloo's group waits for its collectives, which the other ranks may never join. It runs in a thread
    with a time limit, since the process, and the launcher with it, would otherwise wait for the group's timeout.
    """
    if dist.get_backend() != "gloo":
        if failed:
            _abandon()
        else:
            stop()
        return True
    _disarm_modules()
    groups = [weakref.ref(group) for group in process_group.all_groups()]
    closer = threading.Thread(target=stop, name="accelerate-close", daemon=True)
    try:
        closer.start()
    except RuntimeError:
        # Some versions of Python start no thread at the exit.
        _abandon()
        return False
    limit = CLOSE
    if failed:
        limit = CLOSE_FAILED
    closer.join(limit)
    # What a sharded model still holds would wait for its collectives in the end of the interpreter.
    held = [group() for group in groups]
    _Exit.never_freed.extend(group for group in held if group is not None)
    return not closer.is_alive()


def _abandon() -> None:
    """Give the group up without its end: a failed rank must not wait for collectives that it has begun.

    So the groups are never freed (what was made with them keeps them as long as the process lives anyway); the
    connections close with the process.
    """
    _Exit.never_freed.extend(process_group.all_groups())
    stop()
