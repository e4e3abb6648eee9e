# SPDX-License-Identifier: Apache-2.0
"""Reading and reducing the steps of a rank, compared with plain NumPy on the same records."""

import json
import re

import numpy as np
import pytest
from planted_runs import START, planted_records, write_steps

from accelerate.core.errors import ConfigurationError
from accelerate.monitor.steps import BLOCK, COLUMNS, Buckets, RankSteps, reduce_steps
from accelerate.telemetry.records import HEADER_SIZE, STEP, steps_file

MEANS = ("seconds", "data", "communication", "loss", "device_memory")


def loaded(path):
    rank = RankSteps(path)
    rank.refresh()
    return rank


def compare(rank, records, width):
    """Each bucket has the minimum, maximum, weighted mean and count of its records."""
    ranks = reduce_steps([rank], 1, int(records["step"].max()), width)
    found = Buckets(*(array[0] for array in ranks.arrays()))
    ids = (records["step"].astype(int) - 1) // width
    assert len(found.time) == ids.max() + 1
    for number in range(len(found.time)):
        inside = records[ids == number]
        for name in MEANS:
            column, values = COLUMNS.index(name), inside[name].astype("f8")
            known = ~np.isnan(values)
            assert found.weight[number, column] == inside["steps"][known].sum()
            if not known.any():
                assert np.isnan(found.mean(name)[number])
                continue
            assert found.low[number, column] == inside[name][known].min()
            assert found.high[number, column] == inside[name][known].max()
            mean = np.average(values[known], weights=inside["steps"][known])
            assert found.mean(name)[number] == pytest.approx(mean, rel=1e-5)
        assert found.total[number, COLUMNS.index("samples")] == inside["samples"].sum()
        if len(inside):
            assert found.time[number] == inside["time"].max()
            assert found.skipped[number] == (inside["flags"] & 1).sum()


@pytest.mark.parametrize("width", [1, 4, BLOCK, 4 * BLOCK, 8192])
def test_buckets_are_those_of_numpy(tmp_path, width):
    records = planted_records(777)
    records["loss"][[3, 400]] = np.nan, np.inf
    records["communication"][200:400] = np.nan
    records["device_memory"] = np.nan
    records["flags"][100:300:7] = 1
    compare(loaded(write_steps(tmp_path, 0, 1, records)), records, width)


@pytest.mark.parametrize("width", [1, 16, BLOCK, 2 * BLOCK])
def test_ranks_are_reduced_together_as_alone(tmp_path, width):
    """Also those that begin late, have no record, or wrote fields of another version."""
    records = planted_records(300)
    paths = [write_steps(tmp_path, rank, 4, records[200 * (rank == 1) :]) for rank in range(4)]
    write_steps(tmp_path, 2, 4, records[:0])
    newer = np.dtype(
        [
            ("time", "<f8"),
            *((n, STEP[n]) for n in ("loss", "seconds", "steps", "step", "flags")),
            ("x", "<i8"),
        ]
    )
    changed = np.zeros(300, newer)
    for name in ("time", "step", "steps", "flags", "seconds", "loss"):
        changed[name] = records[name]
    write_steps(tmp_path, 3, 4, changed)
    with_header(paths[3], fields=[[name, newer[name].str] for name in newer.names])
    ranks = [loaded(path) for path in paths]
    together = reduce_steps(ranks, 65, 300, width)
    for number, rank in enumerate(ranks):
        alone = reduce_steps([rank], 65, 300, width)
        for array, expected in zip(together.arrays(), alone.arrays(), strict=True):
            np.testing.assert_array_equal(array[number], expected[0])
    np.testing.assert_array_equal(together.mean("loss")[3], together.mean("loss")[0])
    assert np.isnan(together.mean("data")[3]).all() and np.isnan(together.mean("loss")[2]).all()


@pytest.mark.parametrize("width", [16, BLOCK])
def test_merged_records_count_with_their_steps(tmp_path, width):
    old, new = planted_records(100), planted_records(300, begin=401)
    old["step"], old["steps"] = np.arange(4, 404, 4), 4
    compare(
        loaded(write_steps(tmp_path, 0, 1, np.concatenate([old, new]))),
        np.concatenate([old, new]),
        width,
    )


