# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks with this package and with its peer, alternately. Print a table and write it to `results`."""

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
    """A row of the table: its title, the metric and the upper limit of the metric."""

    title: str
    metric: str  # "added" (own - raw), "ratio" (own / raw) or "time" (own)
    target: float | None = None


@dataclass(frozen=True)
class Script:
    """A script and the rows of its results. If `ranks` is set, torchrun starts it."""

    file: str
    rows: dict[str, Row]
    ranks: int = 0


SCRIPTS = [
    Script(
        "step.py",
        {
            "step": Row(
                "overhead per step: Linear(16, 1), batch 8, SGD + LambdaLR, accumulate", "added", 15
            ),
            "step after resume": Row("what `resume()` adds to a step", "added", 25),
            "step with a deadline": Row("what `--stop_within` adds to that", "added", 20),
        },
    ),
    Script(
        "telemetry.py",
        {
            "telemetry, twice without": Row("telemetry: two steps that are not recorded", "added"),
            "telemetry": Row("telemetry: a recorded step over one that is not", "added", 30),
            "telemetry status": Row("telemetry: a step whose state the launcher sees", "added", 30),
            "telemetry both": Row("telemetry: both", "added", 30),
            "telemetry of given batches, twice without": Row(
                "telemetry: two such steps, batches of unknown sizes", "added"
            ),
            "telemetry of given batches": Row(
                "telemetry: a recorded step, batches of unknown sizes", "added", 30
            ),
            "telemetry of a long step, twice without": Row(
                "telemetry: two steps of 5 ms, neither recorded", "ratio"
            ),
            "telemetry of a long step": Row(
                "telemetry: a recorded step of 5 ms / one that is not", "ratio", 1.01
            ),
        },
    ),
    Script(
        "certify.py",
        {
            "certify step": Row(
                "certify: a recorded step of a small transformer / a plain one", "ratio", 3
            )
        },
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
                "launch, one process: time to the first line of the script, over plain python",
                "added",
                150,
            ),
            "launch one, torchrun": Row(
                "launch, one process: total time to the first line (raw: torchrun)", "time"
            ),
            "launch two": Row(
                "launch, two CPU processes: time to the first line of the last one (raw: torchrun)",
                "time",
                400,
            ),
            "launch many": Row("launch of 64 processes with a log each / torchrun", "ratio", 0.5),
        },
    ),
    Script(
        "agreement.py",
        {
            f"agreement, {case}: {figure}": Row(
                f"agreement of 512 simulated ranks, {case}: {title}", "time", target
            )
            for case, operations, size, seconds in (
                ("together", 12, 1000, 1),
                ("one late", 100, None, 1),
                ("one missing", None, None, 2),
                ("first two missing", None, None, 2),
            )
            for figure, title, target in (
                ("operations", "operations of a rank", operations),
                ("bytes", "bytes of a rank", size),
                ("decided", "time after the last rank, or after the limit", seconds),
            )
        },
    ),
    Script(
        "collectives.py",
        {
            "gather": Row("gather of one tensor, 2 gloo ranks / raw", "ratio", 1.2),
            "gather large": Row("gather of one tensor of 4 MiB, 2 gloo ranks / raw", "ratio", 1.2),
            "gather nested": Row(
                "gather of a nested batch of 8 tensors, 2 gloo ranks / one flat tensor, raw",
                "ratio",
                1.3,
            ),
            "gather_object": Row("gather_object, 2 gloo ranks / raw", "ratio", 1.1),
            "gather_object large": Row(
                "gather_object of 234 KiB, 2 gloo ranks / raw", "ratio", 1.1
            ),
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
                f"generate, {ranks} ranks": Row(
                    f"generate under FSDP2, {ranks} gloo ranks / registered by hand", "ratio", 1.1
                ),
                f"averaged step, {ranks} ranks": Row(
                    f"FSDP2 step with track_average, {ranks} gloo ranks / without", "ratio"
                ),
                f"tensor step, {ranks} ranks": Row(
                    f"tensor-parallel step, {ranks} gloo ranks / torch's parallelize_module",
                    "ratio",
                    1.03,
                ),
                f"tensor step, lower bound, {ranks} ranks": Row(
                    f"tensor-parallel step, {ranks} gloo ranks / lower bound: two autograd functions, plain tensors",
                    "ratio",
                ),
            },
            ranks=ranks,
        )
        for ranks in (2, 4)
    ),
    Script(
        "matrices.py",
        {
            "muon step": Row(
                "step of Muon under DDP, 2 gloo ranks / every rank computes all of it",
                "ratio",
                0.7,
            )
        },
        ranks=2,
    ),
    *(
        Script(
            "pipeline.py",
            {
                f"pipeline step, {name}, {ranks} ranks": Row(
                    f"pipeline step ({name}), {ranks} gloo ranks / torch's stages and schedule by hand",
                    "ratio",
                    1.03,
                )
                for name in ("gpipe", "1f1b")
            },
            ranks=ranks,
        )
        for ranks in (2, 4)
    ),
    Script(
        "checkpoint.py",
        {
            "checkpoint save": Row("save_state of 1.1 GiB / torch.save and fsync", "ratio", 1.0),
            "checkpoint load": Row(
                "load_state of 1.1 GiB / reading its bytes from the disk", "ratio", 1.2
            ),
            "checkpoint wait": Row(
                "time that a save blocks the loop, in the background if supported", "time"
            ),
            "checkpoint load memory": Row(
                "peak memory of load_state over the resident memory", "time", 4.2
            ),
            "checkpoint verify": Row(
                "verifying 1.1 GiB / reading its bytes from the disk", "ratio", 1.1
            ),
            "checkpoint resume data": Row(
                "resume after 1,000 batches of an epoch: time to the next batch", "time", 5
            ),
        },
    ),
    Script(
        "adapters.py",
        {
            "adapter size": Row(
                "checkpoint of LoRA adapters / adapters and their AdamW", "ratio", 1.05
            ),
            "adapter save": Row(
                "save_state of LoRA adapters: FSDP2 on 4 gloo ranks / one process", "ratio", 1.2
            ),
            "adapter save by torch": Row(
                "save_state of LoRA adapters on 4 gloo ranks / full states by torch", "ratio", 1
            ),
        },
    ),
    Script(
        "big_model.py",
        {
            "big model load": Row("load of 384 MiB to the CPU", "time", 100),
            "big model load half": Row("load of 384 MiB, half of it on disk", "time", 100),
            "big model written": Row("bytes that this load writes", "time", 0.1),
            "big model forward": Row(
                "forward with half of the weights on disk / all in memory", "ratio", 1.15
            ),
            "big model cpu_offload": Row(
                "forward on the CPU with all weights offloaded by cpu_offload / not offloaded",
                "ratio",
                1.15,
            ),
            "big model cold forward": Row(
                "the same with nothing in the file cache / max(compute, reading the bytes)",
                "ratio",
                1.1,
            ),
            "big model memory": Row("memory that this forward takes (a layer: 16 MiB)", "time", 34),
        },
    ),
    Script(
        "device_map.py",
        {
            f"device map: {kind}, {part}": Row(
                f"device map of 5,000 modules, {kind}, {shown}", "time"
            )
            for kind in ("transformer", "transformer, split", "nested", "flat")
            for part, shown in (("half", "half of them on disk"), ("all", "all on the CPU"))
        },
    ),
    Script(
        "data_loader.py",
        {
            f"loader: {kind}, batch {size}": Row(
                f"prepared loader / raw, {kind}, batch {size}", "ratio", 1.0
            )
            for kind in ("tensors", "samples", "stream", "generator stream")
            for size in (8, 64)
        },
    ),
    Script(
        "packing.py",
        {
            "packing": Row(
                "packing of 100,000 documents (raw: a loop that fills rows)", "time", 1000
            ),
            "packing: rows": Row("rows that it needs / rows without padding", "ratio", 1.01),
            "packing: rows of the loop": Row("rows of the loop / rows without padding", "ratio"),
            "token batches": Row(
                "a batch with equally many tokens (raw: a loop that fills batches)", "time", 200
            ),
            "token batches: balance": Row(
                "tokens of the largest of 8 batches / of their mean", "ratio", 1.05
            ),
            "token batches: balance of the loop": Row("the same for batches of the loop", "ratio"),
        },
    ),
    Script(
        "packed_rows.py",
        {
            "packed step": Row(
                "step on packed rows / mask and positions made by hand", "ratio", 1.05
            ),
            "packed step, against padding": Row(
                "step on packed rows / the same documents, padded", "ratio"
            ),
        },
    ),
    Script(
        "growth.py",
        {
            **{
                f"growth: step, {count} parameters": Row(
                    f"step with {count} parameters / raw", "ratio"
                )
                for count in (10, 100, 1000)
            },
            **{
                f"growth: first batch, {count} samples": Row(
                    f"first batch of {count:,} samples / raw", "ratio"
                )
                for count in (1_000, 10_000, 100_000)
            },
        },
    ),
    Script(
        "growth.py",
        {
            f"growth: gather, {count} tensors": Row(
                f"gather of {count} tensors / a gather of each, raw", "ratio"
            )
            for count in (1, 10, 100)
        },
        ranks=2,
    ),
]


