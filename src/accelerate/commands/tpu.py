# SPDX-License-Identifier: Apache-2.0
"""`accelerate tpu-config`: run setup commands on all workers of a TPU pod, through gcloud's ssh."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ..config import launch_file
from ..core import messages
from ..core.errors import ConfigurationError, LaunchError
from ..core.version import __version__
from ..launchers.spec import check_host
from .parser import command_parser, exit_on, print_error

# Where the commands run on each worker, and where the wheel of this package is copied to: nobody else can write there.
FOLDER = "/usr/share"
WHEEL_FOLDER = "~"


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate tpu-config`, or add it to `subparsers`."""
    description = (
        "Run commands on every worker of a TPU pod to set it up for `accelerate launch`. Options "
        "that you do not pass are read from the configuration file (tpu_name, tpu_zone, "
        "command_file, commands)."
    )
    made = command_parser("tpu-config", description, tpu_command_launcher, subparsers)
    made.add_argument(
        "--config_file", help="Configuration file to read instead of the default file."
    )
    made.add_argument("--tpu_name", help="Name of the TPU.")
    made.add_argument("--tpu_zone", help="Zone of the TPU.")
    made.add_argument(
        "--use_alpha", action="store_true", help="Call `gcloud alpha` instead of `gcloud`."
    )
    made.add_argument(
        "--command_file",
        help="File with one command on each line. Empty lines and lines that begin with # are ignored.",
    )
    made.add_argument(
        "--command",
        action="append",
        nargs="+",
        help="Command in quotes. Several commands may follow, and the option can be repeated.",
    )
    made.add_argument(
        "--install_accelerate",
        action="store_true",
        help="First build a wheel of this installation, copy it to the workers and install it.",
    )
    made.add_argument(
        "--accelerate_version",
        default="latest",
        help=f"Version to install on the workers: latest (this version) or {__version__}. Default: latest.",
    )
    made.add_argument(
        "--debug", action="store_true", help="Print the gcloud command line without running it."
    )
    return made


# The name that every command has.
parser = tpu_command_parser


def gcloud_commands(args: argparse.Namespace, wheel: str | None = None) -> list[list[str]]:
    """The argvs of gcloud for parsed arguments: copy the wheel, where one is given, then run the commands.

    Raises ConfigurationError for what is missing, with where it may be given.
    """
    settings = _from_file(args.config_file)
    name = args.tpu_name or settings.get("tpu_name")
    zone = args.tpu_zone or settings.get("tpu_zone")
    for what, value in (("tpu_name", name), ("tpu_zone", zone)):
        if not value:
            raise ConfigurationError(
                f"{what} is missing: add --{what}, or set it in the configuration file"
            )
        check_host(str(value), what)
    steps = [f"cd {FOLDER}", *_installation(args, wheel), *_commands(args, settings)]
    tpu = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm"]
    where = ["--zone", str(zone)]
    everywhere = ["--worker", "all"]
    commands = [[*tpu, "ssh", str(name), *where, "--command", "; ".join(steps), *everywhere]]
    if wheel is not None:
        commands.insert(0, [*tpu, "scp", wheel, f"{name}:{WHEEL_FOLDER}/", *where, *everywhere])
    return commands


def _from_file(named: str | None) -> dict[str, Any]:
    """The keys of the named configuration file, or of the default one where it exists."""
    if named is None and not launch_file.default_file().is_file():
        return {}
    return launch_file.read(named or launch_file.default_file()).data


def _installation(args: argparse.Namespace, wheel: str | None) -> list[str]:
    if not args.install_accelerate:
        return []
    if args.accelerate_version not in ("latest", __version__):
        raise ConfigurationError(
            f"--accelerate_version {args.accelerate_version}: the workers get the version that "
            f"runs this command, {__version__}. Remove the option, or run the command from an "
            "installation of that version"
        )
    # pip keeps what is there of the same version, whoever made it.
    return ["pip uninstall -y accelerate", f"pip install {WHEEL_FOLDER}/{Path(wheel or '').name}"]


def build_wheel(folder: Path) -> Path:
    """Write a wheel of the installed package into `folder`, from its own files: no index and no build tool is needed.

    Source: the binary distribution format of the Python packaging specifications.
    """
    package = Path(__file__).resolve().parents[1]
    info = f"accelerate-{__version__}.dist-info"
    try:
        metadata = importlib.metadata.distribution("accelerate").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        metadata = None
    texts = {
        f"{info}/METADATA": metadata
        or f"Metadata-Version: 2.1\nName: accelerate\nVersion: {__version__}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: accelerate\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\naccelerate = accelerate.commands.main:main\n",
    }
    path = folder / f"accelerate-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        names = []
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                names.append(f"accelerate/{file.relative_to(package).as_posix()}")
                wheel.write(file, names[-1])
        for name, text in texts.items():
            names.append(name)
            wheel.writestr(name, text)
        # Checksums are optional for the installer; the list of files is what it uninstalls by.
        wheel.writestr(
            f"{info}/RECORD", "".join(f"{name},,\n" for name in [*names, f"{info}/RECORD"])
        )
    return path


def _commands(args: argparse.Namespace, kept: dict[str, Any]) -> list[str]:
    """The commands of a file, or those given; the configuration file's where neither was given."""
    file = args.command_file
    commands = args.command
    if file and commands:
        raise ConfigurationError(
            "--command_file and --command contradict each other: use only one of them"
        )
    if not file and not commands:
        file = kept.get("command_file")
        commands = [kept.get("commands") or []]
    lines = list(itertools.chain.from_iterable(commands or []))
    if file:
        # A comment would swallow every command behind it: all of them become one line.
        texts = map(str.strip, Path(file).expanduser().read_text().splitlines())
        lines = [text for text in texts if text and not text.startswith("#")]
    if not lines and not args.install_accelerate:
        raise ConfigurationError(
            "nothing to run: add --command or --command_file, or set commands or command_file in "
            "the configuration file"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    tpu_command_launcher(tpu_command_parser().parse_args(argv))


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the command with parsed arguments. Exits with gcloud's code, with 2 where something is missing."""
    with (
        exit_on(ConfigurationError, LaunchError, OSError),
        tempfile.TemporaryDirectory() as folder,
    ):
        if args.install_accelerate:
            wheel = str(build_wheel(Path(folder)))
        else:
            wheel = None
        commands = gcloud_commands(args, wheel)
        if args.debug:
            print("\n".join(f"Running {shlex.join(command)}" for command in commands))
            return
        if shutil.which("gcloud") is None:
            raise LaunchError(
                "gcloud is not on the PATH: install the Google Cloud CLI, or print the command "
                "line with --debug and run it elsewhere"
            )
        for command in commands:
            code = subprocess.run(command).returncode
            if code:
                break
    if code:
        print_error(f"gcloud ended with exit code {code}: {shlex.join(command)}")
        sys.exit(code if code > 0 else 128 - code)
    messages.show("the pod is set up")
