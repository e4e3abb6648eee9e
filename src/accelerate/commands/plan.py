# SPDX-License-Identifier: Apache-2.0
"""`accelerate plan MODEL`: the layouts in which a training step fits a machine, with memory, time and messages."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..core import messages
from ..core.errors import ConfigurationError
from ..core.files import check_writable
from .parser import Formatter, Parser, exit_on, help_width, print_error, table

if TYPE_CHECKING:
    from torch import nn

    from ..planning.estimate import Estimate
    from ..planning.layouts import PlannedLayout
    from ..planning.machine import Machine
    from ..planning.trace import PlannedTraining

PRECISIONS = ("no", "bf16", "fp16")
DESCRIPTION = (
    "Show which layouts fit a training step of a model in memory, and how long the step takes. A "
    "step in each layout is traced with fake tensors: only the model's configuration is "
    "downloaded, and no memory is allocated. Estimates are intervals."
)
EXAMPLES = """examples:
  accelerate plan ./my-llama --batch 32x2048 --mixed_precision bf16 --machine 8xH100
  accelerate plan train:make_model --batch 64x3x224x224:float32 --ranks 2
  accelerate plan ./my-llama --batch 32x2048 --ranks 8 --layout fsdp tp2+fsdp4 --write plan.yaml

layout names (N and M are numbers of ranks):
  single              one process
  ddp                 DistributedDataParallel
  fsdp, hsdpMxN       FSDP2 over all ranks, or in M replicas of N shards
  tpN, tpN+fsdpM      tensor parallel, with FSDP2 over the remaining ranks
  cpN+fsdpM           context parallel; sp instead of cp: sequence parallel
  ppN, ppN+dpM        pipeline with GPipe's schedule, also with +fsdpM, +hsdp2xM, +tpM
  ppN+SCHEDULE        another schedule: 1f1b, looped_bfs, interleaved, zero_bubble, zbv
  epN+fsdpM           experts on different ranks, also with +tpN
  ...+ckpt            recomputes activations in the backward pass
  ...+offload         keeps the shards in host memory
  ... xK              accumulates K batches; added to layouts that do not fit