def run_script(python: str, script: Script, timeout: float) -> list[dict[str, object]]:
    """Run a script with an interpreter and return its results."""
    command = [python]
    if script.ranks:
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(script.ranks),
        ]
    # The peer joins a CPU process group only if ACCELERATE_USE_CPU is set.
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, str(HERE / script.file)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        cwd=HERE,
    )
    if done.returncode:
        raise RuntimeError(
            f"failed with {python} (exit code {done.returncode}):\n{done.stderr[-3000:]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(
    scripts: list[Script], pythons: dict[str, str], rounds: int, timeout: float
) -> tuple[dict[str, dict[str, dict]], list[str]]:
    """Run the scripts with each interpreter.

    A script that fails with an interpreter is not run with it again. The other results are kept.

    Returns:
        The summaries by benchmark and package, and the messages of the failures.
    """
    results: dict[str, dict[str, list[dict]]] = {}
    failures: dict[tuple[str, int, str], str] = {}
    for script in scripts:
        for number in range(rounds):
            # Alternate the order, so that neither package always runs first.
            for package in sorted(pythons, reverse=bool(number % 2)):
                if (script.file, script.ranks, package) in failures:
                    continue
                print(
                    f"{script.file}: {package}, round {number + 1} of {rounds}",
                    file=sys.stderr,
                    flush=True,
                )
                try:
                    lines = run_script(pythons[package], script, timeout)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failures[script.file, script.ranks, package] = (
                        f"{script.file} with {package}: {error}"
                    )
                    continue
                for line in lines:
                    results.setdefault(str(line["name"]), {}).setdefault(package, []).append(line)
    summaries = {
        name: {package: summary(lines) for package, lines in by_package.items()}
        for name, by_package in results.items()
    }
    return summaries, list(failures.values())


