# SPDX-License-Identifier: Apache-2.0
"""`accelerate plan MODEL`: the layouts in which a training step fits a machine, with memory, time and messages."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..core.files import check_writable
from .parser import Parser, print_error, table

if TYPE_CHECKING:
    from ..planning.estimate import Estimate
    from ..planning.layouts import PlannedLayout

PRECISIONS = ("no", "bf16", "fp16")
# Layouts that are traced at once, each by one thread.
_MOST_PROCESSES = 8


def plan_command_parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate plan`."""
    made = Parser(
        prog="accelerate plan",
        description="Show in which layouts a training step of a model fits in memory, and how long it takes. A step "
        "in each layout is traced on fake tensors: only the configuration of the model is downloaded, and no memory "
        "is allocated. Estimates are intervals.",
    )
    made.add_argument(
        "model",
        help="Folder with a config.json, id on the Hugging Face Hub, or module:function that returns a module.",
    )
    made.add_argument(
        "--batch", required=True, metavar="SHAPE",
        help="Batch of one optimizer step on all ranks: samples x tokens, such as 32x512, or the shape and dtype of a "
        "batch, such as 32x3x224x224:float32.",
    )  # fmt: skip
    made.add_argument("--mixed_precision", choices=PRECISIONS, default="no", help="Mixed precision of the run.")
    made.add_argument(
        "--optimizer", default="adamw", help="One of adamw (the default), adam, sgd, momentum, adagrad and rmsprop."
    )
    made.add_argument(
        "--machine",
        metavar="TEXT",
        help="Machine to plan for: 8x80GB, 8xH100, or 2x8xH100 (two machines). Default: this machine.",
    )
    made.add_argument(
        "--ranks", type=int, help="Number of processes on this machine. Default: one for each accelerator, or 1."
    )
    made.add_argument("--tflops", type=float, help="With --machine: speed of matrix products on a device, in TFLOP/s.")
    made.add_argument("--link", type=float, help="With --machine: bandwidth between devices of a machine, in GB/s.")
    made.add_argument(
        "--between", type=float, help="With --machine: bandwidth of a device to other machines, in GB/s."
    )
    made.add_argument("--memory", type=float, help="Memory that each rank may use, in GB. Default: the machine's.")
    made.add_argument("--layouts", nargs="+", help="Layouts to plan, by their names in the table. Default: all.")
    made.add_argument(
        "--calibrate",
        nargs="+",
        metavar="RUN",
        help="Plan files to which earlier runs have added measurements. They correct the estimates.",
    )
    made.add_argument("--write", metavar="FILE", help="Write a launch configuration for the fastest layout that fits.")
    made.add_argument("--layout", help="With --write: the layout to write instead of the fastest one.")
    made.add_argument("--json", action="store_true", help="Print JSON instead of the table.")
    made.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="Run Python code that is distributed with the model. Use it only for code that you have read.",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2 for wrong arguments, and with 1 if nothing fits."""
    args = plan_command_parser().parse_args(argv)
    try:
        sys.exit(_run(args))
    except ConfigurationError as error:
        print_error("accelerate plan", error)
        sys.exit(2)


def _run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from ..core.errors import suggestion
    from ..core.objects import convert_bytes
    from ..planning import estimate, experts, layouts, machine, model, report, trace
    from .estimate import build

    batch = model.parse_batch(args.batch)
    if args.optimizer not in trace.OPTIMIZERS:
        raise ConfigurationError(f"--optimizer {args.optimizer!r} is unknown: one of {', '.join(trace.OPTIMIZERS)}")
    for name in ("ranks", "tflops", "link", "between", "memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"--{name} {value}: give a number above 0")
    if args.ranks is not None and args.machine:
        raise ConfigurationError(f"--ranks {args.ranks} is for this machine: --machine gives its own number")
    if args.machine:
        here = machine.describe(args.machine, args.link, args.tflops, args.between)
    elif args.link or args.tflops or args.between:
        raise ConfigurationError("--link, --tflops and --between describe a machine: give --machine too")
    else:
        here = machine.found(args.ranks)
    if args.layout is not None and args.write is None:
        raise ConfigurationError(f"--layout {args.layout} selects what --write writes: give --write FILE too")
    if args.write is not None:
        check_writable(args.write, "--write")
    if args.memory is not None:
        here = replace(here, memory=int(args.memory * machine.GIGA))
    if args.calibrate:
        here = report.calibrate(here, args.calibrate)
    module = build(args.model, trust_remote_code=args.trust_remote_code)
    chosen = layouts.candidates(here.ranks, here.machines, here.device)
    if experts.has_experts(module):
        chosen += layouts.expert_candidates(here.ranks)
    if args.write and args.layout:
        _refuse_unselectable(layouts.find(args.layout, chosen))
    if args.layouts:
        unknown = [name for name in args.layouts if layouts.find(name, chosen) is None]
        if unknown:
            known = [layout.name for layout in chosen]
            raise ConfigurationError(
                f"--layouts {unknown[0]}: no such layout on {here.ranks} rank{'s' * (here.ranks > 1)}"
                + (suggestion(unknown[0], known) or f"; there are {', '.join(known)}")
            )
        chosen = [layout for layout in chosen if layout.name in args.layouts]
    training = trace.PlannedTraining(module, batch, args.mixed_precision, args.optimizer, here.device, here.machines)
    with _progress(len(chosen)) as show:
        rows = estimate.plan(training, here, chosen, min(_MOST_PROCESSES, os.cpu_count() or 1), show)
    fitting = [row for row in rows if row.fits]
    written = _written(args, rows, fitting)
    if args.json:
        print(report.to_json(rows, training, here))
    else:
        print(
            f"{type(module).__name__}, {model.count(module):,} parameters, batch {batch}, mixed precision "
            f"{args.mixed_precision}, {args.optimizer}\n"
            f"{here.ranks} x {here.device}, {convert_bytes(here.memory)} each ({here.origin})\n"
        )
        if fitting:
            print("fits, fastest first:\n" + table(report.table_rows(fitting), report.HEADERS) + "\n")
        if others := [row for row in rows if row.failure is None and not row.fits]:
            print("does not fit:\n" + table(report.table_rows(others), report.HEADERS) + "\n")
        for row in rows:
            if row.failure is None and row.layout.loading:
                print(
                    f"{row.layout.name}: not by a configuration file (--write), but where the model is loaded: "
                    f"from_pretrained(..., distributed_config={row.layout.distributed_config})"
                )
        for row in rows:
            if row.failure is not None:
                print(f"not estimated: {row.layout.name}: {row.failure}")
    if not any(row.failure is None for row in rows):
        raise ConfigurationError(f"no layout has an estimate. {rows[0].layout.name}: {rows[0].failure}")
    if written is not None:
        path = report.write(args.write, written, training, here)
        print(
            f"{args.write}: {written.layout.name}. A run of `accelerate launch --config_file {args.write}` adds its "
            f"figures to {path}",
            file=sys.stderr,
        )
    elif args.write and fitting:
        print(
            f"accelerate plan: {args.write} is not written: a configuration file selects none of the layouts that fit",
            file=sys.stderr,
        )
        return 1
    elif missing := report.shortage(rows, here):
        print(f"accelerate plan: {missing}", file=sys.stderr)
    return 0 if fitting else 1


@contextlib.contextmanager
def _progress(layouts: int) -> Iterator[Callable[[int, int], None]]:
    """A line on the terminal with the number of traced layouts, which is removed at the end; nothing in a file."""
    shows = sys.stderr.isatty()

    def show(traced: int, known: int) -> None:
        if shows:
            # Without a thread that redraws it: processes are forked.
            print(f"\rtraced {traced} of {known} layouts", end="", file=sys.stderr, flush=True)

    show(0, layouts)
    try:
        yield show
    finally:
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _refuse_unselectable(layout: PlannedLayout | None) -> None:
    if layout is not None and layout.loading:
        raise ConfigurationError(
            f"--layout {layout.name}: no configuration file selects it. Start a script that loads its model with "
            f"from_pretrained(..., distributed_config={layout.distributed_config}), without another layout"
        )


def _written(args: argparse.Namespace, rows: list[Estimate], fitting: list[Estimate]) -> Estimate | None:
    if args.write is None:
        return None
    if args.layout is None:
        return next((row for row in fitting if not row.layout.loading), None)
    found = next((row for row in rows if row.layout.name == args.layout and row.failure is None), None)
    if found is None:
        raise ConfigurationError(f"--layout {args.layout}: the plan has no estimate of it")
    return found
