# SPDX-License-Identifier: Apache-2.0
"""The rendezvous' settings, what machines must agree on, clocks that differ, and who counts as gone."""

import time
from types import SimpleNamespace

import pytest

from accelerate.core.errors import ConfigurationError
from accelerate.launchers import rendezvous
from accelerate.launchers.generations import End, Generation, Member
from accelerate.launchers.messenger import MAX_MISSED, Presence
from accelerate.launchers.rendezvous import SETTINGS, Rendezvous, settings_of
from accelerate.launchers.spec import LaunchSpec, Program


def spec(conf=""):
    return LaunchSpec(Program("train.py"), rdzv_conf=conf)


def test_settings_are_chosen_unless_they_are_given():
    assert settings_of(spec()) == SETTINGS
    assert settings_of(spec("last_call_timeout=9,is_host=true")) == {**SETTINGS, "last_call_timeout": 9}
    with pytest.raises(ConfigurationError, match=r"keep_alive_intervall.*did you mean keep_alive_interval"):
        settings_of(spec("keep_alive_intervall=1"))
    with pytest.raises(ConfigurationError, match="join_timeout='soon' is not an integer"):
        settings_of(spec("join_timeout=soon"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.9"}, r"b \(2\) has torch 2.9, a \(1\) has 2.13"),
        ({"accelerate": "0"}, "install the same"),
        ({"nnodes": "1:3"}, r"b \(2\) was started with --nnodes 1:3, a \(1\) with 1:2"),
        ({"restarts": 4}, "--max_restarts 4"),
    ],
)
def test_machines_that_differ_are_told_in_what(change, told):
    host = {"host": "a", "address": "1", "run": "x", "nnodes": "1:2", "num_processes": 2, "restarts": 0}
    host.update(accelerate="1", torch="2.13")
    ours = {**host, "host": "b", "address": "2"}
    assert rendezvous.disagreement(host, ours) is None
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(rendezvous.disagreement(host, {**ours, **change}))


@pytest.mark.parametrize(("ahead", "told"), [(0.3, None), (7.0, "7.0 s behind"), (-7.0, "7.0 s ahead of")])
def test_clocks_that_differ_are_an_error(ahead, told, monkeypatch):
    monkeypatch.setattr(rendezvous, "CLOCKS", 0.3)
    store = {"clock": lambda: str(time.time() + ahead)}
    messenger = SimpleNamespace(
        request=lambda question: question(SimpleNamespace(check=lambda keys: True, get=lambda key: store[key]()))
    )
    this = SimpleNamespace(is_host=False, settings=SETTINGS, messenger=messenger, where="there")
    if told is None:
        Rendezvous.compare_clocks(this)
        return
    with pytest.raises(ConfigurationError, match=told):
        Rendezvous.compare_clocks(this)


def test_a_machine_is_gone_after_so_many_beats_without_a_sign():
    beats = {"alive/1": b"0", "alive/2": b"0"}
    store = SimpleNamespace(multi_get=lambda keys: [beats[key] for key in keys])
    presence = Presence([1, 2])
    for number in range(MAX_MISSED):
        assert presence.update(store) == []
        beats["alive/1"] = str(number + 1).encode()
    assert presence.update(store) == [2]
    beats["alive/2"] = b"9"
    assert presence.update(store) == []


@pytest.mark.parametrize(
    ("kind", "gone", "least", "costs"),
    [
        ("failed", 0, 2, True),
        ("gone", 1, 1, False),
        ("gone", 1, 2, True),
        ("left", 0, 2, True),
        ("joined", 0, 1, False),
    ],
)
def test_what_uses_up_a_restart(kind, gone, least, costs):
    members = [Member(number, "host", str(number), 0, 0) for number in (1, 2)]
    formed = Generation(SimpleNamespace(member=1), 1, members, 0, lambda: 0, least, holds_store=True)
    formed.end = End(kind, "", by=2)
    formed._presence.missed[2] = MAX_MISSED * gone
    assert formed.uses_restart is costs
    # The holder of the store takes all with it; another one only where too few are left.
    assert formed._kind_of_leaving() == "over"
