# SPDX-License-Identifier: Apache-2.0
"""Profile a few training steps: a table of operators, and a trace of each process for Perfetto.

    python examples/features/profiling.py --output runs/profile
    accelerate launch --num_processes 2 examples/features/profiling.py --output runs/profile

The first step is not recorded, the second warms the profiler up, and the next two are in the trace.
"""

import argparse

import torch
import torch.nn.functional as F
from common import bar, digits, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", default="runs/profile", help="folder for the traces (default: %(default)s)"
    )
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    data, _ = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, 32, shuffle=True)
    )

    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    with accelerator.profile(
        ProfileKwargs(schedule_option=schedule, output_trace_dir=args.output)
    ) as profiler:
        for step, (images, labels) in enumerate(loader):
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
            if step == 3:
                break

    operators = [event for event in profiler.key_averages() if event.key.startswith("aten::conv")]
    operators += [
        event for event in profiler.key_averages() if event.key in ("aten::addmm", "aten::relu")
    ]
    rows = [(event.key, event.count, round(event.cpu_time_total), event) for event in operators]
    slowest = max(row[2] for row in rows)
    table = [(name, count, micros, bar(micros, slowest)) for name, count, micros, _ in rows]
    print_table(accelerator, ("operator", "calls", "microseconds", "time as a bar"), *table)
    accelerator.print(f"open {args.output}/profile_0.json at https://ui.perfetto.dev")
    accelerator.end_training()


if __name__ == "__main__":
    main()
