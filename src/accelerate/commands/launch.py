# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch`: settings from flags, variables and file; then the launcher that they need."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import launch_file
from ..config.launch_settings import Settings, given, resolve_settings
from ..core import env, messages
from ..core.errors import CheckpointError, ConfigurationError, LaunchError
from ..core.files import check_writable, make_folder
from ..core.lazy import public_names
from ..core.options import GROUPS, options
from ..launchers.base import Launcher
from ..launchers.local import is_entered
from ..launchers.plan import (
    choose,
    leave_outer_run,
    plan,
    shortage_of_cpus,
    summary,
    without_effect,
)
from ..launchers.spec import LaunchSpec, Program
from .parser import add_options, coloured_help, command_parser, exit_on, has_colour, print_error

DESCRIPTION = (
    "Run a training script on one process, several processes, or several machines. Options that "
    "you do not pass are read from their environment variables and the configuration file; "
    "otherwise they have their default values."
)

# The exit code with which argparse ends a script that does not know one of its arguments.
WRONG_ARGUMENTS = 2
# Options of torchrun that have another name here, besides the accepted ones.
OF_TORCHRUN = {
    "rdzv_endpoint": "use --main_process_ip and --main_process_port",
    "standalone": "remove it: a launch on one machine does not need a rendezvous",
    "redirects": "use --log_dir, which writes the output of each rank to files",
    "start_method": "remove it: each rank is a new interpreter",
    "run_path": "remove it, and pass the path of the script",
}


# Options that no script has, as they say how many of it run and where.
OF_THE_LAUNCH = (
    "num_processes", "nproc_per_node", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "gpu_ids", "multi_gpu", "config_file", "use_fsdp", "use_deepspeed",
)  # fmt: skip


class Help(argparse.Action):
    """`-h`: the usual options; `-h TOPIC`: those of a topic, or one option; `-h all` and `--help_all`: everything."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print the help and exit."""
        from . import launch_help

        try:
            text = launch_help.text(parser, self.const or values)
        except ConfigurationError as error:
            parser.error(str(error))
        print(coloured_help(text) if has_colour(sys.stdout) else text, end="")
        parser.exit()


def launch_command_parser(
    subparsers: Any = None,
) -> argparse.ArgumentParser:
    """The parser of `accelerate launch`; as a sub-command where `subparsers` is given."""
    usage = "accelerate launch [options] script.py [script arguments]"
    parser = command_parser(
        "launch",
        DESCRIPTION,
        launch_command,
        subparsers,
        foreign=OF_TORCHRUN,
        usage=usage,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        action=Help,
        nargs="?",
        metavar="TOPIC",
        help="Show the most common options, or those of a topic.",
    )
    parser.add_argument(
        "--help_all", action=Help, nargs=0, const="all", help="Show the options of all topics."
    )
    add_options(parser, GROUPS)
    parser.add_argument(
        "--no_tpu_cluster",
        dest="tpu_use_cluster",
        action="store_const",
        const=False,
        help=argparse.SUPPRESS,
    )
    parser.add_argument(
        "training_script",
        help="The script, module or program to start, followed by its own arguments.",
    )
    script_args = parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    script_args.required = False  # else an absent script is reported with this one
    return parser


# The name that every command has.
parser = launch_command_parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Every option of a launch with its origin. ConfigurationError for what cannot be."""
    flags = given(args)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
        return resolve_settings(flags, find_file(flags.get("config_file")))


def find_file(named: str | None = None) -> launch_file.LaunchFile | None:
    """The configuration file in effect: the named one, the variable's, or the default one where it exists."""
    named = named or env.get("ACCELERATE_CONFIG_FILE")
    if named:
        return launch_file.read(named)
    default = launch_file.default_file()
    if default.is_file():
        return launch_file.read(default)
    return None


def prepared(
    settings: Settings, program: Program, in_place: bool = False
) -> tuple[LaunchSpec, Launcher]:
    """The checked launch. A ConfigurationError names the origin of each setting in its message."""
    with settings.locating():
        spec = plan(settings, program, in_place)
        return spec, choose(spec, settings)