def summary(lines: list[dict]) -> dict:
    raws = [line["raw"] for line in lines if line["raw"] is not None]
    return {
        "unit": lines[0]["unit"],
        "own": statistics.median(line["own"] for line in lines),
        "raw": statistics.median(raws) if raws else None,
        # The ratio within a process varies less, since raw and own ran alternately.
        "ratio": statistics.median(line["own"] / line["raw"] for line in lines if line["raw"])
        if raws
        else None,
        "added": statistics.median(
            line["own"] - line["raw"] for line in lines if line["raw"] is not None
        )
        if raws
        else None,
    }


def format_value(result: dict | None, metric: str) -> str:
    if result is None:
        return "-"
    if metric == "added":
        return f"{result['added']:+.1f} {result['unit']}"
    if metric == "ratio":
        return f"{result['ratio']:.3f}x" if result["ratio"] < 2 else f"{result['ratio']:.2f}x"
    return f"{result['own']:.1f} {result['unit']}"


def table(scripts: list[Script], summaries: dict[str, dict[str, dict]]) -> str:
    lines = [
        "| benchmark | raw PyTorch | peer | ours | target | met |",
        "|---|---|---|---|---|---|",
    ]
    for script in scripts:
        for name, row in script.rows.items():
            by_package = summaries.get(name, {})
            ours, peer = by_package.get("ours"), by_package.get("peer")
            raw = next(
                (result["raw"] for result in (ours, peer) if result and result["raw"] is not None),
                None,
            )
            raw_text = "-" if raw is None else f"{raw:.1f} {(ours or peer or {})['unit']}"
            target = (
                ""
                if row.target is None
                else f"at most {row.target:g}" + ("x" if row.metric == "ratio" else "")
            )
            value = None if ours is None else ours["own" if row.metric == "time" else row.metric]
            met = (
                ""
                if row.target is None or value is None
                else ("yes" if value <= row.target else "no")
            )
            texts = (
                row.title,
                raw_text,
                format_value(peer, row.metric),
                format_value(ours, row.metric),
                target,
                met,
            )
            lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def machine_info() -> dict[str, object]:
    """Return the properties of this machine and of its software."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_results(
    text: str,
    summaries: dict[str, dict[str, dict]],
    rounds: int,
    machine: dict[str, object],
    folder: Path,
) -> Path:
    """Write the table and the summaries to files named after the date and the kind of machine."""
    kind = f"{machine['system']}-{machine['cores']}cpu".lower().replace(" ", "-")
    if machine["gpu"]:
        kind += "-" + str(machine["gpu"]).lower().replace(" ", "-")
    path = folder / f"{datetime.date.today():%Y-%m-%d}-{kind}.md"
    folder.mkdir(exist_ok=True)
    properties = ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None)
    method = f"Medians over {rounds} alternating rounds."
    path.write_text(f"# Benchmarks\n\nMachine: {properties}. {method}\n\n{text}\n")
    path.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "figures": summaries}, indent=1) + "\n"
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="Python interpreter of the environment with the peer")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="runs of each script per package (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="*", metavar="FILE", help="run only these scripts and write no results"
    )
    parser.add_argument("--write", action="store_true", help="write the results of --only too")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        help="time limit of a script in seconds (default: %(default)s)",
    )
    args = parser.parse_args()
    known = {script.file for script in SCRIPTS}
    unknown = set(args.only or ()) - known
    if unknown:
        parser.error(
            f"no such script: {', '.join(sorted(unknown))} (choose from {', '.join(sorted(known))})"
        )
    scripts = [script for script in SCRIPTS if not args.only or script.file in args.only]
    pythons = {
        "ours": sys.executable,
        **({"peer": os.path.abspath(args.peer)} if args.peer else {}),
    }
    summaries, failures = measure(scripts, pythons, args.rounds, args.timeout)
    text = table(scripts, summaries)
    print(text)
    if not args.only or args.write:
        path = write_results(text, summaries, args.rounds, machine_info(), HERE / "results")
        print(f"\nwritten to {path}")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
