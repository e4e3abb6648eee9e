# SPDX-License-Identifier: Apache-2.0
"""What Windows and macOS lack or do otherwise, put into a process on Linux. Call it before accelerate is imported.

It replaces functions of the standard library for the whole process, and lets the modules of accelerate see the name
of the other system. Third-party packages that are imported already keep what they have taken from it.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import re
import selectors
import signal
import socket
import stat
import struct
import sys
import types

# Modules that only Unix has.
UNIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
# All names of `os` and `signal` that typeshed declares for other systems than Windows.
UNIX_OS = """
EX_OK F_LOCK F_TEST F_TLOCK F_ULOCK GRND_NONBLOCK GRND_RANDOM NGROUPS_MAX O_ACCMODE O_ASYNC O_CLOEXEC O_DIRECT
O_DIRECTORY O_DSYNC O_EVTONLY O_FSYNC O_LARGEFILE O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_RSYNC
O_SYNC O_TMPFILE POSIX_FADV_DONTNEED POSIX_FADV_NOREUSE POSIX_FADV_NORMAL POSIX_FADV_RANDOM POSIX_FADV_SEQUENTIAL
POSIX_FADV_WILLNEED PRIO_PGRP PRIO_PROCESS PRIO_USER P_ALL P_PGID P_PID P_PIDFD RTLD_GLOBAL RTLD_LAZY RTLD_LOCAL
RTLD_NOW SCHED_BATCH SCHED_FIFO SCHED_IDLE SCHED_OTHER SCHED_RR ST_NOSUID ST_RDONLY WCONTINUED WCOREDUMP WEXITED
WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WNOWAIT WSTOPPED WSTOPSIG WTERMSIG WUNTRACED chown
chroot
confstr ctermid eventfd fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs get_blocking getegid geteuid
getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority getrandom getresgid getresuid getsid getuid
getxattr initgroups killpg lchown listxattr lockf major makedev memfd_create minor mkfifo mknod nice openpty
pathconf pidfd_open pipe2 posix_fadvise posix_fallocate posix_openpt posix_spawn posix_spawnp pread preadv
ptsname pwrite pwritev readv register_at_fork removexattr sched_get_priority_max sched_getaffinity sched_getparam
sched_getscheduler sched_setaffinity sched_yield sendfile set_blocking setegid seteuid setgid setgroups setns
setpgid setpriority setregid setresgid setresuid setreuid setsid setuid setxattr splice statvfs sync sysconf
tcgetpgrp tcsetpgrp ttyname uname unshare wait wait3 wait4 waitid writev
"""
UNIX_SIGNAL = """
ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGHUP SIGIO SIGIOT SIGKILL SIGPIPE
SIGPOLL SIGPROF SIGPWR SIGQUIT SIGRTMAX SIGRTMIN SIGSTKFLT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG
SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause
pidfd_send_signal pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
"""
LINUX_OS = """
O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE POSIX_FADV_WILLNEED SCHED_BATCH SCHED_IDLE eventfd fdatasync
getrandom getresgid getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate
removexattr sched_get_priority_max sched_getaffinity sched_getparam sched_getscheduler sched_setaffinity setns
setresgid setresuid setxattr splice unshare
"""
LINUX_SIGNAL = (
    "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo"
)
O_BINARY = 1 << 30


class _System:
    """A module with other values of some names."""

    def __init__(self, module: types.ModuleType, **values: object) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> object:
        values = self.__dict__["_values"]
        return values[name] if name in values else getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_module"], name, value)


class _Finder(importlib.abc.MetaPathFinder):
    """Modules of accelerate import these systems in the place of `os` and `sys`."""

    def __init__(self, systems: dict[str, _System]) -> None:
        def seen_import(name, globals=None, locals=None, fromlist=(), level=0):
            if level == 0 and name in systems:
                return systems[name]
            return builtins.__import__(name, globals, locals, fromlist, level)

        self.builtins = {**vars(builtins), "__import__": seen_import}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "accelerate":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.builtins)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, names) -> None:
        self.inner, self.names = inner, names

    def __getattr__(self, name):  # resources and sources
        return getattr(self.inner, name)

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module) -> None:
        module.__dict__["__builtins__"] = self.names
        self.inner.exec_module(module)


def _hide(modules, os_names, signal_names) -> None:
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, os_names), (signal, signal_names)):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def _by_accelerate() -> bool:
    """Whether the caller of this function's caller is accelerate, by way of paths or not."""
    frame = sys._getframe(2)
    while os.path.basename(frame.f_code.co_filename) in (
        "pathlib.py",
        "genericpath.py",
        "_local.py",
    ):
        frame = frame.f_back
    return "/accelerate/" in frame.f_code.co_filename


