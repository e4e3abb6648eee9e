# SPDX-License-Identifier: Apache-2.0
"""The typed variables of a run are checked at its start, whoever needs them."""

from __future__ import annotations

import pytest

from accelerate.core import env
from accelerate.core.errors import ConfigurationError
from accelerate.core.topology import LAUNCHERS, RankVariables


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("ACCELERATE_USE_CPU", "maybe", "true, false, yes, no"),
        ("ACCELERATE_DEBUG_MODE", "2", "true, false"),
        ("ACCELERATE_NUM_PROCESSES", "abc", "use 1 to"),
        ("ACCELERATE_NUM_PROCESSES", "0", "use 1 to"),
        ("MASTER_PORT", "xyz", "0 to 65535"),
        ("MASTER_PORT", "70000", "0 to 65535"),
        ("WORLD_SIZE", "1.5", "1 or more"),
        ("LOCAL_RANK", "-1", "0 or more"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "4", "0 to 3"),
        ("PARALLELISM_CONFIG_TP_SIZE", "two", "1 or more"),
        ("FSDP_VERSION", "3", "1, 2"),
        ("ACCELERATE_DEBUG_TIMEOUT", "soon", "not a number"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(monkeypatch, name, text, accepted):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError) as caught:
        env.check_run()
    for part in (name, text, accepted):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text", ["y", "Yes", "t", "TRUE", "on", "1", "n", "No", "f", "FALSE", "off", "0", ""]
)
def test_the_words_of_a_flag(monkeypatch, text):
    monkeypatch.setenv("ACCELERATE_USE_CPU", text)
    env.check_run()


def test_the_default_of_a_flag_is_a_truth_value_too(monkeypatch):
    monkeypatch.delenv("ANY_FLAG", raising=False)
    assert (
        env.parse_flag_from_env("ANY_FLAG", "yes") is True
        and env.parse_flag_from_env("ANY_FLAG", 0) is False
    )
    with pytest.raises(ValueError, match="maybe"):
        env.parse_flag_from_env("ANY_FLAG", "maybe")


# torch_xla gives the processes that it starts a local rank alone.
XLA = RankVariables("torch_xla", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT", "")


@pytest.mark.parametrize("source", [*LAUNCHERS, XLA], ids=lambda source: source.launcher)
def test_a_misspelt_variable_is_reported_with_the_nearest_one_on_rank_0(
    monkeypatch, recwarn, source
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISON", "bf16")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv(source.world_size, "2")
    monkeypatch.setenv(source.rank, "1")
    env.check_run()
    assert not recwarn
    monkeypatch.setenv(source.rank, "0")
    # As transformers 4 does.
    monkeypatch.setenv("ACCELERATE_USE_IPEX", "false")
    with pytest.warns(
        UserWarning, match="PRECISON is not read .did you mean ACCELERATE_MIXED_PRECISION"
    ) as warned:
        env.check_run()
    assert len(warned) == 1
    monkeypatch.setenv("ACCELERATE_LAUNCH_TIME", "20260102")  # the launcher has warned
    env.check_run()
    assert not recwarn


def test_the_state_and_the_launcher_check(monkeypatch):
    from accelerate.config.launch_settings import resolve_settings
    from accelerate.state import PartialState

    monkeypatch.setenv("MASTER_PORT", "xyz")
    with pytest.raises(ConfigurationError, match="MASTER_PORT"):
        PartialState(cpu=True)
    with pytest.raises(ConfigurationError, match="MASTER_PORT"):
        resolve_settings({}, None)
