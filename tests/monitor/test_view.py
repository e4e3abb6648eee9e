# SPDX-License-Identifier: Apache-2.0
"""What is shown of a run: the range, the rule for stragglers, throughput, logged values, and the summary."""

import base64
import json
import math
import subprocess
from pathlib import Path
from shutil import which

import numpy as np
import pytest
from planted_runs import START, planted_records, planted_run, write_lines, write_steps

from accelerate import monitor
from accelerate.monitor.run import open_runs
from accelerate.monitor.sentences import WORDS, sentences
from accelerate.monitor.summary import summarize
from accelerate.monitor.verdict import advice, verdict
from accelerate.monitor.view import bucket_width, heat_rows, stragglers, view
from accelerate.telemetry.records import events_file


@pytest.mark.skipif(which("node") is None, reason="needs node")
def test_the_labels_of_axes_are_round():
    charts = Path(monitor.__file__).with_name("page") / "charts.js"
    ranges = [
        (0, 1.3 * 2**30, "bytes"),
        (0, 5e6, "bytes"),
        (0, 0.013, "seconds"),
        (2.1, 2.9, "number"),
    ]
    script = (
        "import {labels, FORMATS} from 'data:text/javascript;base64,"
        f"{base64.b64encode(charts.read_bytes()).decode()}';\n"
        f"for (const [low, high, format] of {json.dumps(ranges)})\n"
        "  console.log(labels(low, high, 5, FORMATS[format]).map((pair) => pair[1]).join());\n"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "0,0.5 GiB,1 GiB",
        "0,1 MiB,2 MiB,3 MiB,4 MiB",
        "0,5 ms,10 ms",
        "2.2,2.4,2.6,2.8",
    ], done.stderr


def opened(folder):
    (run,) = open_runs([str(folder)])
    run.refresh()
    return run


@pytest.mark.parametrize(
    ("ranks", "part", "wait"),
    [
        (2, "data", "communication"),
        (5, "data", "communication"),
        (3, "backward", "communication"),
        # DDP: the others wait in their backward.
        (2, "data", "backward"),
        (3, "forward", "backward"),
        # Sharded parameters: they wait in the forward.
        (4, "data", "forward"),
    ],
)
def test_the_slow_rank_is_marked(tmp_path, ranks, part, wait):
    run = opened(planted_run(tmp_path, 1000, ranks, 1, part, wait))
    shown = view(run, pixels=250)
    assert shown.width == 4 and shown.own.shape == (ranks, 250)
    marked = shown.slow.mean(axis=1)
    assert marked[1] == pytest.approx(0.5, abs=0.01) and not marked[np.arange(ranks) != 1].any()
    assert not shown.slow[1, :124].any()
    summary = summarize(run)
    (slow,) = summary.stragglers
    assert (slow.rank, slow.phase) == (1, part) and slow.excess == pytest.approx(0.03, rel=0.05)
    assert slow.phase_excess == pytest.approx(0.03, rel=0.05) and slow.waiting == pytest.approx(
        0.03, rel=0.05
    )
    assert slow.ratio == pytest.approx(1 + 0.03 / 0.092, rel=0.03)
    assert slow.first == pytest.approx(500, abs=12) and slow.last >= 996
    limit = verdict(summary)
    assert limit.limit == "slow_rank" and f" in {WORDS[part]}." in limit.evidence


