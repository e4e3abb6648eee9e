# SPDX-License-Identifier: Apache-2.0
"""Several machines: launchers meet, disagree, miss one another, and stop together. Two launches here stand for two."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
from engines import network_namespaces
from machines import LAUNCH, clean_environment, free_port


@pytest.fixture
def machines(tmp_path):
    """Launch a script once a machine; (code, output, errors) of each. `each` holds a machine's own options."""

    def run(source, each, *options, timeout=60, prefixes=((), ())):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        env = clean_environment(tmp_path / "home")
        started = [
            subprocess.Popen(
                [*prefix, *LAUNCH, *options, *own, str(script)],
                env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for own, prefix in zip(each, prefixes, strict=False)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=timeout) for process in started]
        return [
            (process.returncode, *output) for process, output in zip(started, outputs, strict=True)
        ]

    return run


@pytest.fixture
def meeting():
    """Options that all machines of a test share."""
    port = free_port()
    return [
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(port),
    ]


RANKS = (["--machine_rank", "0"], ["--machine_rank", "1"])
REPORT = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"


def test_ranks_count_over_both_machines(machines, meeting):
    told = machines(REPORT, RANKS, *meeting, "--num_processes", "4")
    assert [code for code, _, _ in told] == [0, 0], told
    assert sorted(told[0][1].splitlines()) == ["0 0 4 127.0.0.1", "1 1 4 127.0.0.1"]
    assert sorted(told[1][1].splitlines()) == ["2 0 4 127.0.0.1", "3 1 4 127.0.0.1"]


def test_a_failure_on_one_machine_stops_both(machines, meeting):
    source = """
    import os, time
    if os.environ["RANK"] == "3":
        raise KeyError("the cause")
    time.sleep(50)
    """
    began = time.monotonic()
    (code, _, errors), (other_code, _, other_errors) = machines(
        source, RANKS, *meeting, "--num_processes", "4"
    )
    assert time.monotonic() - began < 40
    assert code == other_code == 1
    assert "rank 3 on" in errors and "KeyError: 'the cause'" in errors and "Traceback" not in errors
    assert (
        "rank 3 failed: KeyError: 'the cause'" in other_errors
        and other_errors.count("Traceback") == 1
    )


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (["--num_processes", "2"], ["--num_processes", "4"], "has --num_processes 4, machine 0"),
        (["--num_processes", "2"], ["--num_processes", "3", "--num_machines", "3"], "has --num_machines 3"),
        (*(["--num_processes", "3", "--num_machines", "3"],) * 2, "two machines"),
    ],
)  # fmt: skip
def test_machines_that_disagree_are_told_so_on_each(machines, meeting, first, second, told):
    each = [[*RANKS[0], *first], [*RANKS[1], *second]]
    if told == "two machines":
        each.append(each[1])
    for code, _, errors in machines(REPORT, each, *meeting, prefixes=((), (), ())):
        assert code == 2 and told in errors and "Traceback" not in errors


def test_launchers_that_cannot_connect_start_their_ranks(machines, meeting):
    """The ranks then find each other, or not, at MASTER_ADDR and MASTER_PORT."""
    options = [*meeting, "--num_processes", "2", "--rdzv_conf", "join_timeout=1"]
    for own, told in (
        (RANKS[0], "machine 1 of 2 did not connect"),
        (RANKS[1], "no connection to the launcher of"),
    ):
        ((code, output, errors),) = machines(REPORT, [own], *options)
        assert (
            code == 0
            and told in errors
            and output == f"{own[1]} 0 2 127.0.0.1\n"
            and "Traceback" not in errors
        )
    ((code, _, errors),) = machines(
        REPORT, [RANKS[1]], *options, "--main_process_ip", "no.such.host.invalid"
    )
    assert code == 2 and "does not resolve" in errors


def test_ranks_of_another_program_take_part(machines, meeting, tmp_path):
    """The other machine has no launcher: its rank is started with torch's variables."""
    source = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(dist.get_rank(), total.item())
    dist.barrier()
    dist.destroy_process_group()
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": meeting[-1],
    }
    other = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    ((code, output, errors),) = machines(source, RANKS[:1], *meeting, "--num_processes", "2")
    assert (code, output) == (0, "0 2.0\n") and "not a launcher" in errors, errors
    assert other.communicate(timeout=60)[0] == "1 2.0\n"


@pytest.fixture
def namespaces():
    with network_namespaces() as prefixes:
        yield prefixes


@pytest.mark.slow
def test_two_machines_with_addresses_of_their_own(machines, namespaces):
    source = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print(dist.get_rank(), total.item(), os.environ["GLOO_SOCKET_IFNAME"][-1])
    dist.barrier()
    dist.destroy_process_group()
    """
    options = [
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--main_process_ip",
        "10.77.0.1",
        "--main_process_port",
        "29500",
    ]
    told = machines(source, RANKS, *options, timeout=120, prefixes=namespaces)
    assert [(code, output.strip()) for code, output, _ in told] == [
        (0, "0 3.0 a"),
        (0, "1 3.0 b"),
    ], told
