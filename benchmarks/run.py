# SPDX-License-Identifier: Apache-2.0
"""All benchmarks under this package and under its peer, in turn, in one run: a table of ratios, printed and kept."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One line of the table: its words, how the figure is told, and what it should be at most."""

    words: str
    form: str  # "added" (own - raw), "ratio" (own / raw) or "time" (own)
    target: float | None = None


@dataclass(frozen=True)
class Script:
    """One script and the rows that it prints. With `ranks` it is started by torchrun."""

    file: str
    rows: dict[str, Row]
    ranks: int = 0


SCRIPTS = [
    Script(
        "step.py", {"step": Row("added per step: Linear(16, 1), batch 8, SGD + LambdaLR, accumulate", "added", 12)}
    ),
    Script(
        "importing.py",
        {
            "import": Row("import torch, accelerate / import torch", "ratio", 1.02),
            "import a name": Row("from accelerate import Accelerator / import torch", "ratio"),
            "import alone": Row("import accelerate, no name used / import torch", "ratio"),
        },
    ),
    Script(
        "launch.py",
        {
            "launch help": Row("accelerate launch -h", "time", 200),
            "launch one": Row(
                "launch, one process: shell to the script's first line, over plain python", "added", 150
            ),
            "launch one, torchrun": Row("the same in all (raw: torchrun)", "time"),
            "launch two": Row(
                "launch, two CPU processes: shell to the last one's first line (raw: torchrun)", "time", 400
            ),
            "launch many": Row("launch of 64 programs, started, joined, logged / torchrun", "ratio", 0.5),
        },
    ),
    Script(
        "collectives.py",
        {
            "gather": Row("gather of one tensor, 2 gloo ranks / raw", "ratio", 1.2),
            "gather large": Row("gather of one tensor of 4 MiB, 2 gloo ranks / raw", "ratio", 1.2),
            "gather nested": Row("gather of a nested batch of 8 tensors, 2 gloo ranks / one flat raw", "ratio", 1.3),
            "gather_object": Row("gather_object, 2 gloo ranks / raw", "ratio", 1.1),
            "gather_object large": Row("gather_object of 240 kB, 2 gloo ranks / raw", "ratio", 1.1),
        },
        ranks=2,
    ),
    *(
        Script(
            "layouts.py",
            {
                f"fsdp step, {ranks} ranks": Row(
                    f"FSDP2 step, {ranks} gloo ranks / fully_shard by hand", "ratio", 1.03
                ),
                f"tensor step, {ranks} ranks": Row(
                    f"tensor-parallel step, {ranks} gloo ranks / torch's parallelize_module", "ratio", 1.03
                ),
                f"tensor step, least, {ranks} ranks": Row(
                    f"the same / two autograd functions and plain tensors, {ranks} ranks", "ratio"
                ),
            },
            ranks=ranks,
        )
        for ranks in (2, 4)
    ),
    *(
        Script(
            "pipeline.py",
            {
                f"pipeline step, {word}, {ranks} ranks": Row(
                    f"pipeline step ({word}), {ranks} gloo ranks / torch's stages and schedule by hand", "ratio", 1.03
                )
                for word in ("gpipe", "1f1b")
            },
            ranks=ranks,
        )
        for ranks in (2, 4)
    ),
    Script(
        "checkpoint.py",
        {
            "checkpoint save": Row("save_state of 1.2 GB / torch.save and fsync", "ratio", 1.0),
            "checkpoint load": Row("load_state of 1.2 GB / reading its bytes from the disk", "ratio", 1.2),
            "checkpoint wait": Row("time the loop waits for a save, in the background where offered", "time"),
            "checkpoint load memory": Row("most memory of load_state over what was resident", "time", 4.2),
            "checkpoint verify": Row("verifying 1.2 GB / reading its bytes from the disk", "ratio", 1.1),
            "checkpoint resume data": Row("from 1,000 batches into an epoch to the next batch", "time", 5),
        },
    ),
    Script(
        "data_loader.py",
        {
            f"loader: {kind}, batch {size}": Row(f"prepared loader / raw, {kind}, batch {size}", "ratio", 1.0)
            for kind in ("tensors", "samples", "stream")
            for size in (8, 64)
        },
    ),
]