def test_ranks_that_take_turns_at_random_are_not_named(tmp_path):
    for rank in range(2):
        records = planted_records(125, rank)
        # On a busy machine: now this rank waits for a core, now the other.
        late = np.where((np.arange(125) // 13) % 2 == rank, 0.04, 0).astype("f4")
        records["forward"] += late
        records["seconds"] += late
        write_steps(tmp_path, rank, 2, records)
    run = opened(tmp_path)
    assert view(run).slow.any(axis=1).all() and summarize(run).stragglers == ()


def test_stragglers_need_a_window_and_an_excess():
    own = np.full((3, 100), 1.0)
    step, weight = np.full((3, 100), 1.2), np.ones((3, 100))
    own[2, 50] = 2.5  # one step of ten: 15 % above the median
    assert not stragglers(own, step, weight).any()
    own[2, 50:55] = 2.5
    found = stragglers(own, step, weight)
    assert found[2, 51:60].all() and not found[:2].any() and not found[2, :51].any()
    # 25 % of a time that is a hundredth of the step does not matter.
    assert not stragglers(own / 100, step, weight).any()
    assert not stragglers(own[:1], step[:1], weight[:1]).any()
    # The lower median: one of two ranks can be slow.
    assert stragglers(np.array([[1.0], [1.3]]), np.ones((2, 1)), np.full((2, 1), 64)).tolist() == [
        [False],
        [True],
    ]


def test_throughput_is_the_sum_over_ranks(tmp_path):
    for rank in range(3):
        records = planted_records(200, rank)
        # The last steps of rank 2 are not written yet.
        write_steps(tmp_path, rank, 3, records[: 200 - 10 * (rank == 2)])
    shown = view(opened(tmp_path), pixels=25)
    assert shown.unit == "tokens"
    mean = shown.curves["throughput"].mean
    assert mean[5] == pytest.approx(3 * 32 * 512 / records["seconds"][40:48].mean(), rel=0.02)
    assert mean[-1] == pytest.approx(mean[-4], rel=0.05)


def test_what_several_ranks_read_counts_once(tmp_path):
    for rank in range(4):
        write_steps(tmp_path, rank, 4, planted_records(200, rank), data_shards=2)
    shown = view(opened(tmp_path), pixels=25)
    step = planted_records(200)["seconds"][40:48].mean()
    assert shown.curves["throughput"].mean[5] == pytest.approx(2 * 32 * 512 / step, rel=0.03)


@pytest.mark.parametrize(
    ("work", "flops", "utilization"),
    [
        ({"unit": "token", "flops": 6e9, "peak": 989e12}, 6e9, 6e9 / 989e12),
        ({"unit": "token", "flops": 6e9, "peak": None}, 6e9, None),
        # Tokens are counted, so what a sample takes does not tell.
        ({"unit": "sample", "flops": 6e9, "peak": 989e12}, None, None),
        ({"unit": "token", "flops": "many", "peak": []}, None, None),
    ],
)
def test_the_utilization_of_the_devices(tmp_path, work, flops, utilization):
    for rank in range(2):
        write_steps(tmp_path, rank, 2, planted_records(200, rank))
    write_lines(events_file(tmp_path, 0), {"time": START, "event": "work", **work})
    run = opened(tmp_path)
    found = summarize(run)
    assert 32 * 512 / 0.135 < found.throughput / 2 < 32 * 512 / 0.1  # steps of 0.1 s, and of 0.13 s
    for value, per_token in ((found.flops, flops), (found.utilization, utilization)):
        expected = math.nan if per_token is None else per_token * found.throughput / 2
        assert value == pytest.approx(expected, rel=1e-6, nan_ok=True)
    text = " ".join(sentences(found))
    assert ("TFLOP/s" in text) == (flops is not None) and ("(MFU)" in text) == (
        utilization is not None
    )
    assert not run.events


def test_buckets_do_not_move_while_a_run_grows(tmp_path):
    records = planted_records(900)
    write_steps(tmp_path, 0, 1, records[:700])
    run = opened(tmp_path)
    before = view(run, pixels=100)
    write_steps(tmp_path, 0, 1, records[700:], "ab")
    run.refresh()
    after = view(run, pixels=120)
    assert before.width == after.width == 8
    assert np.array_equal(before.curves["loss"].mean[:87], after.curves["loss"].mean[:87])
    assert [bucket_width(steps, 100) for steps in (1, 100, 101, 1_000_000)] == [1, 1, 2, 16384]


def test_many_ranks_share_rows(tmp_path):
    shown = view(opened(planted_run(tmp_path, 64, 6, slow=4)), pixels=8)
    import accelerate.monitor.view as module

    module_rows, module.MOST_ROWS = module.MOST_ROWS, 3
    try:
        rows, own, _, slow = heat_rows(shown)
    finally:
        module.MOST_ROWS = module_rows
    assert rows == [(0, 1), (2, 3), (4, 5)]
    assert (
        np.array_equal(own[2], shown.own[4:6].max(axis=0)) and slow[2].any() and not slow[:2].any()
    )


def test_logged_values(tmp_path):
    records = planted_records(1000)
    write_steps(tmp_path, 0, 1, records)
    lines = [{"time": START, "event": "start"}]
    for at in range(0, 1000, 100):
        values = {"a": at, "text": "no number", "b": "nan" if at == 300 else 1.0}
        lines.append({"time": records["time"][at], "step": at + 1, "values": values})
        # Epochs are no optimizer steps, and one call had no step.
        lines.append({"time": records["time"][at], "step": at // 100, "values": {"epoch/f1": at}})
        lines.append({"time": records["time"][at], "step": None, "values": {"c": at}})
    lines.append({"time": records["time"][-1], "step": 901, "values": {"a": -7.0}})
    write_lines(tmp_path / "logs" / "values.jsonl", *lines)
    shown = view(opened(tmp_path), pixels=1000).logged
    assert set(shown) == {"a", "b", "c", "epoch/f1"}
    assert shown["a"].x.tolist() == [at + 1 for at in range(0, 1000, 100)]
    assert shown["a"].mean.tolist() == [*range(0, 900, 100), -7.0]
    assert np.isnan(shown["b"].mean[3])
    for name in ("c", "epoch/f1"):
        assert shown[name].x == pytest.approx(np.arange(0, 1000, 100), abs=3)


def test_logged_values_without_telemetry(tmp_path):
    for step in range(50):
        write_lines(
            tmp_path / "values.jsonl",
            {"time": START + step, "step": step, "values": {"loss": 1 / (step + 1)}},
        )
    run = opened(tmp_path)
    shown = view(run, pixels=10)
    assert not shown.ranks and run.last_step == 49 and not run.is_empty
    assert (
        shown.logged["loss"].low[0]
        < shown.logged["loss"].mean[0]
        < shown.logged["loss"].high[0]
        == 1
    )
    assert sentences(summarize(run)) == [
        "No steps were recorded: use `--telemetry` to record them."
    ]


def test_the_summary_says_where_the_time_went(tmp_path):
    records = planted_records(1000)
    records["data"], records["forward"] = 0.06, 0.02
    records["backward"] = records["optimizer"] = records["checkpoint"] = 0
    records["communication"], records["seconds"] = np.nan, 0.1
    records["loss"][800:] = np.nan
    records["flags"][::10] = 1
    records["host_memory"] = 1e9 + 1e6 * np.arange(1000)
    write_steps(tmp_path, 0, 1, records)
    summary = summarize(opened(tmp_path))
    shares = {part: round(share, 3) for part, share in summary.shares.items() if share}
    assert shares == {"data": 0.6, "forward": 0.2, "other": 0.2}
    assert summary.duration == pytest.approx(100) and summary.skipped == 100
    assert summary.bad_loss == pytest.approx(801, abs=8) and summary.memory_growth == pytest.approx(
        1e9, rel=0.01
    )
    texts = [*sentences(summary), *verdict(summary).lines().values(), *advice(summary)]
    text = "\n".join(texts)
    for part in (
        "waiting for the data loader (60",
        "num_workers",
        "100 steps were skipped",
        "not finite",
        "MiB in 1,000",
    ):
        assert part in text


@pytest.mark.parametrize("wait", ["communication", "backward"])
def test_records_of_several_steps_that_end_differently(tmp_path, wait):
    for rank in range(3):
        records = planted_records(1200, rank, "data" if rank == 1 else None, wait=wait)
        # Each rank has merged groups of about five steps of its own.
        ends = np.unique(np.append(np.arange(4 + rank, 1200, 5 + rank), 1199))
        merged = records[ends].copy()
        merged["steps"] = np.diff(ends, prepend=-1)
        for name in (
            "seconds",
            "data",
            "forward",
            "backward",
            "communication",
            "optimizer",
            "checkpoint",
        ):
            merged[name] = (
                np.add.reduceat(records[name], np.append(0, ends[:-1] + 1)) / merged["steps"]
            )
        for name in ("samples", "tokens"):
            merged[name] = np.add.reduceat(records[name], np.append(0, ends[:-1] + 1))
        write_steps(tmp_path, rank, 3, merged)
    run = opened(tmp_path)
    shown = view(run, pixels=2000)
    # No holes, as with a record for each step.
    assert shown.width == 32 and np.isfinite(shown.seconds).all()
    (slow,) = summarize(run).stragglers
    assert (slow.rank, slow.phase) == (1, "data") and slow.excess == pytest.approx(0.03, rel=0.1)
    assert shown.curves["throughput"].mean[3:-3] == pytest.approx(
        view(run, pixels=20).curves["throughput"].mean[1], rel=0.4
    )
