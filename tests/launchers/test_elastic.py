# SPDX-License-Identifier: Apache-2.0
"""The elastic engine: restarts on gloo, machines that go and come back, and what each machine says about it."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from engines import network_namespaces
from machines import Launch, free_port, is_running, until

TRAINING = Path(__file__).parents[1] / "distributed" / "workers" / "elastic_training.py"
# How many killed workers the restart test restarts.
RESTARTS = int(os.environ.get("RESTARTS", "2"))
SLEEP = "import time\nprint('asleep', flush=True)\ntime.sleep(100)\n"


@pytest.fixture
def launch(tmp_path):
    """Start `accelerate launch --engine elastic`; everything that was started is gone at the end."""
    started = []

    def start(*arguments, script, namespace="", program=()):
        path = script if isinstance(script, Path) else tmp_path / "script.py"
        if path is not script:
            path.write_text(textwrap.dedent(script))
        end = (str(tmp_path),) if script is TRAINING else ()
        if not program:
            arguments = ("--engine", "elastic", *arguments)
        started.append(
            Launch(tmp_path / "home", *arguments, path, *end, namespace=namespace, program=program)
        )
        return started[-1]

    yield start
    for one in started:
        one.__exit__()


@pytest.mark.thorough
@pytest.mark.timeout(60 + 60 * RESTARTS)
def test_killed_workers_restart_at_the_first_attempt(launch):
    """As many restarts as kills: one that needed a second attempt would end the run."""
    source = """
        import os, signal, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank, attempt, last = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["LAST"])
        total = torch.ones(1 << 16)
        for _ in range(20):
            dist.all_reduce(total.fill_(1))
        assert total.sum() == 2 << 16
        os.write(1, f"rank {rank} attempt {attempt} at {time.time()}\\n".encode())
        while attempt < last:
            if rank == attempt % 2:
                dist.all_reduce(total, async_op=True)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(total)
        dist.barrier()
        dist.destroy_process_group()
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAST", str(RESTARTS))
        run = launch("--num_processes", 2, "--max_restarts", RESTARTS, script=source)
    assert run.end(timeout=50 + 60 * RESTARTS) == 0, run.text
    began = {}
    for line in run.text.splitlines():
        if line.startswith("rank "):
            _, rank, _, attempt, *told = line.split()
            if told[0] == "at":
                began[int(rank), int(attempt)] = float(told[1])
    assert sorted(began) == [
        (rank, attempt) for rank in (0, 1) for attempt in range(RESTARTS + 1)
    ], run.text
    assert run.count("SIGKILL") == run.count("accelerate: restart") == RESTARTS
    # The victims are named, without tracebacks of theirs.
    assert "Traceback" not in run.text and run.count("  other ranks: rank ") == RESTARTS
    took = sorted(began[0, attempt + 1] - began[0, attempt] for attempt in range(RESTARTS))
    sys.stderr.write(
        f"{RESTARTS} of {RESTARTS} restarts at the first attempt, median {took[len(took) // 2]:.1f} s\n"
    )


