# SPDX-License-Identifier: Apache-2.0
"""Run client libraries with this package and with its peer in turns. Print a table and write it to `results`.

Each package has one process that imports everything once and forks the ranks of each run (`client_runs.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from run import machine_info

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A row of the table: the client, what runs, on how many processes, and whether the numbers must be equal."""

    client: str
    title: str
    run: str
    world: int = 1
    # Of the losses or outputs of the two packages, relative to the largest; None where they are sampled.
    tolerance: float | None = 1e-4


ROWS = [
    Row("transformers", "Trainer: 40 steps", "trainer"),
    Row("transformers", "Trainer: 40 steps of 2 micro-batches", "trainer_accumulation"),
    Row("transformers", "Trainer: 40 steps, a checkpoint every 4", "trainer_save"),
    Row("transformers", "Trainer: evaluation of 1,200 rows", "evaluation"),
    Row("transformers", "Trainer: 40 steps, DDP", "trainer", 2),
    # On the CPU the peer takes no plugin of FSDP or DeepSpeed: it runs DDP, which gathers nothing.
    Row("transformers", "Trainer: 40 steps, FSDP2 (the peer: DDP)", "trainer_fsdp", 2),
    Row("transformers", "Trainer: 40 steps, ZeRO-2 (the peer: DDP)", "trainer_zero", 2),
    Row("transformers", "from_pretrained with a disk map, then 30 tokens", "offloaded"),
    Row("peft", "LoRA: 40 steps, then save", "lora"),
    Row("trl", "SFT: 40 steps", "sft"),
    Row("trl", "DPO: 20 steps, DDP", "dpo", 2),
    Row("trl", "GRPO: 20 steps", "grpo"),
    Row("diffusers", "UNet and EMA: 20 steps of 2 micro-batches", "diffusion"),
    Row("diffusers", "UNet, sequential offload: 40 passes", "sequential_offload"),
    Row("sentence_transformers", "in-batch loss: 40 steps, DDP", "sentences", 2),
    Row("lm_eval", "400 log-likelihoods", "scoring"),
]


@dataclass
class Package:
    """A process that runs jobs with one of the packages."""

    name: str
    path: str | None
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu",
            # The allocator of pyarrow would start a thread before the forks.
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }  # fmt: skip
        if self.path is not None:
            env["PYTHONPATH"] = self.path
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "client_runs.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        first = self._read()
        self.versions = first["versions"]
        print(f"{self.name}: {first['package']}", file=sys.stderr)
        if self.path is not None and not Path(first["package"]).is_relative_to(
            os.path.abspath(self.path)
        ):
            raise RuntimeError(f"{self.name} is {first['package']}, and not in {self.path}")

    def _read(self) -> dict:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name}: client_runs.py has ended")
        return json.loads(line)

    def run(self, row: Row) -> dict:
        """Run a row's job: its seconds, peak memory and numbers, or the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": row.run, "world": row.world}) + "\n")
        self._process.stdin.flush()
        return self._read()


def equal(row: Row, ours: list[float], peers: list[float]) -> str:
    if row.tolerance is None:
        return "sampled"
    if len(ours) != len(peers):
        return "no"
    limit = row.tolerance * max(map(abs, peers), default=0.0)
    return (
        "yes"
        if all(abs(own - other) <= limit for own, other in zip(ours, peers, strict=True))
        else "no"
    )


def measure(row: Row, packages: list[Package], rounds: int) -> dict:
    """The medians over rounds of both packages, which run in turns."""
    runs: dict[str, list[dict]] = {package.name: [] for package in packages}
    for number in range(rounds):
        for package in packages[:: -1 if number % 2 else 1]:
            found = package.run(row)
            if "error" in found:
                return {"error": f"{package.name}: {found['error']}"}
            runs[package.name].append(found)
    ours, peers = runs["ours"], runs["peer"]
    pairs = [own["seconds"] / other["seconds"] for own, other in zip(ours, peers, strict=True)]
    memory = [statistics.median(run["mebibytes"] for run in one) for one in (ours, peers)]
    return {
        "seconds": [statistics.median(run["seconds"] for run in one) for one in (ours, peers)],
        "ratio": statistics.median(pairs), "ratios": sorted(pairs),
        "memory": memory[0] / memory[1], "mebibytes": memory, "equal": equal(row, ours[0]["found"], peers[0]["found"]),
    }  # fmt: skip


def table(figures: list[tuple[Row, dict]], versions: dict[str, str]) -> str:
    lines = [
        "| client | version | run | processes | equal | peer | ours | time ratio (range) | peak memory ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, found in figures:
        start = f"| {row.client} | {versions[row.client]} | {row.title} | {row.world} |"
        if "error" in found:
            lines.append(f"{start} failed | | | | |")
            continue
        own, other = found["seconds"]
        low, high = found["ratios"][0], found["ratios"][-1]
        lines.append(
            f"{start} {found['equal']} | {other:.2f} s | {own:.2f} s "
            f"| {found['ratio']:.2f}x ({low:.2f} to {high:.2f}) | {found['memory']:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="folder with the peer's package")
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each row per package (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="*", metavar="RUN", help="measure only these runs and write no results"
    )
    args = parser.parse_args()
    packages = [Package("ours", None), Package("peer", os.path.abspath(args.peer))]
    figures = []
    for row in ROWS:
        if args.only and row.run not in args.only:
            continue
        figures.append((row, measure(row, packages, args.rounds)))
        print(row.title, figures[-1][1], file=sys.stderr, flush=True)
    text = table(figures, packages[0].versions)
    print(text)
    failures = [f"{row.title}: {found['error']}" for row, found in figures if "error" in found]
    if not args.only:
        machine = machine_info()
        kind = f"{machine['system']}-{machine['cores']}cpu".lower().replace(" ", "-")
        path = HERE / "results" / f"{datetime.date.today():%Y-%m-%d}-{kind}-clients.md"
        properties = ", ".join(
            f"{key} {value}" for key, value in machine.items() if value is not None
        )
        path.write_text(
            f"# Clients\n\nMachine: {properties}. Medians over {args.rounds} rounds, in which both packages ran in "
            f"turns. The ratios are ours over peer.\n\n{text}\n"
        )
        print(f"\nwritten to {path}")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
