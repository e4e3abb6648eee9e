# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: what stands out first, within the width, also for short runs and flat values."""

import io

import numpy as np
import pytest
from planted_runs import START, planted_run, write_lines
from rich.console import Console

from accelerate.monitor.run import open_runs
from accelerate.monitor.terminal import bars, picture, show
from accelerate.telemetry.records import events_file


def printed(folder, width):
    (run,) = open_runs([str(folder)])
    run.refresh()
    console = Console(width=width, file=io.StringIO())
    console.print(picture(run, width))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("steps", "ranks", "width"), [(1, 1, 40), (3, 2, 60), (600, 3, 80), (600, 20, 160)]
)
def test_what_stands_out_is_first(tmp_path, steps, ranks, width):
    planted_run(tmp_path, steps, ranks, slow=ranks - 1 if steps > 10 else None)
    write_lines(
        events_file(tmp_path, 0),
        {
            "time": START + 1e4,
            "event": "hang",
            "message": "no progress in `backward` " * 50,
            "step": steps,
        },
    )
    lines = printed(tmp_path, width).splitlines()
    assert max(map(len, lines)) <= width
    first_box = next(at for at, line in enumerate(lines) if line.startswith("╭"))
    head = " ".join(lines[:first_box])
    assert "Rank 0 reported a hang" in head
    assert (f"Rank {ranks - 1} on node{(ranks - 1) // 4} was slow" in head) == (steps > 10)
    assert sum(" hang " in line for line in lines[first_box:]) == 1
    assert "`" not in "".join(lines)


def test_equal_values_are_flat():
    assert set(bars(np.full(9, 1e-3, "f4") * (1 + 1e-7 * np.arange(9)))) == {"▁"}
    assert bars(np.array([0.0, np.nan, 7.0])) == "▁ █"


def test_without_a_terminal_it_is_printed_once(tmp_path):
    (run,) = open_runs([str(planted_run(tmp_path, 30, 2))])
    console = Console(width=90, file=io.StringIO(), force_terminal=False)
    show(run, console)
    assert "step 30" in console.file.getvalue()
