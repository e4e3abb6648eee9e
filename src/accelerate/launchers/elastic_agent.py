# SPDX-License-Identifier: Apache-2.0
"""torch's elastic agent forms the groups of machines and restarts them; our supervisor runs the ranks of this machine.

Beside it the launchers share the store of the group: the first failure, and which machines have finished or left.
A machine that `torchrun` has started takes part in the group, and writes none of that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ..core import messages
from ..core.errors import LaunchError
from ..core.objects import counted, ranks_in_words
from ..torch_internals.elastic_agent import ElasticAgent
from ..torch_internals.rendezvous import machines
from .base import Interrupted
from .ports import Waiting, connect, interface_of, resolve_address
from .shared_store import LOOK, News, SharedStore, tcp_store
from .spec import LaunchSpec, Place, ProcessSpec
from .supervisor import Stop, Supervisor

LEFT = "accelerate/left"
LAUNCHERS = "accelerate/launchers"
FINISHED = "accelerate/finished"


class Group(SharedStore):
    """The machines of the run: torch's rendezvous, and what their launchers report to each other.

    The agent forms a new group, without using up a restart, while `num_nodes_waiting` is not 0. Here that is also so
    where a machine is lost or has left.

    Args:
        rendezvous: torch's.
        spec: the launch.
        address: this machine's.
        settings: of the rendezvous.
    """

    def __init__(
        self,
        rendezvous: RendezvousHandler,
        spec: LaunchSpec,
        address: str,
        settings: dict[str, str],
    ) -> None:
        self.where: str = f"{spec.main_process_ip}:{spec.main_process_port}"
        signs_of_life = int(settings["keep_alive_interval"]) * int(
            settings["keep_alive_max_attempt"]
        )
        self.cause_timeout: float = 3.0 + signs_of_life
        super().__init__(
            "the machine that hosts the rendezvous is lost or cannot be reached",
            self.cause_timeout + float(settings["heartbeat_timeout"]),
        )
        self.rendezvous = rendezvous
        self.address = address
        least, _, most = spec.nnodes.partition(":")
        self.min_machines: int = int(least)
        self.max_machines: int = int(most or least)
        self.interval: float = spec.monitor_interval
        self.join_timeout: str = settings["join_timeout"]
        # Why the group has to form again.
        self.change: str = ""
        self._members: dict[str, str] = {}
        self._absent_since: dict[str, float] = {}

    # What torch's agent calls.

    def __getattr__(self, name: str) -> Any:
        # Everything else of a rendezvous is that of torch's.
        return getattr(self.rendezvous, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next group that this machine is a member of."""
        self.unfollow()
        with self._reporting_wait():
            info = self.rendezvous.next_rendezvous()
        self.change = ""
        self._absent_since = {}
        self._members = {}
        present = machines(self.rendezvous)
        if present:
            self._members = present.group
        info.store.add(LAUNCHERS, 1)
        self.follow(info.store)
        return info

    def look(self, store: Store) -> News:
        """One look at the store of the group and at the rendezvous."""
        left = ""
        if store.check([LEFT]):
            left = store.get(LEFT).decode()
        try:
            waiting = self.rendezvous.num_nodes_waiting()
        except RendezvousError as error:
            raise ConnectionError(str(error)) from error
        return super().look(store)._replace(left=left, waiting=waiting)

    def num_nodes_waiting(self) -> int:
        """How many machines wait for a new group; at least 1 where a machine of this group is lost."""
        news = self.news
        if news.failure:
            # The machines that wait are those whose ranks have failed, which uses up a restart of each machine.
            return 0
        if news.waiting and not self.change:
            machines_waiting = counted(news.waiting, "more machine")
            self.change = f"{machines_waiting} to include: the group re-forms"
        if self.change:
            return max(1, news.waiting)
        return news.waiting

    @contextlib.contextmanager
    def _reporting_wait(self) -> Iterator[None]:
        """Report which machines are there while this one waits for the group."""
        done = threading.Event()

        def report() -> None:
            waiting = Waiting()
            while not done.wait(0.2):
                if waiting.is_due():
                    present = machines(self.rendezvous)
                    addresses = "not known"
                    if present:
                        addresses = ", ".join(sorted({**present.group, **present.waiting}.values()))
                    needed = f"{self.min_machines} of at most {self.max_machines}"
                    messages.show(
                        f"waiting for {needed} machines at {self.where}; here: {addresses}"
                    )

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    # What the supervisor of the ranks here calls.

    def tick(self, stop: Stop) -> None:
        """Stop the ranks here where one has failed elsewhere, or too few machines are left."""
        super().tick(stop)
        if self.news.left and not self.news.failure:
            self.change = self.news.left
        gone = sorted(self._gone())
        if gone:
            verb = "is"
            if len(gone) > 1:
                verb = "are"
            self.change = f"{' and '.join(gone)} {verb} gone"
            remaining = len(self._members) - len(gone)
            if remaining < self.min_machines:
                stop(
                    f"{self.change}: {remaining} of at least {self.min_machines} machines are left",
                    1,
                    False,
                )

    def _gone(self) -> list[str]:
        """The addresses of the members that sent no heartbeat, at two looks.

        One that restarts its ranks is absent between two messages.
        """
        present = machines(self.rendezvous)
        if present is None:
            return []
        now = time.monotonic()
        absent = self._members.keys() - present.group.keys() - present.waiting.keys()
        self._absent_since = {node: self._absent_since.get(node, now) for node in absent}
        return [
            self._members[node]
            for node, since in self._absent_since.items()
            if now - since >= 2 * LOOK
        ]

    def interrupted(self, name: str, code: int) -> None:
        """Report that this machine leaves the group, because of a signal."""
        assert self.store is not None
        if self.is_reachable:
            with contextlib.suppress(RuntimeError):
                self.store.set(LEFT, f"{self.address} was ended by {name}")

    def all_finished(self, now: int) -> bool:
        """Whether the ranks of all launchers of the group have ended without an error. `now`: those that just have."""
        assert self.store is not None
        return bool(self.store.add(FINISHED, now) >= self.store.add(LAUNCHERS, 0))


