# SPDX-License-Identifier: Apache-2.0
"""The elastic engine: restarts on gloo, machines that go and come back, and what each machine says about it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from engines import network_namespaces
from machines import Launch, children, free_port, is_running, until

TRAINING = Path(__file__).parent / "workers" / "elastic_training.py"
# How many killed workers the restart test restarts.
RESTARTS = int(os.environ.get("RESTARTS", "2"))
SLEEP = "import time\nprint('asleep', flush=True)\ntime.sleep(100)\n"


@pytest.fixture
def launch(tmp_path):
    """Start `accelerate launch --engine elastic`; everything that was started is gone at the end."""
    started = []

    def start(*arguments, script, prefix=()):
        path = script if isinstance(script, Path) else tmp_path / "script.py"
        if path is not script:
            path.write_text(textwrap.dedent(script))
        end = (str(tmp_path),) if script is TRAINING else ()
        started.append(Launch(tmp_path / "home", "--engine", "elastic", *arguments, path, *end, prefix=prefix))
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
    assert sorted(began) == [(rank, attempt) for rank in (0, 1) for attempt in range(RESTARTS + 1)], run.text
    assert run.count("SIGKILL") == run.count("accelerate launch: restart") == RESTARTS
    # The victims are named, without tracebacks of theirs.
    assert "Traceback" not in run.text and run.count("  other ranks: rank ") == RESTARTS
    took = sorted(began[0, attempt + 1] - began[0, attempt] for attempt in range(RESTARTS))
    sys.stderr.write(f"{RESTARTS} of {RESTARTS} restarts at the first attempt, median {took[len(took) // 2]:.1f} s\n")


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
        options = ["--nnodes", "1:2", "--num_processes", 2, "--max_restarts", 1, "--stop_timeout", 1]
        options += ["--main_process_ip", "10.77.0.1"]
        one = launch(*options, script=TRAINING, prefix=machines[0])
        two = launch(*options, script=TRAINING, prefix=machines[1])
        # The first machine may have begun alone.
        until(lambda: one.count("of 2 begins") and two.count("of 2 begins"), one, two)
        limit.write_text("10")
        until(lambda: one.count("saved at 10 by 2"), one, two)
        two.kill_rank()
        limit.write_text("20")
        until(lambda: one.count("saved at 20 by 2"), one, two)
        assert one.count("begins at step 10") == two.count("begins at step 10") == 1, one.text + two.text
        # The launcher of a machine dies: its rank with it, and the other machine goes on alone.
        (rank,) = two.ranks()
        os.kill(two.process.pid, signal.SIGKILL)
        groups = one.count("1 machine in the group")
        noticed = until(lambda: one.count("gone"), one)
        assert not is_running(rank)
        left_behind = noticed + until(lambda: one.count("1 machine in the group") > groups, one)
        limit.write_text("30")
        until(lambda: one.count("saved at 30 by 1"), one)
        back = launch(*options, script=TRAINING, prefix=machines[1])
        until(lambda: one.count("2 machines in the group") == 3, one, back)
        limit.write_text("40")
        assert [one.end(), back.end()] == [0, 0], one.text + back.text
    assert one.count("restart") == two.count("restart") == 1 and back.count("restart") == 0
    assert "Traceback" not in one.text + two.text + back.text
    ended, wanted = torch.load(tmp_path / "final.pt"), reference(tmp_path)
    for name, tensor in wanted.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-12)
    sys.stderr.write(f"a machine gone: noticed in {noticed:.1f} s, left behind in {left_behind:.1f} s\n")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_machine_without_network_is_left_behind(launch):
    """Nothing closes its connections: TCP's keep-alive messages notice it, on both sides."""
    with network_namespaces() as machines:
        options = ["--nnodes", "1:2", "--num_processes", 2, "--main_process_ip", "10.77.0.1"]
        one, two = (launch(*options, script=SLEEP, prefix=prefix) for prefix in machines)
        until(lambda: one.count("2 machines") and one.count("asleep") and two.count("asleep"), one, two)
        subprocess.run([*machines[1], "ip", "link", "set", "lo", "down"], check=True)
        links = subprocess.run([*machines[1], "ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
        (cable,) = (line.split("@")[0] for line in links.splitlines() if "@" in line)
        subprocess.run([*machines[1], "ip", "link", "set", cable, "down"], check=True)
        noticed = until(lambda: one.count("gone"), one)
        assert two.end() == 1 and "which holds the rendezvous, is gone" in two.text
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
    assert "which holds the rendezvous, is gone" in two.text and "Traceback" not in two.text


def test_a_machine_that_is_asked_to_end_leaves_the_others(launch):
    first, second = on_two(nnodes="1:2")
    one, two = launch(*first, script=SLEEP), launch(*second, script=SLEEP)
    until(lambda: one.count("2 machines") and one.count("asleep") and two.count("asleep"), one, two)
    two.process.terminate()
    assert two.end() == 143
    until(lambda: one.count("was ended by SIGTERM") and one.count("1 machine in the group"), one)
    one.process.send_signal(signal.SIGINT)
    assert one.end() == 130 and "Traceback" not in one.text + two.text


def test_who_is_absent_or_disagrees_is_named(launch):
    first, second = on_two()
    one = launch(*first, script=SLEEP)
    alone = launch(*on_two(rdzv_conf="join_timeout=4")[0], script=SLEEP)
    lost = launch(*on_two(rdzv_conf="join_timeout=4")[1], script=SLEEP)
    assert lost.end() == 1 and "does not answer yet" in lost.text and "did not answer within 4 s" in lost.text
    other = launch(*second, "--num_processes", 4, script=SLEEP)
    until(lambda: one.count("refused: ") and one.count("waiting for 1 more machine"), one, other)
    assert other.end() == 2 and "was started with --num_processes 4" in other.text and "--num_processes 4" in one.text
    one.process.send_signal(signal.SIGINT)
    assert one.end() == 130
    assert alone.end() == 1 and "gave up after 4 s (--rdzv_conf join_timeout) waiting for 1 more" in alone.text
    wrong = launch(*first, "--rdzv_conf", "join_timout=7", script=SLEEP)
    assert wrong.end() == 2 and "did you mean join_timeout" in wrong.text
    static = launch(*first, "--engine", "static", script=SLEEP)
    until(lambda: static.count("waiting for machine 1 of 2"), static)
    mixed = launch(*second, script=SLEEP)
    assert mixed.end() == static.end() == 2
    assert all("was started with --engine elastic" in launched.text for launched in (mixed, static))
    assert "Traceback" not in "".join(launched.text for launched in (one, alone, lost, other, wrong, static, mixed))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_the_agent_of_torch_does_not_notice_a_failure_elsewhere(tmp_path):
    """Why this engine has its own supervision; when this fails, the agent of torch may replace it."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(
        "import os, time\nif os.environ['HOST'] == 'false':\n    raise KeyError('the cause')\ntime.sleep(100)\n"
    )
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    nodes = [
        subprocess.Popen(
            [*command, "--rdzv-conf", f"is_host={host}", str(script)],
            env={**os.environ, "HOST": host}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for host in ("true", "false")
    ]  # fmt: skip
    try:
        _, errors = nodes[1].communicate(timeout=120)
        assert nodes[1].returncode == 1 and "the cause" in errors
        with pytest.raises(subprocess.TimeoutExpired):
            nodes[0].wait(15)
    finally:
        for node in nodes:
            for child in children(node.pid):
                os.kill(child, signal.SIGKILL)
            node.kill()
            node.wait()
            node.stderr.close()