def _open_files() -> list[str]:
    """The files that this process has open, or mapped to memory, by their paths."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    with real_open("/proc/self/maps") as file:
        for line in file:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6:
                paths.append(fields[5])
    return paths


real_open = open


def _refuse_open(path) -> None:
    """Windows renames and removes neither an open file nor a folder with one."""
    real = os.path.realpath(path)
    for name in _open_files():
        if name == real or name.startswith(f"{real}/"):
            raise PermissionError(errno.EACCES, f"in use: {name}", os.fspath(path))


def _windows_files() -> None:
    real = {
        name: getattr(os, name)
        for name in ("open", "rename", "replace", "unlink", "remove", "fsync")
    }
    os.O_BINARY = O_BINARY

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        caller = sys._getframe(1).f_code.co_filename
        if "/accelerate/" in caller and not flags & O_BINARY:
            raise AssertionError(f"{path} is opened in text mode")
        return real["open"](path, flags & ~O_BINARY, mode, dir_fd=dir_fd)

    def rename(source, target, **options):
        _refuse_open(source)
        if os.path.lexists(target):
            raise FileExistsError(
                errno.EEXIST, "exists already", os.fspath(source), None, os.fspath(target)
            )
        real["rename"](source, target, **options)

    def replace(source, target, **options):
        _refuse_open(source)
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(target))
        if os.path.lexists(target):
            _refuse_open(target)
        real["replace"](source, target, **options)

    def unlink(path, *, dir_fd=None):
        if dir_fd is None:
            _refuse_open(path)
        real["unlink"](path, dir_fd=dir_fd)

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        with real_open(f"/proc/self/fdinfo/{number}") as file:
            flags = int(re.search(r"flags:\s+(\d+)", file.read()).group(1), 8)
        if flags & 3 == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real["fsync"](descriptor)

    os.open, os.rename, os.replace, os.unlink, os.remove, os.fsync = (
        open_, rename, replace, unlink, unlink, fsync,
    )  # fmt: skip


def _locking(descriptor: int, mode: int, size: int) -> None:
    """`msvcrt.locking`: from the position on, against all other open files."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, position, size, 0)
    fcntl.fcntl(descriptor, 37, lock)  # F_OFD_SETLK


class _SocketSelector(selectors.SelectSelector):
    """Windows waits for sockets only."""

    def register(self, fileobj, events, data=None):
        if not isinstance(fileobj, socket.socket) and not stat.S_ISSOCK(os.fstat(fileobj).st_mode):
            raise OSError(10038, "not a socket")
        return super().register(fileobj, events, data)


def _without_libuv() -> None:
    """Stores of a build of torch without libuv, where they are made in Python."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    class Store(dist.TCPStore):
        def __init__(self, *args, use_libuv=True, **options):
            if use_libuv:
                raise dist.DistStoreError("PyTorch was built without libuv support")
            super().__init__(*args, use_libuv=False, **options)

    dist.TCPStore = c10d_rendezvous_backend.TCPStore = Store


def _import_first() -> None:
    """What keeps its own view of the system: it is imported before anything is hidden."""
    import asyncio
    import concurrent.futures
    import getpass
    import http.server
    import multiprocessing.connection
    import multiprocessing.managers
    import multiprocessing.popen_fork
    import multiprocessing.popen_spawn_posix
    import multiprocessing.resource_tracker
    import shutil
    import socketserver
    import subprocess
    import tempfile
    import webbrowser

    import psutil
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.elastic.agent.server.api
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.utils.data
    import torch.utils.tensorboard
    import transformers

    del (
        asyncio,
        concurrent,
        getpass,
        http,
        multiprocessing,
        shutil,
        socketserver,
        subprocess,
        tempfile,
    )
    del webbrowser, psutil, torch, transformers


def simulate_windows() -> None:
    """No fork, no flock, no process groups; files that are open stay where they are."""
    import ctypes.util
    import multiprocessing.resource_tracker
    import shutil
    import subprocess
    import tempfile

    import torch
    import torch.distributed as dist

    _import_first()
    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, _locking
    sys.modules["msvcrt"] = msvcrt
    _windows_files()
    _hide(UNIX_MODULES, UNIX_OS, UNIX_SIGNAL)
    del dist.HashStore
    _without_libuv()
    ctypes.util.find_library = lambda name: None
    selectors.DefaultSelector = _SocketSelector
    _spawn_only()
    # What these have found out about the system when they were imported.
    multiprocessing.resource_tracker._HAVE_SIGMASK = False
    shutil._use_fd_functions = False
    subprocess._USE_POSIX_SPAWN = False
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile
    torch.utils.data._utils.signal_handling.IS_WINDOWS = True
    systems = {"os": _System(os, name="nt"), "sys": _System(sys, platform="win32")}
    sys.meta_path.insert(0, _Finder(systems))


def simulate_macos() -> None:
    """No /proc, no /dev/shm, processes that are spawned, an Apple GPU."""
    import ctypes.util
    import tempfile

    import torch

    _import_first()
    _hide((), LINUX_OS, LINUX_SIGNAL)
    ctypes.util.find_library = lambda name: None
    _spawn_only()
    tempfile._O_TMPFILE_WORKS = False
    _without_linux_folders()
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
    torch.accelerator.device_count = lambda: 1
    # The generator of the Apple GPU: one that nobody draws from.
    generator = torch.Generator()
    torch.mps.get_rng_state = generator.get_state
    torch.mps.set_rng_state = generator.set_state
    torch.mps.manual_seed = generator.manual_seed
    names = types.SimpleNamespace(
        sysname="Darwin", machine="arm64", release="24.0.0", nodename="mac", version=""
    )
    systems = {
        "os": _System(os, uname=lambda: names),
        "sys": _System(sys, platform="darwin"),
    }
    sys.meta_path.insert(0, _Finder(systems))


def _spawn_only() -> None:
    import multiprocessing

    multiprocessing.set_start_method("spawn", force=True)
    multiprocessing.get_all_start_methods = lambda: ["spawn"]


def _without_linux_folders() -> None:
    """Opening, listing and asking for what is in /proc, /sys or /dev/shm finds nothing, for accelerate."""

    def hidden(path) -> bool:
        try:
            text = os.fsdecode(path)
        except TypeError:
            return False
        return text.startswith(("/proc", "/sys", "/dev/shm"))

    def guarded(function):
        def call(path, *args, **options):
            if hidden(path) and _by_accelerate():
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fspath(path))
            return function(path, *args, **options)

        return call

    for module, names in (
        (os, ("open", "stat", "listdir", "scandir", "readlink", "mkdir")),
        (io, ("open",)),
        (builtins, ("open",)),
    ):
        for name in names:
            setattr(module, name, guarded(getattr(module, name)))
