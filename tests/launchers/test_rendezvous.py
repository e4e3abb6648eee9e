# SPDX-License-Identifier: Apache-2.0
"""The rendezvous' settings, what machines must agree on, how groups form and end, and what uses up a restart."""

import contextlib
import socket

import pytest

from accelerate.core.errors import ConfigurationError
from accelerate.launchers.coordinator import Coordinator, disagreement
from accelerate.launchers.generations import End, Generation, Member
from accelerate.launchers.rendezvous import settings_of
from accelerate.launchers.spec import RENDEZVOUS_SETTINGS as SETTINGS
from accelerate.launchers.spec import LaunchSpec, Program
from accelerate.launchers.static import Peer, identity, ready


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
    assert disagreement(host, ours) is None
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(disagreement(host, {**ours, **change}))


class Machine:
    """A machine of a run, as the machine that holds the rendezvous sees it."""

    def __init__(self, port, name, **change):
        self.peer = Peer(socket.create_connection(("localhost", port), timeout=20))
        self.received = []
        self.peer.send({"hello": {**options(), "host": name, "address": f"10.0.0.{name}", **change}})

    def read(self, key):
        """The value of the next message with this key."""
        while True:
            for place, message in enumerate(self.received):
                if key in message:
                    del self.received[: place + 1]
                    return message[key]
            arrived = self.peer.receive()
            assert arrived is not None, f"the connection ended before {key}"
            self.received += arrived

    def join(self, restarts=0):
        self.peer.send({"join": restarts})


def options():
    own = {"address": "10.0.0.0", "nnodes": "1:3", "run": "x", "restarts": 0}
    return {**identity(spec(), "elastic"), **own}


@pytest.fixture
def run():
    """A coordinator of two or three machines; `run(name)` connects one."""
    with contextlib.ExitStack() as stack:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        coordinator = Coordinator(port, options(), 2, 3, 0.2, 5.0, ready)
        coordinator.start()

        def connect(name, **change):
            machine = Machine(port, name, **change)
            stack.callback(machine.peer.socket.close)
            return machine

        yield connect
        stack.close()
        coordinator.close(20)
        assert not coordinator.is_alive()


def grouped(*machines):
    """The hosts of the group that all these machines learn of."""
    hosts = [[member["host"] for member in machine.read("group")] for machine in machines]
    assert all(found == hosts[0] for found in hosts)
    return hosts[0]


def test_a_group_forms_changes_and_ends(run):
    one, two = run("1", machine=1), run("2", machine=0)
    assert [one.read("number"), two.read("number")] == [1, 2]
    one.join()
    assert one.read("present") == ["1 (10.0.0.1)", "2 (10.0.0.2)"]
    two.join(restarts=1)
    assert grouped(one, two) == ["2", "1"]
    three = run("3")
    three.join()
    assert one.read("end")["kind"] == two.read("end")["kind"] == "joined"
    one.join()
    # The ranks of the second machine have not ended yet.
    assert three.read("present")
    two.join()
    assert grouped(one, two, three) == ["2", "3", "1"]
    # A machine is lost with its connection; the others are told which one, and form a group without it.
    three.peer.socket.close()
    assert one.read("gone") == two.read("gone") == 3
    ended = one.read("end")
    assert (ended["kind"], ended["reason"]) == ("gone", "3 (10.0.0.3) is gone") and two.read("end") == ended
    one.join()
    two.join()
    assert grouped(one, two) == ["2", "1"]
    # The first end counts, and reports about another generation are ignored.
    one.peer.send({"end": vars(End("failed", "an older one")), "generation": 1})
    one.peer.send({"end": vars(End("failed", "rank 0 failed", 3, 1)), "generation": 3})
    assert one.read("end") == two.read("end") == vars(End("failed", "rank 0 failed", 3, 1))
    two.peer.send({"end": vars(End("failed", "rank 1 failed", 4, 2)), "generation": 3})
    one.join(1)
    two.join(1)
    assert grouped(one, two) == ["2", "1"]
    for number, machine in ((1, one), (2, two)):
        machine.peer.send({"finished": number, "generation": 4})
    assert one.read("end")["kind"] == two.read("end")["kind"] == "finished"
    late = run("4")
    late.join()
    assert late.read("over")


def test_a_machine_waits_while_the_group_is_full(run):
    three, four = [run(name) for name in "123"], run("4")
    for machine in (*three, four):
        machine.read("number")
        machine.join()
    assert grouped(*three) == ["1", "2", "3"]
    three[0].peer.socket.close()
    for machine in three[1:]:
        assert machine.read("end")["kind"] == "gone"
        machine.join()
    assert grouped(*three[1:], four) == ["2", "3", "4"]


def test_what_is_no_launcher_of_this_run_changes_nothing(run):
    one, two = run("1"), run("2")
    for change, told in (
        ({"num_processes": 7}, "--num_processes 7"), ({"engine": "static"}, "--engine static"), ({"protocol": "?"}, "")
    ):  # fmt: skip
        assert told in run("3", **change).read("refused")
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"7\n", b"[]\n"):
        stranger = run("3", protocol="?").peer.socket
        stranger.sendall(text)
    one.join()
    two.join()
    assert grouped(one, two) == ["1", "2"]


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
    members = [Member(number, "host", str(number), 0) for number in (1, 2)]
    formed = Generation(None, 1, members, 0, 0, least, holds_rendezvous=True)
    formed.end = End(kind, "", by=2)
    if gone:
        formed.handle({"gone": 2, "generation": 1})
    assert formed.uses_restart is costs
    # The holder of the store takes all with it; another one only where too few are left.
    assert formed._kind_of_leaving() == "over"
