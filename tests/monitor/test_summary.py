# SPDX-License-Identifier: Apache-2.0
"""What the summary says about runs with one planted cause each, and that it blames nobody where there is none."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from planted_runs import START, write_lines
from rich.console import Console

from accelerate.commands import report
from accelerate.monitor.run import open_runs
from accelerate.monitor.sentences import sentences
from accelerate.monitor.summary import summarize
from accelerate.monitor.terminal import picture
from accelerate.monitor.verdict import LIMITS, advice, verdict
from accelerate.telemetry.records import (
    FLAG_FIRST,
    PHASES,
    STEP,
    events_file,
    header_bytes,
    steps_file,
)

USUAL = {
    "data": 0.004,
    "forward": 0.028,
    "backward": 0.05,
    "communication": 0.009,
    "optimizer": 0.006,
}


def planted(folder, edit=None, ranks=4, steps=1000, noise=0.03, seed=0, wait="backward", **seconds):
    """A synchronous run: ranks work at their own pace, and wait for the slowest in the phase `wait`."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(ranks):
        records = np.zeros(steps, STEP)
        records["step"], records["steps"] = np.arange(1, steps + 1), 1
        for name, usual in {**USUAL, **seconds}.items():
            records[name] = usual * np.clip(random.normal(1, noise, steps), 0.5, None)
        records["transfer"] = records["tokens"] = np.nan
        records["samples"], records["device_memory"], records["host_memory"] = 32, 9e9, 3e9
        records["loss"] = (
            2 * np.exp(-3 * np.arange(steps) / steps) + 1.4 + 0.1 * random.normal(size=steps)
        )
        records["flags"][0] = FLAG_FIRST
        found.append(records)
    if edit:
        edit(found, random)
    work = (
        np.array([sum(np.nan_to_num(records[name]) for name in PHASES) for records in found], "f8")
        + 0.003
    )
    for rank, records in enumerate(found):
        records[wait] += work.max(axis=0) - work[rank]
        records["seconds"] = records["longest"] = work.max(axis=0)
        records["time"] = START + np.cumsum(work.max(axis=0))
        write(folder, rank, ranks, records)
        write_lines(events_file(folder, rank), {"time": START, "event": "start", "restart": 0})
    return found


def write(folder, rank, ranks, records):
    path = steps_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = header_bytes(rank, ranks, host=f"node{rank // 4}", device="cuda:0", started=START)
    path.write_bytes(header + records.tobytes())


def opened(folder):
    (run,) = open_runs([str(folder)])
    run.refresh()
    return run


def summary_of(folder):
    found = summarize(opened(folder))
    json.dumps(sentences(found) + advice(found))
    return found


def text_of(folder):
    found = summary_of(folder)
    texts = [*sentences(found), *verdict(found).lines().values(), *advice(found)]
    return "\n".join(dict.fromkeys(texts)).replace("\u00a0", " ")


def slower(rank, phase, seconds, start=0, stop=None):
    def edit(found, _):
        for number in [rank] if isinstance(rank, int) else rank:
            found[number][phase][start:stop] += seconds

    return edit


def everywhere(phase, seconds, start=0, stop=None, every=1):
    return slower_all(
        lambda records: records[phase].__setitem__(slice(start, stop, every), seconds)
    )


def slower_all(change):
    return lambda found, _: [change(records) for records in found]


@pytest.mark.parametrize("wait", ["backward", "communication"])
def test_two_slow_ranks_with_different_causes(tmp_path, wait):
    def edit(found, _):
        found[3]["forward"] += 0.03
        found[6]["data"] += 0.04

    planted(tmp_path, edit, ranks=8, wait=wait)
    slow = {one.rank: one for one in summary_of(tmp_path).stragglers}
    assert {rank: one.phase for rank, one in slow.items()} == {3: "forward", 6: "data"}
    assert slow[3].excess == pytest.approx(0.03, rel=0.05) and slow[6].excess == pytest.approx(
        0.04, rel=0.05
    )
    assert all(one.first == 1 and one.last == 1000 for one in slow.values())


