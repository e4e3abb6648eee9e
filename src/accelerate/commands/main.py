# SPDX-License-Identifier: Apache-2.0
"""The `accelerate` command: finds the sub-command and imports only that one."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

# name -> module of this package with `parser()` and `main(arguments)`, and what it is for
COMMANDS = {
    "checkpoint": ("checkpoint", "list checkpoints and verify their checksums"),
    "completion": ("completion", "print the completion script of bash, zsh or fish"),
    "config": ("config", "write, update and show the configuration of launches"),
    "env": ("env", "describe this installation and this machine"),
    "estimate-memory": ("estimate", "estimate the memory of a model, from its configuration"),
    "launch": ("launch", "run a script on one process, on several, or on several machines"),
    "merge-weights": ("merge", "merge the shards of a saved model"),
    "monitor": ("monitor", "show recorded runs, on a local web page or in the terminal"),
    "plan": ("plan", "estimate memory and time of a training step in each layout"),
    "report": ("report", "summarize a recorded run in one file: HTML, Markdown or JSON"),
    "test": ("test", "check that this installation works on this machine"),
    "to-fsdp2": ("to_fsdp2", "convert a configuration file from FSDP1 to FSDP2"),
    "tpu-config": ("tpu_config", "run setup commands on all workers of a TPU pod"),
}


def usage() -> str:
    """Return the usage message with the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return (
        "usage: accelerate <command> [arguments]\n\ncommands:\n"
        + "\n".join(lines)
        + ("\n\n`accelerate <command> -h` shows the arguments of a command, and `accelerate --version` the version.")
    )


def main() -> None:
    """Entry point of the `accelerate` command."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    name, rest = arguments[0], arguments[1:]
    if name in ("-v", "--version"):
        from ..core.installation import IMPLEMENTATION
        from ..core.version import __version__

        print(f"accelerate {__version__} ({IMPLEMENTATION})")
        return
    if name not in COMMANDS:
        from ..core.errors import suggestion

        print(f"accelerate: error: unknown command {name!r}{suggestion(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    try:
        _command(COMMANDS[name][0]).main(rest)
    except KeyboardInterrupt:
        if _runs_a_script():
            # The script's own traceback and end.
            raise
        print(f"\naccelerate {name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        if _runs_a_script():
            raise
        # The reader of a pipe has ended (`| head`). Python would fail once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)
    except OSError as error:
        # A file or folder of the arguments. Without a name it is something else.
        if _runs_a_script() or error.filename is None:
            raise
        from .parser import print_error

        print_error(f"accelerate {name}", error)
        sys.exit(1)


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
    script = sys.modules.get(f"{__package__.rpartition('.')[0]}.launchers.script")
    return script is not None and script.is_entered()


if __name__ == "__main__":
    main()