"""
# Layouts that are traced at once, each by one thread.
_MOST_PROCESSES = 8


def parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate plan`."""

    class Help(Formatter, argparse.RawDescriptionHelpFormatter):
        """Keeps the lines of the examples."""

    made = Parser(
        prog="accelerate plan",
        description=textwrap.fill(DESCRIPTION, help_width()),
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    made.add_argument(
        "model",
        help="Folder with a config.json, a name on the Hugging Face Hub, or module:function that "
        "returns a torch.nn.Module.",
    )
    made.add_argument(
        "--batch", required=True, metavar="SHAPE",
        help="Batch of one optimizer step on all ranks: samples x tokens, such as 32x512, or the "
             "shape and dtype of the batch, such as 32x3x224x224:float32.",
    )  # fmt: skip
    made.add_argument(
        "--mixed_precision", choices=PRECISIONS, default="no", help="Mixed precision of the run."
    )
    made.add_argument(
        "--optimizer",
        default="adamw",
        help="One of adamw (the default), adam, sgd, momentum, adagrad, rmsprop and muon. With muon, AdamW trains "
        "embeddings and all that is not a matrix.",
    )
    made.add_argument(
        "--machine",
        metavar="TEXT",
        help="Machine to plan for: 8x80GB, 8xH100, or 2x8xH100 (two machines). Default: this machine.",
    )
    made.add_argument(
        "--ranks",
        type=int,
        help="Number of processes on this machine. Default: one for each accelerator, or 1.",
    )
    for name, text in (
        ("tflops", "speed of matrix products on a device, in TFLOP/s"),
        ("link", "bandwidth between devices of a machine, in GB/s"),
        ("between", "bandwidth of a device to other machines, in GB/s"),
    ):
        made.add_argument(f"--{name}", type=float, help=f"With --machine: {text}.")
    made.add_argument(
        "--memory",
        type=float,
        help="Memory that each rank may use, in GB. Default: the machine's memory.",
    )
    made.add_argument(
        "--layout",
        "--layouts",
        nargs="+",
        metavar="NAME",
        help="Plan only these layouts. Default: all.",
    )
    made.add_argument(
        "--calibrate",
        nargs="+",
        metavar="RUN",
        help="Plan files to which earlier runs added measurements. The measurements correct the "
        "estimates.",
    )
    made.add_argument(
        "--write",
        metavar="FILE",
        help="Write a launch configuration for the fastest layout that fits, or for the layout "
        "of --layout if it names one.",
    )
    made.add_argument("--json", action="store_true", help="Print JSON instead of the table.")
    made.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="Run Python code that comes with the model. Use this only for code that you have "
        "read.",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 for wrong arguments, and with 1 if nothing fits."""
    args = parser().parse_args(argv)
    with exit_on(ConfigurationError):
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    from ..planning import estimate, model, trace
    from .estimate import build

    batch = model.parse_batch(args.batch)
    if args.optimizer not in trace.OPTIMIZERS:
        raise ConfigurationError(
            f"--optimizer {args.optimizer!r} is unknown: use one of {', '.join(trace.OPTIMIZERS)}"
        )
    here = _machine(args)
    if args.write is not None:
        check_writable(args.write, "--write")
    module = build(args.model, trust_remote_code=args.trust_remote_code)
    chosen = _layouts(args, here, module)
    training = trace.PlannedTraining(
        module, batch, args.mixed_precision, args.optimizer, here.device, here.machines
    )
    rows = list["Estimate"]()
    interrupted = False
    with _progress(rows, len(chosen)) as show:
        try:
            rows = estimate.plan(
                training, here, chosen, min(_MOST_PROCESSES, os.cpu_count() or 1), show
            )
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        rows.sort(key=estimate.order)
        messages.show(f"interrupted: these {len(rows)} layouts were estimated")
    elif not args.layout:
        rows += estimate.refused(module, here.ranks)
    _print_rows(args, rows, training, here)
    defects = [row for row in rows if row.defect is not None]
    for row in defects:
        print_error(f"{row.layout.name}: {row.failure}\n{row.defect}")
    if interrupted:
        return 130
    if defects:
        return 1
    return _conclude(args, rows, training, here)


def _machine(args: argparse.Namespace) -> Machine:
    """The machine to plan for. Raises ConfigurationError for options that do not describe one."""
    from ..planning import machine, report

    for name in ("ranks", "tflops", "link", "between", "memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"--{name} {value}: use a number above 0")
    if args.ranks is not None and args.machine:
        raise ConfigurationError(
            f"--ranks {args.ranks} is for this machine: --machine already contains the number of "
            "ranks"
        )
    if args.machine:
        here = machine.describe(args.machine, args.link, args.tflops, args.between)
    elif args.link or args.tflops or args.between:
        raise ConfigurationError(
            "--link, --tflops and --between describe a machine: also add --machine"
        )
    else:
        here = machine.found(args.ranks)
    if args.memory is not None:
        here = dataclasses.replace(here, memory=int(args.memory * machine.GIGA))
    if args.calibrate:
        return report.calibrate(here, args.calibrate)
    return here


def _layouts(args: argparse.Namespace, here: Machine, module: nn.Module) -> list[PlannedLayout]:
    """The layouts to estimate. Raises ConfigurationError for unknown names, and for one that no file can select."""
    from ..core.errors import suggestion
    from ..planning import experts, layouts

    chosen = layouts.candidates(here.ranks, here.machines, here.device)
    if experts.has_experts(module):
        chosen += layouts.expert_candidates(here.ranks)
    names = [layout.name for layout in chosen]
    for name in args.layout or ():
        if name not in names:
            raise ConfigurationError(
                f"--layout {name}: this layout does not exist on {here.ranks} "
                f"rank{'s' * (here.ranks > 1)}"
                + (suggestion(name, names) or f"; choose from {', '.join(names)}")
            )
    chosen = [layout for layout in chosen if layout.name in (args.layout or names)]
    if args.write and all(layout.loading for layout in chosen):
        raise ConfigurationError(
            f"--layout {chosen[0].name}: a configuration file cannot select it. Start a script that loads "
            f"its model with from_pretrained(..., distributed_config={chosen[0].distributed_config}), "
            "without another layout"
        )
    return chosen


def _print_rows(
    args: argparse.Namespace, rows: list[Estimate], training: PlannedTraining, here: Machine
) -> None:
    """Print the plan: JSON, or the layouts that fit, those that do not, and why others have no estimate."""
    from ..core.objects import size_of
    from ..planning import report
    from ..planning.model import count

    if args.json:
        print(report.to_json(rows, training, here))
        return
    print(
        f"{type(training.model).__name__}, {count(training.model):,} parameters, batch {training.batch}, "
        f"mixed precision {args.mixed_precision}, {args.optimizer}\n"
        f"{here.ranks} x {here.device}, {size_of(here.memory)} each ({here.origin})\n"
    )
    estimated = [row for row in rows if row.failure is None]
    unit = report.unit_of(rows)
    for title, fits in (("fits, fastest first", True), ("does not fit", False)):
        shown = [row for row in estimated if row.fits == fits]
        if shown:
            cells = report.table_rows(shown, unit)
            print(
                f"{title}; memory per rank and messages in {unit.name}:\n{table(cells, report.HEADERS)}\n"
            )
    for row in estimated:
        if row.layout.loading:
            print(
                f"{row.layout.name}: a configuration file (--write) cannot select this layout; "
                "load the model with from_pretrained(..., "
                f"distributed_config={row.layout.distributed_config})"
            )
    for names, failure in report.failures(rows):
        print(textwrap.fill(f"not estimated: {names}: {failure}", 100, subsequent_indent="    "))


def _conclude(
    args: argparse.Namespace, rows: list[Estimate], training: PlannedTraining, here: Machine
) -> int:
    """Write the file of --write, or say what is missing if nothing fits. Returns the exit code."""
    from ..planning import report

    estimated = [row for row in rows if row.failure is None]
    if not estimated:
        raise ConfigurationError(
            f"no layout could be estimated. {rows[0].layout.name}: {rows[0].failure}"
        )
    is_fixed = args.layout is not None and len(args.layout) == 1
    best = next(
        (row for row in estimated if not row.layout.loading and (row.fits or is_fixed)), None
    )
    fits = any(row.fits for row in estimated)
    if args.write and best is not None:
        path = report.write(args.write, best, training, here)
        messages.show(
            f"wrote {best.layout.name} to {args.write}. A run with `accelerate launch "
            f"--config_file {args.write}` adds its measurements to {path}"
        )
    elif args.write and fits:
        messages.show(
            f"{args.write} was not written: a configuration file cannot select any of the layouts "
            "that fit"
        )
        return 1
    elif missing := report.shortage(rows, here):
        messages.show(missing)
    if fits:
        return 0
    return 1


@contextlib.contextmanager
def _progress(rows: list[Estimate], layouts: int) -> Iterator[Callable[[Estimate, int], None]]:
    """Collect the rows as they come, and show each: in a line of the terminal that is removed at the end, or its own.

    Yields:
        A function to call with a new row and the number of layouts that are known so far.
    """
    from ..planning.report import in_a_line

    def show(text: str) -> None:
        # Without a thread that redraws it.
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def add(row: Estimate, known: int) -> None:
        rows.append(row)
        text = f"{len(rows)} of {known} layouts: {in_a_line(row)}"
        if sys.stderr.isatty():
            show(f"{messages.PREFIX}{text}")
        else:
            messages.show(text)

    try:
        if sys.stderr.isatty():
            show(f"{messages.PREFIX}0 of {layouts} layouts")
        yield add
    finally:
        if sys.stderr.isatty():
            show("")