def test_slow_ranks_of_one_machine_are_one_sentence(tmp_path):
    planted(tmp_path, slower((4, 5, 6, 7), "forward", 0.03), ranks=16)
    text = text_of(tmp_path)
    assert text.count("slow in") == 1
    assert re.search(r"Ranks 4-7 on node1 .*slow in 100% .*\(from 1 to 1,000\)", text)
    assert "wait 30 ms a step" in text
    assert "temperature of node1, the machine of ranks 4-7" in text


def test_one_slow_rank_of_256(tmp_path):
    planted(tmp_path, slower(137, "optimizer", 0.04), ranks=256, steps=60)
    (slow,) = summary_of(tmp_path).stragglers
    assert (slow.rank, slow.phase, slow.host) == (137, "optimizer", "node34")


def test_a_rank_that_is_slow_for_a_minute_of_an_hour(tmp_path):
    planted(tmp_path, slower(2, "forward", 0.05, 18_000, 18_400), steps=36_000)
    (slow,) = summary_of(tmp_path).stragglers
    assert slow.rank == 2 and slow.share < 0.02 and slow.excess == pytest.approx(0.05, rel=0.1)
    assert slow.first == pytest.approx(18_001, abs=16) and slow.last == pytest.approx(
        18_400, abs=16
    )


def alternating(found, _):
    for rank in (0, 1):
        found[rank]["forward"][rank::2] += 0.04


def test_ranks_that_alternate_are_not_slow_ranks(tmp_path):
    planted(tmp_path, alternating, ranks=2)
    found = summary_of(tmp_path)
    assert found.stragglers == () and found.waiting == pytest.approx(0.02 / 0.14, rel=0.15)
    text = text_of(tmp_path)
    assert "about 14% of the time" in text and "are slow in turn" in text


def rare_peaks(phase, part, seconds):
    def edit(found, random):
        for records in found:
            records[phase] += (random.random(len(records)) < part) * random.exponential(
                seconds, len(records)
            )

    return edit


def slow_changes(found, random):
    """Noise with a memory of 50 steps, as of a machine whose load changes."""
    for records in found:
        noise, value = random.normal(0, 0.002, len(records)), 0.0
        for at in range(len(records)):
            value = 0.98 * value + noise[at]
            records["forward"][at] += abs(value)


NOISE = {
    "calm": {},
    "strong": {"noise": 0.3},
    "peaks": {"edit": rare_peaks("forward", 0.01, 0.2)},
    "many peaks": {"edit": rare_peaks("forward", 0.05, 0.1)},
    "loader": {"edit": rare_peaks("data", 0.03, 0.3)},
    "changes": {"edit": slow_changes},
}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize(("ranks", "steps"), [(2, 30), (8, 30), (2, 200), (8, 200), (8, 1500)])
def test_noise_is_nobodys_fault(tmp_path, kind, ranks, steps):
    for seed in range(3):
        planted(
            tmp_path / str(seed), ranks=ranks, steps=steps, seed=seed + steps + ranks, **NOISE[kind]
        )
        found = summary_of(tmp_path / str(seed))
        assert found.stragglers == () and found.period is None
        assert "No rank stands out as slow." in sentences(found)
        assert not any("temperature" in text for text in advice(found))


def test_a_first_step_and_three_steps_are_no_slow_rank(tmp_path):
    planted(tmp_path / "first", slower(0, "forward", 30, 0, 1), steps=200)
    found = summary_of(tmp_path / "first")
    assert (
        found.stragglers == ()
        and found.period.first == found.period.last == 1
        and found.period.is_first
    )
    text = text_of(tmp_path / "first")
    assert (
        "Step 1 was slow: 30.1 s instead of " in text
        and "includes its warm-up" in text
        and "TRY" not in text
    )
    assert "(median 10" in text.split("\n")[0]
    planted(tmp_path / "three", slower(0, "forward", 30, 0, 1), steps=3)
    assert summary_of(tmp_path / "three").stragglers == ()
    planted(tmp_path / "one", steps=1)
    assert text_of(tmp_path / "one").startswith("Step 1 on 4 ranks took 101 ms")