class Agent(ElasticAgent):
    """torch's agent, whose ranks our supervisor starts, watches and stops. `code` is that of the last attempt."""

    def __init__(self, launch: LaunchSpec, group: Group) -> None:
        # torch sleeps for its interval between two looks; ours waits for output and for the ends of ranks.
        super().__init__(
            WorkerSpec(
                role=launch.role,
                local_world_size=launch.local_processes,
                rdzv_handler=cast(RendezvousHandler, group),
                entrypoint=launch.program.name,
                max_restarts=launch.max_restarts,
                monitor_interval=1e-3,
            )
        )
        self.launch = launch
        self.group = group
        self.ranks: Supervisor | None = None
        self.restarts: int = 0
        self.code: int = 0
        self._has_finished = False

    def start_ranks(self, workers: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this machine."""
        processes = _processes(self.launch, workers, self.restarts)
        if self.group.max_machines > 1:
            count = workers.group_world_size or 1
            ranks = ranks_in_words([process.rank for process in processes])
            messages.show(
                f"{counted(count, 'machine')} in the group, here {ranks} of {workers.workers[0].world_size}"
            )
        self._has_finished = False
        self.ranks = Supervisor(self.launch, self.group)
        self.ranks.start(processes)
        return {rank.spec.local_rank: rank.popen.pid for rank in self.ranks.ranks}

    def check_ranks(self, workers: WorkerGroup) -> RunResult:
        """What has become of the ranks, after a short wait."""
        if self.ranks is not None:
            if self.ranks.is_running:
                self.ranks.step(self.launch.monitor_interval)
            if self.ranks.is_running:
                return RunResult(state=WorkerState.HEALTHY)
            self._finish()
        if self.code:
            if self.restarts < self.launch.max_restarts:
                self.restarts += 1
                messages.show(f"restart {self.restarts} of {self.launch.max_restarts}")
            return RunResult(state=WorkerState.FAILED)
        newly_finished = int(not self._has_finished)
        self._has_finished = True
        if self.group.all_finished(newly_finished):
            values = {worker.global_rank: None for worker in workers.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        # The ranks of another machine still run, and may fail.
        time.sleep(LOOK)
        self.group.tick(self._fail)
        return RunResult(state=WorkerState.HEALTHY)

    def _fail(self, reason: str, code: int, final: bool) -> None:
        messages.show(reason)
        self.code = code

    def _finish(self) -> None:
        """Show the end of the ranks. Interrupted where a signal has caused it."""
        assert self.ranks is not None
        ranks, self.ranks = self.ranks, None
        self.code = ranks.finish()
        if ranks.interrupted is not None:
            raise Interrupted(ranks.interrupted)
        if self.group.is_lost:
            raise LaunchError(lost(self.group.where))

    def stop_ranks(self) -> None:
        """Stop the ranks of this machine, and wait for their end."""
        if self.ranks is not None:
            self.ranks.stop(self.group.change or "the launcher ends")
            self._finish()


def _processes(launch: LaunchSpec, group: WorkerGroup, restarts: int) -> list[ProcessSpec]:
    """The processes of a group on this machine, with the variables that torch's own agent sets."""
    assert group.group_rank is not None and group.group_world_size is not None
    assert group.master_addr is not None and group.master_port is not None
    local, processes = len(group.workers), []
    for worker in group.workers:
        position = Place(
            worker.global_rank,
            worker.local_rank,
            local,
            group.group_rank,
            group.group_world_size,
            group.master_addr,
            group.master_port,
        )
        variables = launch._replace(num_processes=worker.world_size).variables_at(
            position, restarts
        )
        variables.update(
            TORCHELASTIC_RUN_ID=group.spec.rdzv_handler.get_run_id(),
            TORCHELASTIC_RESTART_COUNT=str(restarts),
            TORCHELASTIC_MAX_RESTARTS=str(launch.max_restarts),
            TORCHELASTIC_USE_AGENT_STORE=str(group.spec.rdzv_handler.use_agent_store),
            ROLE_NAME=launch.role,
            ROLE_RANK=str(worker.role_rank),
            ROLE_WORLD_SIZE=str(worker.role_world_size),
        )
        cpus = launch.cpus_of(worker.local_rank)
        processes.append(
            ProcessSpec(
                worker.global_rank, worker.local_rank, tuple(launch.program.argv()), variables, cpus
            )
        )
    return processes


def lost(where: str) -> str:
    """The message for the loss of the rendezvous."""
    return (
        f"the machine at {where}, which hosts the rendezvous, is gone or cannot be reached. The "
        "run cannot continue without it: restart all machines, there or with another "
        "--main_process_ip. The checkpoints are untouched"
    )


def open_rendezvous(spec: LaunchSpec, address: str, settings: dict[str, str]) -> RendezvousHandler:
    """Open the rendezvous of a launch.

    The machine with the address `main_process_ip` hosts the store of c10d; the others wait until it answers.

    Raises:
        LaunchError: the rendezvous cannot be reached in time, or its backend cannot be used.
    """
    least, _, most = spec.nnodes.partition(":")
    endpoint = f"{spec.main_process_ip}:{spec.main_process_port}"
    backend = spec.rdzv_backend
    if backend == "static":
        backend = "c10d"
    parameters = RendezvousParameters(
        backend,
        endpoint,
        spec.rdzv_id,
        int(least),
        int(most or least),
        local_addr=address,
        **settings,
    )
    try:
        if backend != "c10d":
            return get_rendezvous_handler(parameters)
        store = _open_store(spec, parameters)
        return create_handler(store, C10dRendezvousBackend(store, spec.rdzv_id), parameters)
    except (RendezvousError, DistError, ImportError, ValueError) as error:
        raise LaunchError(
            f"the rendezvous at {endpoint} (--rdzv_backend {backend}) cannot be used: {error.__cause__ or error}"
        ) from error


def _open_store(spec: LaunchSpec, parameters: RendezvousParameters) -> Store:
    """The store of c10d's rendezvous, hosted here where this machine is the one to meet at."""
    host, port = spec.main_process_ip, spec.main_process_port
    timeout = float(parameters.get("read_timeout"))
    is_host = parameters.get_as_bool("is_host")
    if is_host is not None:
        return tcp_store(host, port, is_host, timeout)
    main = resolve_address(host)
    is_local = main in ("127.0.0.1", "::1")
    if interface_of(main) is not None and not (spec.machine_rank and is_local):
        # Another launch of this machine may host it already.
        with contextlib.suppress(DistError):
            return tcp_store(host, port, True, timeout)
    connect(host, port, float(parameters.get("join_timeout"))).close()
    return tcp_store(host, port, False, timeout)


def run_agent(spec: LaunchSpec, address: str, settings: dict[str, str]) -> int:
    """Run this machine's share of an elastic launch. Returns the exit code."""
    group = Group(open_rendezvous(spec, address, settings), spec, address, settings)
    agent = Agent(spec, group)
    try:
        agent.run()
    except RendezvousClosedError:
        if not agent.code:
            raise LaunchError(
                f"the run {spec.rdzv_id!r} at {group.where} has ended: there is nothing to join"
            ) from None
    except RendezvousTimeoutError:
        raise LaunchError(
            f"gave up after {group.join_timeout} s (--rdzv_conf join_timeout) waiting for {group.min_machines} "
            f"machines at {group.where}"
        ) from None
    except (RendezvousError, DistError) as error:
        raise LaunchError(f"{lost(group.where)} ({error.__cause__ or error})") from error
    finally:
        group.unfollow()
    # It ends the run for all: the others go on without a machine that is interrupted.
    group.shutdown()
    return agent.code