def reference(folder):
    """The same training in plain PyTorch."""
    sys.path.insert(0, str(TRAINING.parent))
    try:
        from elastic_training import BATCH, data, model
    finally:
        sys.path.pop(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in torch.utils.data.DataLoader(data(), batch_size=BATCH):
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_dies_then_a_machine_goes_and_comes_back(launch, tmp_path):
    """Two machines with addresses of their own; the run ends where one that nothing happened to ends."""
    limit = tmp_path / "limit"
    limit.write_text("0")
    with network_namespaces() as machines:
        options = [
            "--nnodes",
            "1:2",
            "--num_processes",
            2,
            "--max_restarts",
            1,
            "--stop_timeout",
            1,
        ]
        options += ["--main_process_ip", "10.77.0.1"]
        one = launch(*options, script=TRAINING, namespace=machines[0])
        two = launch(*options, script=TRAINING, namespace=machines[1])
        # The first machine may have begun alone.
        until(lambda: one.count("of 2 begins") and two.count("of 2 begins"), one, two)
        limit.write_text("10")
        until(lambda: one.count("saved at 10 by 2"), one, two)
        two.kill_rank()
        limit.write_text("20")
        until(lambda: one.count("saved at 20 by 2"), one, two)
        assert one.count("begins at step 10") == two.count("begins at step 10") == 1, (
            one.text + two.text
        )
        # The launcher of a machine dies: its rank with it, and the other machine goes on alone.
        (rank,) = two.ranks()
        os.kill(two.process.pid, signal.SIGKILL)
        groups = one.count("1 machine in the group")
        noticed = until(lambda: one.count("gone"), one)
        assert not is_running(rank)
        left_behind = noticed + until(lambda: one.count("1 machine in the group") > groups, one)
        limit.write_text("30")
        until(lambda: one.count("saved at 30 by 1"), one)
        back = launch(*options, script=TRAINING, namespace=machines[1])
        until(lambda: one.count("2 machines in the group") == 3, one, back)
        limit.write_text("40")
        assert [one.end(), back.end()] == [0, 0], one.text + back.text
    assert one.count("restart") == two.count("restart") == 1 and back.count("restart") == 0
    assert "Traceback" not in one.text + two.text + back.text
    ended, wanted = torch.load(tmp_path / "final.pt"), reference(tmp_path)
    for name, tensor in wanted.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-12)
    sys.stderr.write(
        f"a machine gone: noticed in {noticed:.1f} s, left behind in {left_behind:.1f} s\n"
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_machine_without_network_is_left_behind(launch):
    """Nothing closes its connections: TCP's keep-alive messages notice it, on both sides."""
    with network_namespaces() as machines:
        options = ["--nnodes", "1:2", "--num_processes", 2, "--main_process_ip", "10.77.0.1"]
        one, two = (launch(*options, script=SLEEP, namespace=name) for name in machines)
        until(
            lambda: one.count("2 machines") and one.count("asleep") and two.count("asleep"),
            one,
            two,
        )
        subprocess.run(["ip", "-n", machines[1], "link", "set", "lo", "down"], check=True)
        links = subprocess.run(
            ["ip", "-n", machines[1], "-br", "link"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        (cable,) = (line.split("@")[0] for line in links.splitlines() if "@" in line)
        subprocess.run(["ip", "-n", machines[1], "link", "set", cable, "down"], check=True)
        noticed = until(lambda: one.count("gone"), one)
        assert two.end() == 1 and re.search("rendezvous.* gone", two.text)
        until(lambda: one.count("1 machine in the group"), one)
        one.process.send_signal(signal.SIGINT)
        assert one.end() == 130 and "Traceback" not in one.text + two.text
    sys.stderr.write(f"a machine without network: noticed in {noticed:.1f} s\n")


def on_two(nnodes="2", **more):
    """Options of two launches here that stand for two machines."""
    shared = ["--nnodes", nnodes, "--num_processes", 2, "--main_process_ip", "127.0.0.1"]
    shared += ["--main_process_port", free_port()]
    shared += [part for name, value in more.items() for part in (f"--{name}", value)]
    return [*shared, "--machine_rank", 0], [*shared, "--machine_rank", 1]


def test_the_first_failure_is_told_once_on_each_machine(launch, tmp_path):
    source = """
        import os, time
        if os.environ["RANK"] == "1":
            raise KeyError("the cause")
        time.sleep(100)
    """
    first, second = on_two(log_dir=tmp_path / "logs")
    one, two = launch(*first, script=source), launch(*second, script=source)
    assert [one.end(), two.end()] == [1, 1]
    assert len(list((tmp_path / "logs").glob("*/rank_1/stderr.log"))) == 1
    assert two.count("Traceback") == 1 and "rank 1 failed: KeyError: 'the cause'" in two.text
    assert (
        one.count("Traceback") == 0
        and one.count("KeyError: 'the cause'") == 1
        and "stopped by the launcher" in one.text
    )


def test_without_the_machine_that_holds_the_rendezvous_there_is_a_clear_end(launch):
    first, second = on_two(nnodes="1:2", max_restarts=3)
    one, two = launch(*first, script=SLEEP), launch(*second, script=SLEEP)
    until(lambda: one.count("asleep") and two.count("2 machines") and two.count("asleep"), one, two)
    one.process.kill()
    assert two.end() == 1
    assert re.search("rendezvous.* gone", two.text) and "Traceback" not in two.text


def test_a_machine_that_is_asked_to_end_leaves_the_others(launch):
    first, second = on_two(nnodes="1:2")
    one, two = launch(*first, script=SLEEP), launch(*second, script=SLEEP)
    until(lambda: one.count("2 machines") and one.count("asleep") and two.count("asleep"), one, two)
    two.process.terminate()
    assert two.end() == 143
    until(lambda: one.count("was ended by SIGTERM") and one.count("1 machine in the group"), one)
    one.process.send_signal(signal.SIGINT)
    assert one.end() == 130 and "Traceback" not in one.text + two.text


def test_who_is_absent_is_named(launch):
    alone = launch(*on_two(rdzv_conf="join_timeout=4")[0], script=SLEEP)
    lost = launch(*on_two(rdzv_conf="join_timeout=4")[1], script=SLEEP)
    assert (
        lost.end() == 1
        and "does not answer yet" in lost.text
        and "did not answer within 4 s" in lost.text
    )
    assert alone.end() == 1 and re.search("waiting for 2 .*2 machines", alone.text)
    assert "here: 127.0.0.1" in alone.text
    assert "gave up after 4 s (--rdzv_conf join_timeout)" in alone.text
    wrong = launch("--rdzv_conf", "join_timout=7", script=SLEEP)
    assert wrong.end() == 2 and "did you mean join_timeout" in wrong.text
    assert "Traceback" not in "".join(launched.text for launched in (alone, lost, wrong))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_on_one_of_the_machines(launch, tmp_path):
    """A rank fails on each machine in turn, and all go on together. Those of the last attempt train."""
    (tmp_path / "limit").write_text("40")
    source = f"""
        import os, runpy, sys, time
        from pathlib import Path

        if not Path({str(tmp_path)!r}, "train").exists():
            print("a rank of", os.environ["WORLD_SIZE"], "begins", flush=True)
            time.sleep(200)
        sys.argv[1:] = [{str(tmp_path)!r}]
        runpy.run_path({str(TRAINING)!r}, run_name="__main__")
    """
    with network_namespaces() as machines:
        ours = ["--nnodes", 2, "--num_processes", 2, "--rdzv_backend", "c10d", "--max_restarts", 3]
        one = launch(*ours, "--main_process_ip", "10.77.0.1", script=source, namespace=machines[0])
        links = subprocess.run(
            ["ip", "-n", machines[1], "-br", "link"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        (cable,) = (line.split("@")[0] for line in links.splitlines() if "@" in line)
        variables = [
            f"GLOO_SOCKET_IFNAME={cable}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            "ACCELERATE_USE_CPU=true",
        ]
        options = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "3",
            "--rdzv-backend",
            "c10d",
        ]
        options += ["--rdzv-id", "none"]
        options += ["--rdzv-endpoint", "10.77.0.1:29500", "--local-addr", "10.77.0.2"]
        # Each machine judges the others by its own settings; torchrun gives a sign of life every 5 s by default.
        options += ["--rdzv-conf", "is_host=false,keep_alive_interval=1"]
        command = [
            *("ip", "netns", "exec", machines[1]),
            "env",
            *variables,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
        ]
        two = launch(script=source, program=command)
        until(lambda: one.count("of 2 begins") == two.count("of 2 begins") == 1, one, two)
        one.kill_rank()
        until(lambda: one.count("of 2 begins") == two.count("of 2 begins") == 2, one, two)
        (tmp_path / "train").touch()
        two.kill_rank()
        until(lambda: one.count("of 2 begins") == two.count("of 2 begins") == 3, one, two)
        assert [one.end(), two.end()] == [0, 0], one.text + two.text