@pytest.mark.parametrize(
    ("phase", "seconds", "every", "limit", "remedy"),
    [
        ("data", 0.08, 1, "input", "`num_workers`"),
        ("data", 0.5, 8, "input", "`num_workers`"),
        ("transfer", 0.08, 1, "input", "`pin_memory=True`"),
        ("communication", 0.08, 1, "communication", "Accumulate gradients"),
        ("optimizer", 0.08, 1, "optimizer", "`fused=True`"),
        ("checkpoint", 5.0, 100, "saving", "`save_state(blocking=False)`"),
    ],
)
def test_where_the_time_goes_on_all_ranks(tmp_path, phase, seconds, every, limit, remedy):
    planted(tmp_path, everywhere(phase, seconds, every - 1, None, every))
    found, text = summary_of(tmp_path), text_of(tmp_path)
    assert max(found.shares, key=found.shares.get) == phase or phase == "checkpoint"
    found_limit = verdict(found)
    assert found_limit.limit == limit and remedy in found_limit.next_step
    assert found_limit.share == pytest.approx(found.usual_shares[phase])
    assert text.count(" of the time is ") == 1 and advice(found) == []
    assert found.stragglers == () and found.period is None and "temperature" not in text
    # The rate is that of the time, with what is rare.
    assert found.throughput == pytest.approx(4 * 32 / found.seconds, rel=0.01)


def test_one_rank_that_saves_alone(tmp_path):
    planted(tmp_path, slower(0, "checkpoint", 0.0))
    assert "checkpoint" not in text_of(tmp_path)
    planted(
        tmp_path, lambda found, _: found[0]["checkpoint"].__setitem__(slice(99, None, 100), 5.0)
    )
    text = text_of(tmp_path)
    assert "Rank 0 on node0 was slow" in text
    assert "rank 0 saves checkpoints" in text


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_slow_steps_in_the_middle(tmp_path, phase):
    planted(tmp_path, everywhere(phase, 0.3, 450, 550))
    found = summary_of(tmp_path)
    assert found.period.phase == phase and found.stragglers == () and not found.period.is_first
    assert found.period.first == pytest.approx(451, abs=4) and found.period.last == pytest.approx(
        550, abs=4
    )
    assert found.period.lost == pytest.approx(30, rel=0.15)
    text = text_of(tmp_path)
    assert "num_workers" not in text and "on these machines during steps 4" in text


def test_evaluations_and_restarts_cost_time_between_steps(tmp_path):
    parts = planted(tmp_path)
    for rank, records in enumerate(parts):
        for step in (250, 500):
            begin = float(records["time"][step - 1])
            records["time"][step:] += 60
            write_lines(
                events_file(tmp_path, rank),
                {"time": begin + 0.01, "event": "evaluation_begin", "step": step},
                {"time": begin + 60, "event": "evaluation_end", "step": step},
            )
        write(tmp_path, rank, 4, records)
    text = text_of(tmp_path)
    assert re.search("2 evaluations .*another 2 min 0 s, 54%", text)
    assert "Evaluate less often" in text and "restarted" not in text
    write_lines(
        events_file(tmp_path, 0),
        {"time": float(parts[0]["time"][-1]) + 1, "event": "evaluation_begin", "step": 1000},
        {"time": float(parts[0]["time"][-1]) + 41, "event": "evaluation_end", "step": 1000},
    )
    assert "3 evaluations took another 2 min 40 s" in text_of(tmp_path)
    for rank, records in enumerate(parts):
        again = records[700:].copy()
        again["time"] += records["time"][799] - again["time"][0] + 90
        write(tmp_path, rank, 4, np.concatenate([records[:800], again]))
        write_lines(
            events_file(tmp_path, rank),
            {"time": float(again["time"][0]) - 5, "event": "start", "restart": 1},
        )
    found = summary_of(tmp_path)
    # 90 s until the first step of the new process, 40 of which are the evaluation, and 99 steps that were made twice.
    assert found.restarts == 1 and found.restarting == pytest.approx(90 - 40 + 99 * 0.102, rel=0.02)
    assert re.search("restarted once, .*1 min 0 s", text_of(tmp_path))


