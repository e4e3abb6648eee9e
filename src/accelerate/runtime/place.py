# SPDX-License-Identifier: Apache-2.0
"""Where a thread is: the user's line, and what it does there, found in its stack by another thread."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple

import torch.distributed as dist

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# Packages of another environment, which this one uses too: that of the system, of the user, or a parent environment.
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.")
# It waits for other ranks in a loop that looks into the store.
_WAITS = "accelerate.runtime.agreement"
# The module that logs its calls has wrappers only.
_DISTRIBUTED = "torch.distributed.distributed_c10d"
_WAITS_FOR_WORKERS = "_MultiProcessingDataLoaderIter._try_get_data"
LOADER, WORKERS, DEBUGGER = "the data loader", "a worker process of the data loader", "the debugger"
# Module of a frame -> what is done in it and in what it calls.
_ACTIVITIES = {
    "torch.nn.modules.module": "forward",
    "torch.autograd": "backward",
    "torch.utils.data": LOADER,
    "accelerate.data_loader": LOADER,
}
# Class of a method -> the word before its name. The first ones are `Accelerator` and its bases.
_OWNERS = dict.fromkeys(("Accelerator", "RunInterface", "ProcessView"), "accelerator.")
_OWNERS |= {"AcceleratedOptimizer": "optimizer.", "AcceleratedScheduler": "scheduler.", "PartialState": "accelerator."}


class StackPlace(NamedTuple):
    """Where a thread is.

    Fields:
        at: file and line of the user's code.
        calls: what this line calls, as "forward" or "`accelerator.save_state`"; empty for what has no such name.
        within: for what the line is executed, as "forward" in a model's code, or the user's function.
        mark: something that has changed if the thread has moved, mostly.
        waits: whether it waits for other ranks to agree on something.
        is_distributed: whether it is in a function of torch.distributed, or waits for what one has begun.
    """

    at: str
    calls: str
    within: str
    mark: int
    waits: bool
    is_distributed: bool


def place_of(thread: int) -> StackPlace | None:
    """The place of the thread with this identifier; None where it has ended."""
    innermost: FrameType | None = sys._current_frames().get(thread)
    if innermost is None:
        return None
    mark, waits, frames = 0, False, []
    frame: FrameType | None = innermost
    while frame is not None:
        # Not the line: a line may call the same function often.
        if _module(frame) == _WAITS:
            # Where it is in the loop that waits is no progress.
            mark, waits = 0, True
        else:
            mark = hash((mark, id(frame), frame.f_lasti))
        frames.append(frame)
        frame = frame.f_back
    index = next((at for at, frame in enumerate(frames) if is_users(frame)), len(frames) - 1)
    own = frames[index]
    at = f"{own.f_code.co_filename}:{own.f_lineno}"
    calls = _calls(frames[:index])
    is_distributed = any(_module(frame) == _DISTRIBUTED for frame in frames[:index]) or _waits_for_work(innermost)
    return StackPlace(at, calls, _within(frames[index:]), mark, waits, is_distributed)


def is_users(frame: FrameType) -> bool:
    """Whether a frame executes the user's code, and not that of an installed package or of Python."""
    path = frame.f_code.co_filename
    if path.startswith(("<frozen", *_INSTALLED)) or _module(frame).startswith(_LIBRARIES):
        return False
    return not any(f"{os.sep}{name}{os.sep}" in path for name in _PACKAGE_FOLDERS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _waits_for_work(frame: FrameType) -> bool:
    """Whether a frame waits for a collective or a message, in `work.wait()`, which has no frame of its own."""
    if not dist.is_available():
        return False
    waits, name = _wait_of(frame.f_code, frame.f_lasti)
    return waits if name is None else isinstance(frame.f_locals.get(name, frame.f_globals.get(name)), dist.Work)


@functools.lru_cache(maxsize=64)
def _wait_of(code: CodeType, position: int) -> tuple[bool, str | None]:
    """Whether the call at a position of the code may be that of a work's `wait`, and the variable with the work.

    No name is known of what a function or an index has returned.
    """
    begun = (one for one in dis.get_instructions(code) if one.offset <= position)
    before = [one for one in begun if one.opname not in ("CACHE", "NOP")]
    at = next((at for at in range(len(before) - 1, max(0, len(before) - 6), -1) if before[at].argval == "wait"), None)
    if at is None or not before[at].opname.startswith(("LOAD_METHOD", "LOAD_ATTR")):
        return False, None
    owner = before[at - 1]
    if owner.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
        # Two variables that are loaded at once are a tuple.
        return True, owner.argval if isinstance(owner.argval, str) else owner.argval[-1]
    return owner.opname.startswith(("CALL", "BINARY_SUBSCR", "BINARY_OP")), None


def _calls(frames: list[FrameType]) -> str:
    """What the user's line calls: the outermost of these frames that has a name for users."""
    if any(_module(frame) in ("bdb", "pdb") for frame in frames):
        return DEBUGGER
    if any(frame.f_code.co_qualname == _WAITS_FOR_WORKERS for frame in frames):
        return WORKERS
    names = (_activity(frame) or _method(frame) or _function(frame) for frame in reversed(frames))
    return next(filter(None, names), "")


def _within(frames: list[FrameType]) -> str:
    """For what the user's line, in the first of these frames, is executed."""
    if (name := next(filter(None, (_activity(frame) or _method(frame) for frame in frames)), "")) != "":
        return name
    code = frames[0].f_code
    return "" if code.co_name == "<module>" else f"`{code.co_qualname}`"


def _activity(frame: FrameType) -> str | None:
    module = _module(frame)
    if module.startswith("torch.optim."):
        return "`optimizer.step`" if frame.f_code.co_name == "step" else None
    return next((_ACTIVITIES[name] for name in _ACTIVITIES if module == name or module.startswith(name + ".")), None)


def _method(frame: FrameType) -> str | None:
    """A method of `Accelerator`, or of what `prepare` returns, as the user calls it."""
    owner, _, method = frame.f_code.co_qualname.rpartition(".")
    if owner not in _OWNERS or not _module(frame).startswith(_LIBRARIES[0]) or method.startswith("_"):
        return None
    return f"`{_OWNERS[owner]}{method}`"


def _function(frame: FrameType) -> str | None:
    """A public function of this package or of torch.distributed."""
    name, module = frame.f_code.co_qualname, _module(frame)
    if not name.isidentifier() or name.startswith("_"):
        return None
    if module.startswith("accelerate.collectives."):
        return f"`{name}`"
    return f"`torch.distributed.{name}`" if module == _DISTRIBUTED else None
