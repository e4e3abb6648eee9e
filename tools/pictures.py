# SPDX-License-Identifier: Apache-2.0
"""Write the pictures of the documentation, `mesh.svg`, `sharding.svg`, `losses.svg`, and `monitor.png`.

    python tools/pictures.py
    python tools/pictures.py --losses fsdp_tp=LOG ...     read the losses of new runs of examples/parallel/train.py
    python tools/pictures.py --run runs/demo              the monitor's page of a real run: that of `make demo`

The losses are those of `benchmarks/results/losses.json`, which the second form writes. Only the third form writes
`monitor.png`; it needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from comparison import IMAGES, PROJECT, svg, text
from screenshots import Browser, open_page, served

LOSSES = PROJECT / "benchmarks/results/losses.json"
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1")


def box(x: float, y: float, width: float, height: float, fill: str, *lines: str) -> str:
    """Return a box with centred lines of text."""
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="#555"/>'
    ]
    for number, line in enumerate(lines):
        parts.append(
            text(
                x + width / 2,
                y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2),
                line,
                "middle",
            )
        )
    return "\n".join(parts)


def mesh() -> str:
    """Draw 8 ranks as a mesh of two replicas, two shards and two tensor-parallel ranks."""
    parts = []
    for replica in range(2):
        left = 20 + replica * 350
        parts.append(
            f'<rect x="{left}" y="40" width="330" height="205" fill="#f7f7f7" stroke="#bbb"/>'
        )
        parts.append(
            text(left + 165, 62, f"replica {replica} of the model (dp_replicate)", "middle")
        )
        for shard in range(2):
            for tensor in range(2):
                rank = 4 * replica + 2 * shard + tensor
                fill = ("#dbeafe", "#fde3cf")[tensor]
                lines = f"rank {rank}", f"matrices, half {tensor}", f"of that, shard {shard}"
                parts.append(box(left + 10 + 158 * tensor, 74 + 82 * shard, 152, 74, fill, *lines))
    parts.append(
        text(360, 22, "dp_replicate_size=2, dp_shard_size=2, tp_size=2: 8 processes", "middle")
    )
    parts.append(
        text(
            360,
            268,
            "Rows are dp_shard: they read different samples. Columns are tp: they read the same.",
            "middle",
        )
    )
    return svg(720, 285, parts)


def sharding() -> str:
    """Draw which process reads which of ten samples, by default and with `exact=True`."""
    parts = [text(130, 20, "10 samples, batch_size=2, 2 processes", color="#222")]
    default = [("step 1", [0, 1], [2, 3]), ("step 2", [4, 5], [6, 7]), ("step 3", [8, 9], [0, 1])]
    exact = [("step 1", [0, 1], [2, 3]), ("step 2", [4, 5], [6, 7]), ("step 3", [8], [9])]
    for top, title, steps in ((40, "default", default), (130, "exact=True", exact)):
        parts.append(text(10, top + 44, title))
        for number, (name, *ranks) in enumerate(steps):
            left = 130 + 195 * number
            parts.append(text(left + 78, top + 12, name, "middle", "#777"))
            for rank, samples in enumerate(ranks):
                for place, sample in enumerate(samples):
                    repeated = title == "default" and number == 2 and rank == 1
                    fill = "#f3f3f3" if repeated else ("#dbeafe", "#fde3cf")[rank]
                    parts.append(
                        box(left + 82 * rank + 38 * place, top + 20, 36, 36, fill, str(sample))
                    )
    parts.append(text(130, 218, "blue: process 0"))
    parts.append(text(260, 218, "orange: process 1"))
    parts.append(text(400, 218, "grey: read a second time to fill the step"))
    return svg(720, 230, parts)


def losses(runs: dict[str, list[float]]) -> str:
    """Draw the loss of each step of runs in several layouts. Equal curves cover each other, so they are dashed."""
    low, high = (
        pick(min(run) if pick is min else max(run) for run in runs.values()) for pick in (min, max)
    )
    parts = []
    for tick in range(5):
        value = low + (high - low) * tick / 4
        y = 240 - 210 * tick / 4
        parts.append(f'<line x1="60" y1="{y:g}" x2="500" y2="{y:g}" stroke="#e5e5e5"/>')
        parts.append(text(52, y + 4, f"{value:.2f}", "end", "#777"))
    for number, (name, run) in enumerate(runs.items()):
        points = " ".join(
            f"{60 + 440 * step / (len(run) - 1):.1f},{240 - 210 * (value - low) / (high - low):.1f}"
            for step, value in enumerate(run)
        )
        color, dash = COLORS[number], f'stroke-dasharray="6 18" stroke-dashoffset="{-6 * number}"'
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="3" {dash}/>'
        )
        parts.append(
            f'<rect x="520" y="{50 + 26 * number}" width="14" height="14" fill="{color}"/>'
        )
        parts.append(text(540, 62 + 26 * number, name))
    parts += [text(280, 272, "optimizer step (1 to 20)", "middle", "#777"), text(60, 18, "loss")]
    return svg(720, 285, parts)


def monitor(run: Path, image: Path) -> None:
    """Write the upper part of the monitor's page, with twice the pixels of the 600 that it is shown with."""
    with (
        tempfile.TemporaryDirectory() as profile,
        Browser(Path(profile)) as browser,
        served(run) as url,
    ):
        browser.size(960, 720, scale=1.25)
        open_page(browser, url)
        browser.screenshot(image)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--losses", nargs="+", metavar="NAME=LOG", help="the output of runs with --log_every 1"
    )
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="folder of a recorded run, for monitor.png"
    )
    args = parser.parse_args()
    if args.run:
        monitor(args.run, IMAGES / "monitor.png")
    if args.losses:
        logs = {
            name: Path(log).read_text()
            for name, _, log in (item.rpartition("=") for item in args.losses)
        }
        runs = {
            name: [float(x) for x in re.findall(r"^step +\d+ +loss (\S+)", log, re.M)]
            for name, log in logs.items()
        }
        LOSSES.write_text(json.dumps(runs, indent=1) + "\n")
    (IMAGES / "mesh.svg").write_text(mesh())
    (IMAGES / "sharding.svg").write_text(sharding())
    (IMAGES / "losses.svg").write_text(losses(json.loads(LOSSES.read_text())))


if __name__ == "__main__":
    main()