@pytest.mark.parametrize("width", [8, 2 * BLOCK])
def test_a_resumed_run_shows_the_later_records(tmp_path, width):
    parts = [
        planted_records(1000),
        planted_records(500, 1, begin=601),
        planted_records(300, 2, begin=1050),
    ]
    rank = loaded(write_steps(tmp_path, 0, 1, np.concatenate(parts)))
    compare(rank, np.concatenate([parts[0][:600], parts[1][:449], parts[2]]), width)
    # From before the first record: nothing of the past is left.
    again = planted_records(20, 3, begin=1)
    write_steps(tmp_path, 0, 1, again, "ab")
    assert rank.refresh() and rank.last_step == 20
    compare(rank, again, width)


def test_a_growing_file_is_followed(tmp_path):
    records = planted_records(500)
    rank = loaded(write_steps(tmp_path, 0, 1, records[:0]))
    assert not rank.count and reduce_steps([rank], 1, 1, 1).time.shape == (1, 1)
    for start, stop in [(0, 1), (1, 70), (70, 71), (71, 500)]:
        write_steps(tmp_path, 0, 1, records[start:stop], "ab")
        assert rank.refresh() and rank.last_step == stop
        compare(rank, records[:stop], BLOCK)
    assert not rank.refresh()


def test_a_replaced_file_is_read_anew(tmp_path):
    records = planted_records(400)
    path = write_steps(tmp_path, 0, 1, records)
    rank = loaded(path)
    merged = records[1:200:2].copy()
    merged["steps"] = 2
    other = np.concatenate([merged, records[200:]])
    write_steps(tmp_path / "new", 0, 1, other)
    steps_file(tmp_path / "new", 0).replace(path)
    assert rank.refresh() and rank.count == len(other)
    compare(rank, other, 32)


def test_the_end_of_a_damaged_file_is_left_out(tmp_path):
    records = planted_records(100)
    path = write_steps(tmp_path, 0, 1, records)
    with open(path, "ab") as file:
        file.write(b"\0" * 5 * STEP.itemsize)
    assert loaded(path).count == 100 and loaded(path).note is None
    with open(path, "r+b") as file:
        file.truncate(HEADER_SIZE + 60 * STEP.itemsize + 7)
    assert loaded(path).last_step == 60 and loaded(path).note is None
    with open(path, "r+b") as file:
        file.seek(HEADER_SIZE + 50 * STEP.itemsize)
        file.write(b"\xff" * 3 * STEP.itemsize)
    rank = loaded(path)
    assert rank.last_step == 50
    assert re.search("rank_00000.steps is damaged at record 50: .*step 50", rank.note)


def with_header(path, **changes):
    data = path.read_bytes()
    header = {**json.loads(data[:HEADER_SIZE]), **changes}
    path.write_bytes(json.dumps(header).encode().ljust(HEADER_SIZE) + data[HEADER_SIZE:])


@pytest.mark.parametrize(
    "fields", [7, [], [["o", "O"]], [["time", "U8"]], [["flags", "<f4"]], [["loss", "<u4"]]]
)
def test_fields_of_other_types_are_refused(tmp_path, fields):
    path = write_steps(tmp_path, 0, 1, planted_records(10))
    if isinstance(fields, list) and fields:
        named = dict(fields)
        kept = [[name, named.pop(name, STEP[name].str)] for name in STEP.names]
        fields = kept + [[name, kind] for name, kind in named.items()]
    with_header(path, fields=fields)
    with pytest.raises(ConfigurationError, match="is not a telemetry file"):
        RankSteps(path)
    with_header(path, version=2)
    with pytest.raises(ConfigurationError, match=r"newer version of accelerate.*update accelerate"):
        RankSteps(path)


@pytest.mark.parametrize(
    "content", [b"", b"not telemetry", b"{}" * 3000, b"[" * 9000, b"null".ljust(9000)]
)
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "x.steps").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"x\.steps is not a telemetry file"):
        RankSteps(tmp_path / "x.steps")


def test_times_are_mapped_to_steps(tmp_path):
    records = planted_records(1000)
    rank = loaded(write_steps(tmp_path, 0, 1, records))
    found = rank.steps_at(np.array([START - 5, records["time"][499], START + 1e6]))
    assert found[0] == 0 and found[1] == pytest.approx(500, abs=4) and found[2] == 1000
