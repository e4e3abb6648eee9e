# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch`: settings from flags, variables and file; then the launcher that they need."""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ..config import launch_file
from ..config.launch_settings import Settings, given, resolve_settings
from ..core import env
from ..core.errors import ConfigurationError, LaunchError
from ..core.files import check_writable
from ..core.lazy import public_names
from ..core.options import GROUPS
from ..launchers import capacity
from ..launchers.base import Launcher
from ..launchers.plan import plan, summary
from ..launchers.registry import choose
from ..launchers.script import is_entered
from ..launchers.spec import LaunchSpec, Program
from ..launchers.variables import without_effect
from .parser import Formatter, Parser, add_options, coloured_help, has_colour, print_error

DESCRIPTION = (
    "Run a training script on one process, on several processes, or on several machines. The value of an option that "
    "is not given comes from its environment variable, the configuration file, or the default."
)

# Options of torchrun that have another name here, besides the accepted ones.
OF_TORCHRUN = {
    "rdzv_endpoint": "use --main_process_ip and --main_process_port",
    "standalone": "leave it out, a launch on one machine needs no rendezvous",
    "redirects": "use --log_dir, which writes the output of each rank to files",
    "start_method": "leave it out, each rank is a new interpreter",
    "run_path": "leave it out, and give the path of the script",
}


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
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser] | None = None,
) -> argparse.ArgumentParser:
    """The parser of `accelerate launch`; as a sub-command where `subparsers` is given."""
    usage = "accelerate launch [options] script.py [arguments of the script]"
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser(
            "launch",
            description=DESCRIPTION,
            usage=usage,
            allow_abbrev=False,
            formatter_class=Formatter,
            add_help=False,
        )
        parser.set_defaults(func=launch_command)
    else:
        parser = Parser(
            prog="accelerate launch", description=DESCRIPTION, usage=usage, foreign=OF_TORCHRUN, add_help=False
        )
    parser.add_argument(
        "-h", "--help", action=Help, nargs="?", metavar="TOPIC", help="Show the usual options, or those of a topic."
    )
    parser.add_argument(
        "--help_all", "--help-all", action=Help, nargs=0, const="all", help="Show the options of all topics."
    )
    add_options(parser, GROUPS)
    parser.add_argument(
        "--no_tpu_cluster",
        "--no-tpu-cluster",
        dest="tpu_use_cluster",
        action="store_const",
        const=False,
        help=argparse.SUPPRESS,
    )
    parser.add_argument("training_script", help="The script to start (or module, or program), then its own arguments.")
    rest = parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # else an absent script is reported with this one
    return parser


# The name that every command has.
parser = launch_command_parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Every option of a launch with its origin. ConfigurationError for what cannot be."""
    flags = given(args)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"accelerate launch: warning: {message}", file=sys.stderr)
        return resolve_settings(flags, find_file(flags.get("config_file")))


def find_file(named: str | None = None) -> launch_file.LaunchFile | None:
    """The configuration file in effect: the named one, the variable's, or the default one where it exists."""
    named = named or env.get("ACCELERATE_CONFIG_FILE")
    if named:
        return launch_file.read(named)
    default = launch_file.default_file()
    return launch_file.read(default) if default.is_file() else None


def prepared(settings: Settings, program: Program, in_place: bool = False) -> tuple[LaunchSpec, Launcher]:
    """The checked launch. A ConfigurationError names the origin of each setting in its message."""
    with settings.locating():
        spec = plan(settings, program, in_place)
        return spec, choose(spec, settings)


def launch_command(args: argparse.Namespace, in_place: bool = False) -> None:
    """Launch the script and wait for it. SystemExit with the first failing process's exit code.

    `in_place`: a lone script may run as this very process; only for a caller that has nothing left to do.
    """
    settings = settings_of(args)
    if settings.file is not None and settings.file.is_sagemaker:
        _launch_on_sagemaker(settings, args)
        return
    spec, launcher = prepared(settings, Program.of(args), in_place)
    for line in without_effect(type(launcher), settings):
        print(f"accelerate launch: {line}", file=sys.stderr)
    try:
        found = capacity.check(spec, settings["oversubscribe"]) if launcher.uses_this_machine else []
    except ConfigurationError as error:
        if not settings["dry_run"]:
            raise ConfigurationError(settings.located(str(error))) from None
        found = [str(error)]
    for line in found if settings["dry_run"] or not settings["quiet"] else ():
        print(f"accelerate launch: warning: {line}", file=sys.stderr)
    with settings.locating():
        if spec.log_dir is not None and launcher.uses_this_machine:
            check_writable(spec.log_dir, "log_dir", folder=True)
        if spec.error_file is not None and launcher.uses_this_machine:
            check_writable(spec.error_file, "error_file")
    if settings["dry_run"]:
        print(launcher.dry_run())
        return
    if not settings["quiet"]:
        print(summary(settings, spec), file=sys.stderr)
    code = launcher.run()
    if code:
        sys.exit(code)


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


def _launch_on_sagemaker(settings: Settings, args: argparse.Namespace) -> None:
    from ..launchers.sagemaker import launch
    from .config.config_args import load_config_from_file

    assert settings.file is not None
    launch(load_config_from_file(settings.file.path), args)


def main(argv: list[str] | None = None, command: str = "accelerate launch") -> None:
    """Run `accelerate launch`; its errors begin with `command`."""
    args = launch_command_parser().parse_args(argv)
    try:
        launch_command(args, in_place=True)
    except (ConfigurationError, LaunchError) as error:
        # A script that ran as this very process raised it: its own traceback is the right thing to show.
        if is_entered():
            raise
        print_error(command, error)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)

if __name__ == "__main__":
    main()
