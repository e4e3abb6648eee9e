# SPDX-License-Identifier: Apache-2.0
"""`accelerate certify SCRIPT`: whether a script trains the same model in a layout as on one process."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import env, messages, system
from ..core.errors import ConfigurationError
from ..core.files import check_writable
from .parser import Parser, exit_on

if TYPE_CHECKING:
    from ..certify.certificate import Certificate, Row
    from ..config.launch_settings import Settings as LaunchSettings
    from ..launchers.base import Launcher

USAGE = """accelerate certify [options] --layouts ddp:2 fsdp:2 [options] SCRIPT [script arguments]
       accelerate certify [options] SCRIPT [script arguments] --layouts ddp:2 fsdp:2 [options]
       accelerate certify --check certificate.yaml"""
_LAYOUTS = ("--layouts", "--layout")
# Options that a certificate has a field for.
_FIELDS = ("layouts", "steps", "dtype", "dropout", "reference", "against", "config_file", "cpu")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate certify`."""
    made = Parser(
        prog="accelerate certify",
        usage=USAGE,
        description="Run a script for a few optimizer steps on one process and in each layout, "
        "and compare the results. Exit code: 0 equal, 1 different, 2 could not run, "
        "3 not comparable.",
    )
    made.add_argument(
        *_LAYOUTS,
        type=str.split,
        metavar="LAYOUT ...",
        help="Layouts to certify, such as ddp:2 or fsdp:2xtp:2.",
    )
    made.add_argument(
        "--steps", type=int, metavar="N", help="Number of optimizer steps to compare. Default: 4."
    )
    made.add_argument(
        "--config_file",
        metavar="FILE",
        help="Launch configuration file. --layouts replaces its layout.",
    )
    made.add_argument(
        "--dtype",
        help="Dtype of the model's tensors, such as float64, which makes the verdict sharp. "
        "Default: the model's own.",
    )
    made.add_argument(
        "--dropout",
        action="store_true",
        default=None,
        help="Keep dropout. By default, its probability is set to 0.",
    )
    made.add_argument(
        "--reference",
        metavar="LAYOUT",
        help="Layout to compare with, for a model that does not fit on one process. Default: one "
        "process.",
    )
    made.add_argument(
        "--against",
        metavar="TEXT",
        help="Compare each layout with itself instead: 'itself' runs it twice and compares bit "
        "by bit. A folder with bin/python or a git revision of this package names another "
        "installation to compare with.",
    )
    made.add_argument("--cpu", action="store_true", default=None, help="Run on the CPU.")
    made.add_argument("--json", action="store_true", help="Print the certificate as JSON.")
    made.add_argument(
        "--output",
        default="certificate.yaml",
        metavar="FILE",
        help="File for the certificate. Default: certificate.yaml.",
    )
    made.add_argument(
        "--folder",
        help="Folder for records and logs. Default: a temporary folder, in which the logs are "
        "kept.",
    )
    made.add_argument(
        "--check", metavar="FILE", help="Run a certificate again, and compare the verdicts."
    )
    made.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module.")
    made.add_argument("script", nargs="?", help="Script to run.")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="Arguments of the script.")
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command."""
    made = parser()
    args = made.parse_args(_arranged(sys.argv[1:] if argv is None else argv))
    if args.check is None and args.layouts is None:
        made.error("--layouts is missing: add layouts such as ddp:2 or fsdp:2xtp:2")
    if args.check is None and args.script is None:
        made.error("the script is missing: name it first or after the layouts")
    with exit_on(ConfigurationError):
        sys.exit(_run(args))


def _arranged(words: Sequence[str]) -> list[str]:
    """The words with the options first, and all layouts as the value of one option.

    A script that comes before `--layouts` has all arguments up to it.
    """
    words = list(words)
    position = next((i for i, word in enumerate(words) if word in _LAYOUTS), None)
    if position is None:
        return words
    if parser().parse_args(words[:position]).script is not None:
        words = [*words[position:], *words[:position]]
        position = 0
    from ..certify.layouts import is_layout

    end = position + 2
    while end < len(words) and is_layout(words[end]):
        end += 1
    return [
        *words[:position],
        f"{words[position]}={' '.join(words[position + 1 : end])}",
        *words[end:],
    ]


def _run(args: argparse.Namespace) -> int:
    from ..certify import certificate as certificates
    from ..certify.comparison import FAILED

    check_writable(args.output, "--output")
    verdicts: dict[str, str] = {}
    if args.check is None:
        certificate = _requested(args)
    else:
        certificate, verdicts = certificates.read(Path(args.check))
        _compare_fields(args, certificate)
    if args.folder is None:
        folder = Path(tempfile.mkdtemp(prefix="certify-"))
    else:
        folder = Path(args.folder).absolute()
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigurationError(f"--folder {folder} is not empty")
    messages.show(f"certify: logs in {folder}")

    def report(row: Row) -> None:
        if args.json:
            messages.show(row.text())
        else:
            print(row.text(), flush=True)

    try:
        certificate.run(folder, report)
    finally:
        if args.folder is None:
            for file in folder.rglob("step_*.pt"):
                file.unlink()
    if args.json:
        print(json.dumps(certificate.as_data(), indent=1))
    code = certificate.code
    # The script may have refused what was meant for this command.
    options = {f"--{name}" for name in vars(args)}
    misplaced = options.intersection(word.partition("=")[0] for word in args.arguments)
    if code == certificates.CODES[FAILED] and misplaced:
        messages.show(
            f"certify: {args.script} got its arguments {', '.join(sorted(misplaced))}. Options of certify come "
            "before the script, or after --layouts at the end"
        )
    if args.check is None:
        certificate.write(Path(args.output))
        messages.show(f"wrote {args.output}")
    for row in certificate.rows:
        if row.verdict != verdicts.get(row.layout, row.verdict):
            messages.show(
                f"{row.layout}: {row.verdict}, but {verdicts[row.layout]} in {args.check}"
            )
            code = code or 1
    return code


def _requested(args: argparse.Namespace) -> Certificate:
    from ..certify.certificate import Certificate
    from .launch import find_file

    base: dict[str, Any] = {}
    file = find_file(args.config_file)
    if file is not None:
        base = file.data
    kind = "script"
    if args.module:
        kind = "module"
    cpu = args.cpu or base.get("use_cpu") or env.get_flag("ACCELERATE_USE_CPU")
    return Certificate.of(
        {
            "command": [args.script, *args.arguments],
            "kind": kind,
            "configuration": base,
            "cpu": bool(cpu) or not system.accelerators().number,
            "steps": 4 if args.steps is None else args.steps,
            "dtype": args.dtype or "own",
            "dropout": bool(args.dropout),
            "reference": args.reference or "single",
            "against": args.against,
            "layouts": [{"layout": text} for text in args.layouts],
        }
    )


def _compare_fields(args: argparse.Namespace, certificate: Certificate) -> None:
    """Refuse options, or a script, that are not those of the certificate."""
    data = certificate.as_data()
    data["layouts"] = [layout.text for layout in certificate.layouts]
    given = {name: getattr(args, name) for name in _FIELDS}
    if args.script is not None:
        given["command"] = [args.script, *args.arguments]
    for name, value in given.items():
        if value is not None and value != data.get(name):
            raise ConfigurationError(
                f"--check {args.check}: its {name} is {data.get(name)}, but {value} was passed: "
                "remove what the certificate already sets"
            )


def certify_launch(settings: LaunchSettings, launcher: Launcher) -> None:
    """Certify the layout of a launch, and name the certificate to its processes.

    Raises:
        ConfigurationError: the layout cannot be compared with one process.
        SystemExit: the verdict is not equal.
    """
    from ..certify import layouts
    from ..certify.certificate import Certificate
    from ..certify.runs import Script, is_of_layout
    from ..certify.settings import Settings
    from ..core.options import options

    spec = launcher.spec
    for name in ("use_deepspeed", "use_megatron_lm", "tpu"):
        if settings[name]:
            raise ConfigurationError(
                f"certify: {settings.shown(name)} cannot be compared with one process"
            )
    if launcher.name != "local" or spec.num_machines > 1:
        raise ConfigurationError(
            "certify: a layout is certified on one machine with the local engine, but this is "
            f"{launcher.name}. Run `accelerate certify` on one machine first"
        )
    base: dict[str, Any] = {}
    for name, option in options().items():
        is_set = settings.chosen(name) or (settings["use_fsdp"] and "use_fsdp" in option.when)
        if option.is_published and option.file_key and is_set and not is_of_layout(name):
            section, _, key = option.file_key.rpartition(".")
            target = base.setdefault(section, {}) if section else base
            target[key] = settings[name]
    record = Settings("", settings["certify"])
    certificate = Certificate(
        Script(spec.program, base, record, spec.device == "cpu"),
        [layouts.of_launch(settings, spec.num_processes)],
    )
    folder = Path(tempfile.mkdtemp(prefix="certify-"))
    certificate.run(folder, lambda row: messages.show(f"certify: {row.text()}"))
    if certificate.code:
        messages.show(f"the run is not started; logs in {folder}")
        sys.exit(certificate.code)
    path = Path("certificate.yaml").absolute()
    certificate.write(path)
    env.publish({"ACCELERATE_CERTIFICATE": path})