def set_loss(value, start, stop=None, ranks=None):
    def edit(found, _):
        for rank, records in enumerate(found):
            if ranks is None or rank in ranks:
                records["loss"][start:stop] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (set_loss(np.nan, 700), "The loss is not finite, first at step 701."),
        (set_loss(np.inf, 700), "The loss is not finite, first at step 701."),
        (set_loss(np.nan, 700, None, {2}), "The loss is not finite on rank 2, first at step 701."),
        (set_loss(np.nan, 700, 703), "The loss is not finite, first at step 701."),
    ],
)
def test_a_loss_that_breaks(tmp_path, edit, sentence):
    planted(tmp_path, edit)
    text = text_of(tmp_path)
    assert sentence in text and "Lower the learning rate" in text


def test_a_loss_that_is_not_known_is_not_broken(tmp_path):
    planted(tmp_path, set_loss(np.nan, 0))
    assert "loss" not in text_of(tmp_path)
    # Pipelines know it on the ranks of the last stage.
    planted(tmp_path, set_loss(np.nan, 0, None, {0, 1}))
    assert "not finite" not in text_of(tmp_path)

    def end_early(found, _):
        """The steps at the end of a run that were not split into phases."""
        for records in found:
            for name in ("loss", "gradient_norm", "learning_rate", *PHASES):
                if name not in ("communication", "checkpoint"):
                    records[name][-3:] = np.nan

    planted(tmp_path, end_early)
    assert "The loss went from" in text_of(tmp_path) and "not finite" not in text_of(tmp_path)


def test_a_loss_that_rises(tmp_path):
    planted(
        tmp_path,
        slower_all(
            lambda records: records["loss"].__iadd__(np.maximum(0, records["step"] - 500.0))
        ),
    )
    found = summary_of(tmp_path)
    assert found.lowest_loss[1] == pytest.approx(480, abs=30) and "it was lowest" in text_of(
        tmp_path
    )
    planted(tmp_path)
    assert "lowest" not in text_of(tmp_path)


def test_skipped_steps(tmp_path):
    planted(tmp_path, slower_all(lambda records: records["flags"].__setitem__(3, 1)))
    text = text_of(tmp_path)
    assert (
        "1 step was skipped because fp16 gradients overflowed." in text and "init_scale" not in text
    )


def test_hangs_and_missing_memory_come_first(tmp_path):
    records = planted(tmp_path)
    after = float(records[0]["time"][-1]) + 600
    for rank in range(4):
        write_lines(
            events_file(tmp_path, rank),
            {"time": after, "event": "hang", "message": "no progress\nfor 600 s."},
        )
    for more in ({}, {"path": "memory/rank_00002.txt"}):
        event = {
            "time": after,
            "event": "out_of_memory",
            "message": "tried to allocate 2 GiB",
            **more,
        }
        write_lines(events_file(tmp_path, 2), event)
    found = summary_of(tmp_path)
    assert sentences(found)[:2] == [
        "Ranks 0-3 reported a hang: no progress for 600 s.",
        "Rank 2 ran out of memory.",
    ]
    assert any("accelerate plan" in text for text in advice(found))
    # After the last step: the first of them has stopped the run.
    assert verdict(found).limit == "hang" and verdict(found).evidence == sentences(found)[0]
    # A run that goes on is limited by something else.
    for rank in range(4):
        again = records[rank].copy()
        again["step"] += 1000
        again["time"] += after
        write(tmp_path, rank, 4, np.concatenate([records[rank], again]))
    assert verdict(summary_of(tmp_path)).limit != "hang"


