# SPDX-License-Identifier: Apache-2.0
"""The `accelerate` command: finds the sub-command and imports only that one."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias

from ..core import messages

Entry: TypeAlias = Callable[[], None]
# name -> module of this package with `parser()` and `main(arguments)`, and what it is for
COMMANDS = {
    "audit": ("audit", "check that a recorded run trained each sample once"),
    "certify": (
        "certify",
        "check that a script trains the same model in a layout as on one process",
    ),
    "checkpoint": ("checkpoint", "list, verify, copy and remove checkpoints, and check a bucket"),
    "completion": ("completion", "print the completion script of bash, zsh or fish"),
    "config": ("config", "write, update and show launch configurations"),
    "env": ("env", "describe this installation and this machine"),
    "estimate-memory": ("estimate", "estimate a model's memory from its configuration"),
    "export": ("export", "write a saved model to a folder that from_pretrained or peft reads"),
    "init": ("init", "write a small complete project: script, configuration, test, batch job"),
    "launch": ("launch", "run a script on one process, several processes, or several machines"),
    "merge-weights": ("merge", "merge the shards of a saved model"),
    "monitor": ("monitor", "show recorded runs, on a local web page or in the terminal"),
    "plan": ("plan", "estimate the memory and time of a training step in each layout"),
    "replay": ("replay", "repeat steps of a recorded run from the nearest checkpoint"),
    "report": ("report", "summarize a recorded run in one file: HTML, Markdown or JSON"),
    "test": ("test", "check that this installation works on this machine"),
    "to-fsdp2": ("to_fsdp2", "convert a configuration file from FSDP1 to FSDP2"),
    "tpu-config": ("tpu", "run setup commands on all workers of a TPU pod"),
}


def usage() -> str:
    """Return the usage message with the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return (
        "usage: accelerate <command> [arguments]\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\n`accelerate help <command>` shows the arguments of a command, `accelerate version` the version."
    )


def main(*command: str) -> None:
    """Entry point of `accelerate`, and with the name of a command that of `accelerate-<command>`."""
    _open_closed_streams()
    arguments = [*command, *sys.argv[1:]]
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "-h"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    name = arguments[0]
    words = arguments[1:]
    if name in ("-v", "--version", "version"):
        from ..core.imports import IMPLEMENTATION
        from ..core.version import __version__

        print(f"accelerate {__version__} ({IMPLEMENTATION})")
        return
    if name not in COMMANDS:
        from ..core.errors import suggestion
        from .parser import print_error

        print_error(
            f"unknown command {name!r}{suggestion(name, COMMANDS)}; `accelerate help` lists the commands"
        )
        sys.exit(2)
    try:
        try:
            _command(COMMANDS[name][0]).main(words)
        finally:
            if not _runs_a_script():
                sys.stdout.flush()
    except KeyboardInterrupt:
        if _runs_a_script():
            # The script's own traceback and end.
            raise
        print(file=sys.stderr)  # the line on which the terminal shows ^C
        messages.show("interrupted")
        sys.exit(130)
    except OSError as error:
        if _runs_a_script():
            raise
        from .parser import print_error

        if error.filename is None:
            # The output: its reader has ended (`| head`), or its disk is full. Python would fail again at its exit.
            if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:
                sys.exit(128 + 13)
        # Else a file or folder of the arguments.
        print_error(error)
        sys.exit(1)


def _open_closed_streams() -> None:
    """Let a standard stream that the caller has closed be the null device: else the next file becomes that stream."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _command(module: str) -> ModuleType:
    """Import the module of a command. Ctrl-C ends the process at once meanwhile.

    As an exception it could be lost: Python prints and ignores those in the callbacks that its imports use.
    """
    import signal

    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(f"{__package__}.{module}")
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _runs_a_script() -> bool:
    """Whether `launch` has begun to run a script in this very process."""
    local = sys.modules.get(f"{__package__.rpartition('.')[0]}.launchers.local")
    return local is not None and local.is_entered()


# The entry points of commands that have a name of their own.
launch: Entry = functools.partial(main, "launch")
config: Entry = functools.partial(main, "config")
estimate_memory: Entry = functools.partial(main, "estimate-memory")
merge_weights: Entry = functools.partial(main, "merge-weights")


if __name__ == "__main__":
    main()
