# SPDX-License-Identifier: Apache-2.0
"""Running scripts from tests: the launcher's command line, an unused port, and the output."""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core import devices, env


class SubprocessCallException(Exception):
    """A command failed; the message contains its output."""


@dataclass
class RunOutput:
    """The exit code of a command, and the lines that it printed."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the words of an `accelerate launch` command.

    Args:
        kwargs: the options; `num_processes=2` becomes `--num_processes=2`, `cpu=True` becomes `--cpu`, and options
            that are False or None are left out.
    """
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(
    num_processes=max(1, devices.device_count()), monitor_interval=0.1
)


def assert_same_run(
    train: Callable[..., object] | str | Path,
    layouts: Sequence[str] = ("ddp:2",),
    arguments: Sequence[Any] = (),
    steps: int = 4,
    dtype: str | None = None,
    cpu: bool = True,
) -> None:
    """Assert that training code trains the same model in each layout as on one process.

        def test_my_loop():
            assert_same_run(train, layouts=["ddp:2"])

    Args:
        train: a function of a module that can be imported, which makes its own `Accelerator`; or a script.
        layouts: as for `accelerate certify`.
        arguments: of the function, or of the script.
        steps: optimizer steps to compare.
        dtype: of the model, such as "float64"; None leaves it as it is.
        cpu: run on the CPU.

    Raises:
        AssertionError: with the verdict on each layout that is not equal.
    """
    from ..certify.certificate import CODES, Certificate
    from ..certify.layouts import parse
    from ..certify.runs import Script
    from ..certify.settings import Settings
    from ..launchers.spec import Program

    folder = Path(tempfile.mkdtemp(prefix="certify-"))
    program = Program(str(train), tuple(map(str, arguments)))
    if callable(train):
        call = pickle.dumps((train, tuple(arguments)))
        script = folder / "call.py"
        script.write_text(
            f"import pickle, sys\n\nsys.path[:] = {sys.path!r}\n"
            f"train, arguments = pickle.loads({call!r})\ntrain(*arguments)\n"
        )
        program = Program(str(script))
    settings = Settings("", steps, dtype=dtype)
    certificate = Certificate(
        Script(program, {}, settings, cpu), [parse(layout) for layout in layouts]
    )
    certificate.run(folder / "runs", lambda row: None)
    failed = [row.text() for row in certificate.rows if CODES[row.verdict]]
    if failed:
        raise AssertionError("\n".join(failed))
    shutil.rmtree(folder)


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker; 0 without pytest-xdist."""
    return int(re.sub(r"^gw", "", env.get("PYTEST_XDIST_WORKER", "gw0") or "gw0"))


def get_torch_dist_unique_port() -> int:
    """Return a port for the main process of a run that differs between pytest-xdist workers."""
    return 29500 + pytest_xdist_worker_id()


def run_command(
    command: list[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command until it ends.

    Args:
        command: the words of the command.
        return_stdout: whether to return the output.
        env: the environment; this process's by default.

    Returns:
        The combined output and error output, if `return_stdout` is set.

    Raises:
        SubprocessCallException: the command failed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=None if env is None else dict(env),
    )
    if done.returncode:
        raise SubprocessCallException(
            f"Command `{' '.join(map(str, command))}` failed with exit code {done.returncode}:\n\n{done.stdout}"
        )
    if return_stdout:
        return done.stdout
    return None


def execute_subprocess_async(
    cmd: list[Any],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command until it ends.

    Args:
        cmd: the words of the command.
        env: the environment; this process's by default.
        stdin: the standard input of the command.
        timeout: the limit in seconds.
        quiet: do not print the command's output.
        echo: print the command first.

    Returns:
        The exit code and the lines of the output.

    Raises:
        RuntimeError: the command failed; the message contains its error output.
        subprocess.TimeoutExpired: the command has not ended within the limit.
    """
    words = [str(word) for word in cmd]
    if echo:
        print("\nRunning: ", " ".join(words))
    done = subprocess.run(
        words,
        env=None if env is None else dict(env),
        stdin=stdin,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    if not quiet:
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(
            f"'{' '.join(words)}' failed with returncode {done.returncode}\n\n"
            f"The combined stderr from workers follows:\n{done.stderr}"
        )
    return RunOutput(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the installed package: `path_in_accelerate_package("test_utils", "scripts")`."""
    package = Path(inspect.getfile(devices)).parents[1]
    return package.joinpath(*components)


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return what it prints to the standard output."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        func(*args, **kwargs)
    return captured.getvalue()


@contextlib.contextmanager
def assert_exception(
    exception_class: type[BaseException], msg: str | None = None
) -> Iterator[None]:
    """Assert that the block raises an exception.

    Args:
        exception_class: the class of the exception.
        msg: a text that its message must contain.
    """
    try:
        yield
    except exception_class as error:
        assert msg is None or msg in str(error), (
            f"Expected message '{msg}' to be in exception but got '{error}'"
        )
    else:
        raise AssertionError(f"Expected exception {exception_class} but no exception was raised.")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is equal on all processes. Every process must call it."""
    from ..collectives.tensors import gather
    from ..state import PartialState

    state = PartialState()
    everyone = gather(tensor[None].clone().to(state.device)).cpu()
    return all(torch.equal(other, tensor.cpu()) for other in everyone)