def out_of_memory(folder):
    records = planted(folder)
    after = float(records[0]["time"][-1]) + 1
    write_lines(events_file(folder, 2), {"time": after, "event": "out_of_memory", "message": ""})


def between_phases(folder):
    for rank, records in enumerate(planted(folder)):
        records["seconds"] += 0.08
        records["time"] += 0.08 * np.arange(len(records))
        write(folder, rank, 4, records)


def evaluations(folder):
    records = planted(folder)
    begin = float(records[0]["time"][-1])
    write_lines(
        events_file(folder, 0),
        {"time": begin, "event": "evaluation_begin", "step": 1000},
        {"time": begin + 60, "event": "evaluation_end", "step": 1000},
    )


# Recorded runs, and for each the verdict, figures that its evidence has, and what is to be tried.
VERDICTS = {
    "memory": (out_of_memory, "rank 2|Rank 2", "smaller batches"),
    "slow_rank": (
        lambda folder: planted(folder, slower(2, "forward", 0.03)),
        "Rank 2 on node0 .*of which 30 ms in the forward pass",
        "temperature of node0",
    ),
    "uneven_ranks": (
        lambda folder: planted(folder, alternating, ranks=2),
        "about 14% of the time",
        "samples of similar length",
    ),
    "script": (
        between_phases,
        "% of the time is the script's own code",
        "`.item\\(\\)`",
    ),
    "idle": (evaluations, "One evaluation took another 1 min 0 s", "Evaluate less often"),
    "warm_up": (
        lambda folder: planted(folder, everywhere("forward", 30, 0, 1), steps=200),
        "Step 1 was slow: 30.* s",
        "later steps",
    ),
    "slow_steps": (
        lambda folder: planted(folder, everywhere("forward", 0.3, 450, 550)),
        "Steps 4.. to 5.. were slow",
        "what else ran on these machines",
    ),
    "computation": (
        planted,
        "8.% of the time is the backward pass .5.%., the forward pass .2.%., the optimizer",
        "profile 10:12",
    ),
    "nothing": (
        lambda folder: planted(folder, data=0.013, communication=0.02),
        "Computation takes 7.% of the time",
        "profile 10:12",
    ),
}


@pytest.mark.parametrize("limit", VERDICTS)
def test_the_verdict_is_what_costs_most(tmp_path, limit, capsys):
    plant, evidence, next_step = VERDICTS[limit]
    plant(tmp_path)
    found = verdict(summary_of(tmp_path))
    assert found.limit == limit
    assert re.search(evidence, found.evidence.replace("\u00a0", " "))
    assert re.search(next_step, found.next_step)
    assert found.next_step not in advice(summary_of(tmp_path))
    # The report and the terminal have the three lines, each once.
    report.main([str(tmp_path)])
    printed = capsys.readouterr().out
    lines = {label: text.replace("\u00a0", " ") for label, text in found.lines().items()}
    assert [printed.count(f"- {label}: {text}\n") for label, text in lines.items()] == [1] * 3
    console = Console(width=200, file=io.StringIO())
    console.print(picture(opened(tmp_path), 200))
    shown = " ".join(console.file.getvalue().split())
    for label, text in lines.items():
        assert shown.count(f"{label}: {text}".replace("`", "")) == 1


def test_each_limit_has_a_recorded_run_and_a_row_of_the_guide():
    parameters = test_where_the_time_goes_on_all_ranks.pytestmark[0].args[1]
    assert {*VERDICTS, *(row[3] for row in parameters), "hang"} == set(LIMITS)
    guide = (Path(__file__).parents[2] / "docs" / "slow.md").read_text()
    for headline in LIMITS.values():
        assert headline.format(ranks="Rank 3 limits") in guide
