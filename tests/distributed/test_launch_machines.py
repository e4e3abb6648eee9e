# SPDX-License-Identifier: Apache-2.0
"""Several machines: launchers meet, disagree, miss one another, and stop together. Two launches here stand for two."""

import socket
import textwrap
import time

import pytest
from engines import network_namespaces
from machines import clean_environment, free_port, start_launcher


@pytest.fixture
def machines(tmp_path):
    """Launch a script once a machine; (code, output, errors) of each. `each` holds a machine's own options."""

    def run(source, each, *options, timeout=60, namespaces=("", "")):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        env = clean_environment(tmp_path / "home")
        started, files = [], []
        for number, (own, name) in enumerate(zip(each, namespaces, strict=False)):
            streams = [tmp_path / f"{number}.{name}" for name in ("out", "err")]
            with streams[0].open("w") as out, streams[1].open("w") as err:
                process = start_launcher(
                    *options, *own, script, env=env, stdout=out, stderr=err, namespace=name
                )
            started.append(process)
            files.append(streams)
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
        return [
            (code, *(file.read_text() for file in streams))
            for code, streams in zip(codes, files, strict=True)
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
    assert "rank 3 failed: KeyError: 'the cause'" in errors and "Traceback" not in errors
    assert f"host {socket.gethostname()}, pid " in errors
    assert (
        "rank 3 failed: KeyError: 'the cause'" in other_errors
        and other_errors.count("Traceback") == 1
    )


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (["--num_processes", "2"], ["--num_processes", "4"], "has --num_processes 4, but machine 0"),
        (["--num_processes", "2"], ["--num_processes", "3", "--num_machines", "3"], "has --num_machines 3"),
        (*(["--num_processes", "3", "--num_machines", "3"],) * 2, "two machines"),
    ],
)  # fmt: skip
def test_machines_that_disagree_are_told_so_on_each(machines, meeting, first, second, told):
    each = [[*RANKS[0], *first], [*RANKS[1], *second]]
    if told == "two machines":
        each.append(each[1])
    for code, _, errors in machines(REPORT, each, *meeting, namespaces=("", "", "")):
        assert code == 2 and told in errors and "Traceback" not in errors


@pytest.mark.parametrize(("machine", "missing"), [(0, "machine 1 of 2"), (1, "127.0.0.1:")])
def test_a_machine_that_never_comes_is_named_at_the_limit(machines, meeting, machine, missing):
    options = [*meeting, "--num_processes", "2", "--rdzv_conf", "join_timeout=1"]
    ((code, output, errors),) = machines(REPORT, [RANKS[machine]], *options)
    assert code == 1 and not output
    assert errors.count("accelerate: error:") == 1 and missing in errors and "1 s" in errors
    assert "Traceback" not in errors


def test_an_address_that_nobody_has(machines, meeting):
    options = [*meeting, "--num_processes", "2", "--main_process_ip", "no.such.host.invalid"]
    ((code, _, errors),) = machines(REPORT, [RANKS[1]], *options)
    assert code == 2 and "does not resolve" in errors


@pytest.mark.parametrize("machine", [0, 1])
def test_a_launcher_that_is_killed_ends_the_run(machines, meeting, machine, tmp_path):
    """Its ranks die with it; the other machine names it, and is not restarted."""
    source = f"""
    import os, signal, time
    from pathlib import Path

    folder = Path({str(tmp_path)!r})
    (folder / os.environ["RANK"]).touch()
    while not ((folder / "0").exists() and (folder / "1").exists()):
        time.sleep(0.01)
    if os.environ["RANK"] == "{machine}":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)
    """
    told = machines(source, RANKS, *meeting, "--num_processes", "2", "--max_restarts", "3")
    assert told[machine][0] == -9
    code, _, errors = told[1 - machine]
    assert code == 1 and f"machine {machine} " in errors and "lost" in errors, errors
    assert "Traceback" not in errors and "restart" not in errors


def test_a_machine_that_has_finished_takes_part_in_a_restart(machines, meeting):
    source = """
    import os, time
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1)
        raise KeyError("the cause")
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    """
    told = machines(source, RANKS, *meeting, "--num_processes", "2", "--max_restarts", "1")
    assert [code for code, _, _ in told] == [0, 0], told
    assert told[0][1] == "attempt 0\nattempt 1\n" and told[1][1] == "attempt 1\n"
    assert "KeyError: 'the cause'" in told[0][2]


def test_a_signal_ends_the_run_on_all_machines(machines, meeting):
    source = """
    import os, signal, time
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(100)
    """
    told = machines(source, RANKS, *meeting, "--num_processes", "2", "--max_restarts", "3")
    assert [code for code, _, _ in told] == [130, 130], told
    assert "machine 0 " in told[1][2] and "SIGINT" in told[1][2] and "restart" not in told[1][2]


@pytest.fixture
def namespaces():
    with network_namespaces() as names:
        yield names


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
    told = machines(source, RANKS, *options, timeout=120, namespaces=namespaces)
    assert [(code, output.strip()) for code, output, _ in told] == [
        (0, "0 3.0 a"),
        (0, "1 3.0 b"),
    ], told