def run_script(python: str, script: Script, timeout: float) -> list[dict[str, object]]:
    """The figures that a script prints under an interpreter."""
    command = [python]
    if script.ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(script.ranks)]
    # The peer takes part in a CPU group only when it is told that this is one.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(HERE / script.file)], capture_output=True, text=True, timeout=timeout, env=env, cwd=HERE
    )
    if done.returncode:
        raise RuntimeError(f"failed under {python} (exit code {done.returncode}):\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(
    scripts: list[Script], pythons: dict[str, str], rounds: int, timeout: float
) -> tuple[dict[str, dict[str, dict]], list[str]]:
    """what -> contestant -> the medians over all rounds of `raw` and `own`, and the unit; and what failed, in words.

    A script that fails under a contestant is not run under it again; what else was measured is kept.
    """
    found: dict[str, dict[str, list[dict]]] = {}
    failures: dict[tuple[str, int, str], str] = {}
    for script in scripts:
        for turn in range(rounds):
            # Turn about, so that neither is always the one that runs on a cool machine.
            for who in sorted(pythons, reverse=bool(turn % 2)):
                if (script.file, script.ranks, who) in failures:
                    continue
                print(f"{script.file}: {who}, round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
                try:
                    lines = run_script(pythons[who], script, timeout)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failures[script.file, script.ranks, who] = f"{script.file} of {who}: {error}"
                    continue
                for line in lines:
                    found.setdefault(str(line["what"]), {}).setdefault(who, []).append(line)
    figures = {what: {who: summary(lines) for who, lines in by.items()} for what, by in found.items()}
    return figures, list(failures.values())


def summary(lines: list[dict]) -> dict:
    raws = [line["raw"] for line in lines if line["raw"] is not None]
    return {
        "unit": lines[0]["unit"],
        "own": statistics.median(line["own"] for line in lines),
        "raw": statistics.median(raws) if raws else None,
        # Each process's own ratio is the steadier figure: raw and own ran side by side in it.
        "ratio": statistics.median(line["own"] / line["raw"] for line in lines if line["raw"]) if raws else None,
        "added": statistics.median(line["own"] - line["raw"] for line in lines if line["raw"] is not None)
        if raws
        else None,
    }


def told(figure: dict | None, form: str) -> str:
    if figure is None:
        return "-"
    if form == "added":
        return f"{figure['added']:+.1f} {figure['unit']}"
    if form == "ratio":
        return f"{figure['ratio']:.3f}x" if figure["ratio"] < 2 else f"{figure['ratio']:.2f}x"
    return f"{figure['own']:.1f} {figure['unit']}"


def table(scripts: list[Script], figures: dict[str, dict[str, dict]]) -> str:
    lines = ["| what | raw PyTorch | peer | ours | target | met |", "|---|---|---|---|---|---|"]
    for script in scripts:
        for what, row in script.rows.items():
            by = figures.get(what, {})
            ours, peer = by.get("ours"), by.get("peer")
            raw = next((figure["raw"] for figure in (ours, peer) if figure and figure["raw"] is not None), None)
            raw_text = "-" if raw is None else f"{raw:.1f} {(ours or peer or {})['unit']}"
            target = "" if row.target is None else f"at most {row.target:g}" + ("x" if row.form == "ratio" else "")
            value = None if ours is None else ours["own" if row.form == "time" else row.form]
            met = "" if row.target is None or value is None else ("yes" if value <= row.target else "no")
            lines.append(
                f"| {row.words} | {raw_text} | {told(peer, row.form)} | {told(ours, row.form)} | {target} | {met} |"
            )
    return "\n".join(lines)


def host() -> dict[str, object]:
    """This machine in words, without its name."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def keep(text: str, figures: dict[str, dict[str, dict]], rounds: int, about: dict[str, object], folder: Path) -> Path:
    """Write the table and the figures; the file is named by the day and the kind of machine."""
    kind = f"{about['system']}-{about['cores']}cpu".lower().replace(" ", "-")
    if about["gpu"]:
        kind += "-" + str(about["gpu"]).lower().replace(" ", "-")
    path = folder / f"{datetime.date.today():%Y-%m-%d}-{kind}.md"
    folder.mkdir(exist_ok=True)
    machine = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
    how = f"Medians; both contestants ran in turn, rounds: {rounds}."
    path.write_text(f"# Benchmarks\n\nMachine: {machine}. {how}\n\n{text}\n")
    path.with_suffix(".json").write_text(json.dumps({"machine": about, "figures": figures}, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="the interpreter of the environment that has the peer")
    parser.add_argument("--rounds", type=int, default=3, help="how often each script runs under each contestant")
    parser.add_argument("--only", nargs="*", metavar="FILE", help="run these scripts only; nothing is written")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one run of a script may take")
    args = parser.parse_args()
    known = {script.file for script in SCRIPTS}
    unknown = set(args.only or ()) - known
    if unknown:
        parser.error(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    scripts = [script for script in SCRIPTS if not args.only or script.file in args.only]
    pythons = {"ours": sys.executable, **({"peer": os.path.abspath(args.peer)} if args.peer else {})}
    figures, failures = measure(scripts, pythons, args.rounds, args.timeout)
    text = table(scripts, figures)
    print(text)
    if not args.only:
        print(f"\nwritten to {keep(text, figures, args.rounds, host(), HERE / 'results')}")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
