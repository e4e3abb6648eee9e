# SPDX-License-Identifier: Apache-2.0
"""The profiler of a block: what it records, the file of each rank, and the user's own handler beside it."""

import gzip
import json

import pytest
import torch

from accelerate.config.training import ProfileKwargs
from accelerate.core.errors import ConfigurationError
from accelerate.telemetry.profile import profile


def work():
    return torch.ones(8, 8) @ torch.ones(8, 8)


def names(path):
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def test_a_block_without_options_gives_the_profiler():
    waits = []
    with profile(None, 0, lambda: waits.append(1)) as profiler:
        work()
    assert any(event.key == "aten::matmul" for event in profiler.key_averages())
    assert waits == []  # no file, nothing to wait for


def test_options_reach_the_profiler():
    options = ProfileKwargs(
        activities=["cpu"], record_shapes=True, profile_memory=True, with_flops=True
    )
    with profile(options, 0, lambda: None) as profiler:
        work()
    (event,) = (
        one for one in profiler.key_averages(group_by_input_shape=True) if one.key == "aten::mm"
    )
    assert event.input_shapes == [[8, 8], [8, 8]]
    assert event.flops == 2 * 8 * 8 * 8
    assert event.cpu_memory_usage == 8 * 8 * 4


def test_one_file_a_rank_and_all_wait_for_all(tmp_path):
    waits = []
    folder = tmp_path / "new" / "traces"
    options = ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))
    for rank in range(2):
        with profile(options, rank, lambda: waits.append(len(list(folder.iterdir())))):
            work()
    assert sorted(path.name for path in folder.iterdir()) == ["profile_0.json", "profile_1.json"]
    assert waits == [1, 2]
    assert "aten::matmul" in names(folder / "profile_1.json")


def test_a_schedule_writes_its_last_active_window(tmp_path):
    seen = []
    options = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda found: seen.append(found.step_num),
        output_trace_dir=str(tmp_path),
    )
    with profile(options, 0, lambda: None) as profiler:
        for step in range(8):
            with torch.profiler.record_function(f"step {step}"):
                work()
            profiler.step()
    steps = {name for name in names(tmp_path / "profile_0.json") if name.startswith("step ")}
    assert steps == {"step 5"}  # windows: 0 1 (2), 3 4 (5)
    assert seen == [3, 6]


def test_the_users_handler_may_export_too(tmp_path):
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path / "board"), use_gzip=True)
    options = ProfileKwargs(
        activities=["cpu"], on_trace_ready=handler, output_trace_dir=str(tmp_path / "ours")
    )
    with profile(options, 3, lambda: None) as profiler:
        work()
    profiler.export_chrome_trace(str(tmp_path / "again.json"))
    (packed,) = (tmp_path / "board").iterdir()
    assert (
        names(packed)
        == names(tmp_path / "ours" / "profile_3.json")
        == names(tmp_path / "again.json")
    )


def test_an_exception_passes_at_once(tmp_path):
    waits = []
    with pytest.raises(KeyError):
        with profile(ProfileKwargs(output_trace_dir=str(tmp_path)), 0, lambda: waits.append(1)):
            raise KeyError("x")
    assert waits == []


def test_a_block_too_short_for_its_schedule_is_told(tmp_path):
    options = ProfileKwargs(
        schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with pytest.raises(ConfigurationError, match="made fewer"):
        with profile(options, 0, lambda: None) as profiler:
            work()
            profiler.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["gpu"]}, "ProfileKwargs.activities='gpu': use one of cpu, cuda"),
        (
            {"output_trace_dir": "file/traces"},
            "output_trace_dir='file/traces' cannot be created: Not a directory",
        ),
    ],
)
def test_options_that_cannot_be(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match=message),
        profile(ProfileKwargs(**options), 0, lambda: None),
    ):
        work()