def launch_command(args: argparse.Namespace, in_place: bool = False) -> None:
    """Launch the script and wait for it. SystemExit with the first failing process's exit code.

    `in_place`: a lone script may run as this very process; only for a caller that has nothing left to do.
    """
    leave_outer_run()
    settings = settings_of(args)
    if settings.file is not None and settings.file.is_sagemaker:
        from ..launchers import sagemaker
        from .config.config_args import load_config_from_file

        sagemaker.launch(load_config_from_file(settings.file.path), args)
        return
    spec, launcher = prepared(settings, Program.of(args), in_place)
    for line in without_effect(type(launcher), settings):
        messages.show(line)
    if (
        launcher.uses_this_machine
        and spec.device == "cpu"
        and (settings["dry_run"] or not settings["quiet"])
    ):
        warning = shortage_of_cpus(spec.local_processes, spec.threads)
        if warning is not None:
            messages.show(warning)
    with settings.locating():
        if spec.log_dir is not None and launcher.uses_this_machine:
            check_writable(spec.log_dir, "log_dir", folder=True)
        if spec.error_file is not None and launcher.uses_this_machine:
            check_writable(spec.error_file, "error_file")
        if settings["resume"] is not None and launcher.uses_this_machine:
            _check_project(settings["resume"])
    if settings["dry_run"]:
        print(launcher.dry_run())
        return
    if spec.log_dir is not None and launcher.uses_this_machine:
        with settings.locating():
            make_folder(spec.log_dir, "log_dir")
    if settings["certify"]:
        from .certify import certify_launch

        certify_launch(settings, launcher)
    if not settings["quiet"]:
        messages.show(summary(settings, spec))
    show_misplaced(spec.program)
    code: object = 0
    try:
        code = launcher.run()
    except SystemExit as end:  # of a script that runs as this very process
        code = end.code
        raise
    finally:
        flags = set().union(*(option.spellings for option in options().values()))
        misplaced = [word for word in spec.program.args if word.split("=")[0] in flags]
        if code == WRONG_ARGUMENTS and misplaced:
            messages.show(
                f"{spec.program.name} got {', '.join(misplaced)}: launch options go before "
                f"{spec.program.name}"
            )
    if code:
        sys.exit(code)


def _check_project(location: str) -> None:
    """Exit if a place in a bucket cannot be listed. A local folder is made by the run.

    A program that only loads needs no right to write: one that trains finds out in `prepare`.
    """
    # Slower to import than all else that a launch needs.
    from ..core.buckets import Bucket, is_bucket

    if is_bucket(location):
        bucket, folder = Bucket.of(location)
        with exit_on(CheckpointError):
            bucket.children(folder)


def show_misplaced(program: Program) -> None:
    """Name options of processes and machines behind the script's name, if the script does not mention them."""
    if program.kind != "script" or not os.path.isfile(program.name):
        return
    text = Path(program.name).read_text(errors="replace")
    rows = [options()[name] for name in OF_THE_LAUNCH]
    spellings = {flag: row.name for row in rows for flag in row.spellings}
    misplaced = []
    for word in program.args:
        name = spellings.get(word.split("=")[0])
        if name is not None and name not in text:
            misplaced.append(word)
    if misplaced:
        messages.show(
            f"{', '.join(misplaced)} goes to {program.name}, which does not mention it: launch "
            "options go before the script"
        )


# The API has a function for each kind of launch. Here the arguments determine it.
simple_launcher = launch_command
multi_gpu_launcher = launch_command
deepspeed_launcher = launch_command
tpu_launcher = launch_command


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Check the arguments, for tools that then call one of the functions above.

    Returns:
        The arguments; what is not given stays None until the launch. The configuration file's content, or None.
        Whether it determines the mixed precision.
    """
    from .config.config_args import load_config_from_file

    settings = settings_of(args)
    if settings.file is None:
        return args, None, False
    determines = args.mixed_precision is None and "mixed_precision" in settings.file.values
    return args, load_config_from_file(str(settings.file.path)), determines


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """A script's `--name value` arguments for a SageMaker job, with numbers as numbers."""
    from ..launchers.sagemaker import hyperparameters

    values = hyperparameters(nargs)
    for name, value in values.items():
        with contextlib.suppress(ValueError):
            values[name] = float(value) if isinstance(value, str) else value
    return values


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    args = launch_command_parser().parse_args(argv)
    try:
        launch_command(args, in_place=True)
    except (ConfigurationError, LaunchError) as error:
        # A script that ran as this very process raised it: its own traceback is the right thing to show.
        if is_entered():
            raise
        print_error(error)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

if __name__ == "__main__":
    from .main import launch

    launch()
