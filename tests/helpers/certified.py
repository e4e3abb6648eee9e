# SPDX-License-Identifier: Apache-2.0
"""Programs of a test, recorded one after another on ranks that are started once, and the verdicts on them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from states import reset_states

from accelerate.certify.certificate import Certificate, Row
from accelerate.certify.comparison import FAILED
from accelerate.certify.layouts import Layout, parse
from accelerate.certify.runs import NoVerdict, Recorded, Script
from accelerate.certify.settings import VARIABLE, Settings
from accelerate.config import launch_file
from accelerate.config.launch_settings import resolve_settings
from accelerate.launchers import spec as launched
from accelerate.launchers.plan import variables
from accelerate.state import PartialState
from accelerate.utils import set_seed

# Seconds of the recorded runs of one layout.
LIMIT = 600.0
# A program of a test: what a script does, in a function at the top level of a module.
Program = Callable[[], None]


def seeds(usual: str) -> list[int]:
    """Those of the repetitions of correct programs; `CERTIFY_SEEDS="3 4 5"` repeats them with others."""
    return [int(seed) for seed in os.environ.get("CERTIFY_SEEDS", usual).split()]


def repetitions(names: Sequence[str]) -> list[str]:
    """Each program with each seed."""
    return [f"{name}-{seed}" for name in names for seed in seeds("0 1 2")]


def repetition(name: str, program_of: Callable[[str], Program]) -> Program:
    """A program of `repetitions`, which begins with its seed and adds it to those that it sets itself."""
    plain_name, _, text = name.rpartition("-")
    seed, program = int(text), program_of(plain_name)

    def run() -> None:
        PartialState(cpu=True)
        set_seed(seed)
        with mock.patch("accelerate.utils.set_seed", lambda own: set_seed(own + seed)):
            program()

    run.__name__ = name
    return run


@dataclass(frozen=True)
class RunsOnOne:
    """The recorded runs of a program on one process, in place of `runs.Reference`."""

    plain: Recorded
    moved: Recorded

    def runs(self, shards: int) -> tuple[Recorded, Recorded]:
        return self.plain, self.moved


# Names layouts of FSDP1 in tests.
FSDP1 = "fsdp1:"


def parsed(layout: str) -> Layout:
    """The layout of a text, with the version of FSDP left out."""
    return parse(layout.replace(FSDP1, "fsdp:"))


def environment(layout: str, folder: Path) -> dict[str, str | None]:
    """The variables that a launch sets on each rank of a layout."""
    file = folder / f"{layout.replace(':', '')}.yaml"
    options = {}
    if layout.startswith(FSDP1):
        options = {"fsdp_config": {"fsdp_version": "1", "fsdp_use_orig_params": True}}
    file.write_text(yaml.safe_dump(parsed(layout).configuration(True, options)))
    return {**variables(resolve_settings({}, launch_file.read(file))), "OMP_NUM_THREADS": "1"}


def record(programs: Sequence[Program], folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Record each program on this rank: once for each of the runs, given as {name: settings}."""
    for program in programs:
        for name, settings in runs.items():
            record_one(program, folder / program.__name__ / name, settings)


def record_one(program: Program, folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    file = folder / f"settings-{rank}.json"
    Settings(str(folder), **settings).write(file)
    reset_states()
    os.environ[VARIABLE] = str(file)
    try:
        program()
    except SystemExit:
        pass
    except Exception:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
    finally:
        del os.environ[VARIABLE]
        torch.set_default_dtype(torch.float32)


def recorded(folder: Path) -> Recorded:
    errors = sorted(folder.glob("error-*.txt"))
    log = folder / "log.txt"
    log.write_text("".join(file.read_text() for file in errors))
    return Recorded(folder, 1 if errors else 0)


def verdicts(
    ranks: Any,
    record_on_rank: Callable[..., None],
    names: list[str],
    layout: str,
    folder: Path,
    steps: int,
) -> dict[str, Row]:
    """The verdict on each program of a layout.

    Args:
        ranks: the fixture.
        record_on_rank: of the test module, called as `(names, folder, runs)`.
        names: of the programs.
        layout: such as ddp:2.
        folder: of the records.
        steps: optimizer steps.
    """
    tested = parsed(layout)
    variables = environment(layout, folder)
    own = {"layout": {"steps": steps}}
    single = {
        "plain": {"steps": steps, "shards": tested.shards},
        "moved": {"steps": steps, "shards": tested.shards, "perturb": True},
    }
    ranks(tested.processes).run(record_on_rank, names, folder, own, env=variables, timeout=LIMIT)
    on_cpu = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ranks(1).run(record_on_rank, names, folder, single, env=on_cpu, timeout=LIMIT)
    rows = {name: verdict(name, layout, folder, steps) for name in names}
    for name, row in rows.items():
        print(f"--- {name}\n{row.text()}")
    return rows


def verdict(name: str, layout: str, folder: Path, steps: int) -> Row:
    """The verdict on a recorded program."""
    own = folder / name
    reference = RunsOnOne(recorded(own / "plain"), recorded(own / "moved"))
    script = Script(launched.Program(__file__), {}, Settings("", steps), cpu=True)
    certificate = Certificate(script, [parsed(layout)])
    try:
        return certificate.compare(parsed(layout), recorded(own / "layout"), reference)  # type: ignore[arg-type]
    except NoVerdict as reason:
        return Row(layout, FAILED, notes=[str(reason)])
