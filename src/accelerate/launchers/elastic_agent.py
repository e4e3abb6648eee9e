# SPDX-License-Identifier: Apache-2.0
"""torch's elastic agent forms the groups of machines and restarts them; our supervisor runs the ranks of this machine.

Beside it the launchers share the store of the group: the first failure, and which machines have finished or left.
A machine that `torchrun` has started takes part in the group, and writes none of that.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from signal import Signals
from typing import Any, NamedTuple, cast

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ..core import messages
from ..core.errors import LaunchError
from ..torch_internals.rendezvous import machines
from .base import Interrupted
from .ports import interface_of, resolve_address
from .spec import LaunchSpec, Place, ProcessSpec
from .supervisor import OtherMachines, Stop, Supervisor
from .waiting import Waiting, connect

# Seconds between two looks at the store of the group. A machine that is absent for two counts as lost: one that
# restarts its ranks is absent between two messages.
LOOK = 0.25
FAILURE, LEFT, LAUNCHERS, FINISHED = (
    f"accelerate/{name}" for name in ("failure", "left", "launchers", "finished")
)


class News(NamedTuple):
    """What the launchers share: the report and code of the first failure, who has left, how many machines wait."""

    failure: tuple[str, int] | None = None
    left: str = ""
    waiting: int = 0


class Group(OtherMachines):
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
        self.rendezvous = rendezvous
        self.address = address
        self.where: str = f"{spec.main_process_ip}:{spec.main_process_port}"
        least, _, most = spec.nnodes.partition(":")
        self.min_machines: int = int(least)
        self.max_machines: int = int(most or least)
        self.cause_timeout: float = 3.0 + int(settings["keep_alive_interval"]) * int(
            settings["keep_alive_max_attempt"]
        )
        self.interval: float = spec.monitor_interval
        self.join_timeout: str = settings["join_timeout"]
        # Why the group has to form again, and whether the rendezvous itself is lost.
        self.change: str = ""
        self.is_lost: bool = False
        self.store: Store | None = None
        self._members: dict[str, str] = {}
        self._absent_since: dict[str, float] = {}
        # A thread looks at the store, because a call does not return while the network is down.
        self.watching: threading.Event = threading.Event()
        self._news = News()
        self._news_at = 0.0
        # Seconds without news after which the rendezvous is lost.
        self._patience = self.cause_timeout + float(settings["heartbeat_timeout"])

    # What torch's agent calls.

    def __getattr__(self, name: str) -> Any:
        # Everything else of a rendezvous is that of torch's.
        return getattr(self.rendezvous, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next group that this machine is a member of."""
        self.watching.set()
        with self._reporting_wait():
            info = self.rendezvous.next_rendezvous()
        self.change, self._absent_since = "", {}
        known = machines(self.rendezvous)
        self._members = known.group if known else {}
        self.store = info.store
        info.store.add(LAUNCHERS, 1)
        self._news, self._news_at, self.watching = News(), time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, args=(info.store, self.watching), daemon=True).start()
        return info

    def _watch(self, store: Store, ended: threading.Event) -> None:
        """Follow what the launchers of a group share, until the group ends or its store is lost."""
        while not ended.wait(LOOK):
            try:
                if store.check([FAILURE]):
                    failure = json.loads(store.get(FAILURE))
                else:
                    failure = None
                left = store.get(LEFT).decode() if store.check([LEFT]) else ""
                waiting = self.rendezvous.num_nodes_waiting()
            except (RuntimeError, RendezvousError):
                self.is_lost = not ended.is_set()
                return
            if not ended.is_set():
                self._news, self._news_at = News(failure, left, waiting), time.monotonic()

    def num_nodes_waiting(self) -> int:
        """How many machines wait for a new group; at least 1 where a machine of this group is lost."""
        news = self._news
        if news.failure:
            # The machines that wait are those whose ranks have failed, which uses up a restart of each machine.
            return 0
        if news.waiting and not self.change:
            plural = "s" if news.waiting > 1 else ""
            self.change = f"{news.waiting} more machine{plural} to include: the group forms again"
        return news.waiting or int(bool(self.change))

    @contextlib.contextmanager
    def _reporting_wait(self) -> Iterator[None]:
        """Report which machines are there while this one waits for the group."""
        done = threading.Event()

        def report() -> None:
            waiting = Waiting()
            while not done.wait(0.2):
                if waiting.is_due():
                    known = machines(self.rendezvous)
                    if known:
                        here = ", ".join(sorted({**known.group, **known.waiting}.values()))
                    else:
                        here = "not known"
                    needed = f"{self.min_machines} of at most {self.max_machines}"
                    messages.show(f"waiting for {needed} machines at {self.where}; here: {here}")

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
        if time.monotonic() - self._news_at > self._patience:
            self.is_lost = True
        news = self._news
        if self.is_lost:
            stop("the machine that holds the rendezvous is lost or cannot be reached", 1, True)
        elif news.failure:
            stop(*news.failure, False)
        elif news.left:
            self.change = news.left
        gone = self._gone()
        if gone:
            names = " and ".join(sorted(gone))
            self.change = f"{names} {'are' if len(gone) > 1 else 'is'} gone"
            remaining = len(self._members) - len(gone)
            if remaining < self.min_machines:
                stop(
                    f"{self.change}: {remaining} of at least {self.min_machines} machines are left",
                    1,
                    False,
                )

    def _gone(self) -> list[str]:
        """The addresses of the members that give no sign of life."""
        known, now = machines(self.rendezvous), time.monotonic()
        if known is None:
            return []
        absent = self._members.keys() - known.group.keys() - known.waiting.keys()
        self._absent_since = {node: self._absent_since.get(node, now) for node in absent}
        return [
            self._members[node]
            for node, since in self._absent_since.items()
            if now - since >= 2 * LOOK
        ]

    def failed(self, report: str, code: int) -> None:
        """Report a failure here to the other machines, unless one has reported another before."""
        assert self.store is not None
        with contextlib.suppress(RuntimeError):
            if not self.store.check([FAILURE]):
                self.store.set(FAILURE, json.dumps([report, code]))

    def interrupted(self, name: str, code: int) -> None:
        """Report that this machine leaves the group, because of a signal."""
        assert self.store is not None
        if time.monotonic() - self._news_at > 8 * LOOK:
            return  # the network is down
        with contextlib.suppress(RuntimeError):
            self.store.set(LEFT, f"{self.address} was ended by {name}")

    def all_finished(self, now: int) -> bool:
        """Whether the ranks of all launchers of the group have ended without an error. `now`: those that just have."""
        assert self.store is not None
        return bool(self.store.add(FINISHED, now) >= self.store.add(LAUNCHERS, 0))


class Agent(SimpleElasticAgent):
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

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        processes = _processes(self.launch, worker_group, self.restarts)
        if self.group.max_machines > 1:
            count, workers = worker_group.group_world_size or 1, worker_group.workers
            first, last = workers[0].global_rank, workers[-1].global_rank
            if last == first:
                ranks = f"rank {first}"
            else:
                ranks = f"ranks {first} to {last}"
            machines_here = f"{count} machine{'s' if count > 1 else ''} in the group"
            messages.show(f"{machines_here}, here {ranks} of {workers[0].world_size}")
        self._has_finished = False
        self.ranks = Supervisor(self.launch, self.group)
        self.ranks.start(processes)
        return {rank.spec.local_rank: rank.popen.pid for rank in self.ranks.ranks}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
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
        has_finished, self._has_finished = self._has_finished, True
        if self.group.all_finished(0 if has_finished else 1):
            values = {worker.global_rank: None for worker in worker_group.workers}
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

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: Signals = Signals.SIGTERM, timeout: int = 30) -> None:
        if self.ranks is not None:
            self.ranks.stop(self.group.change or "the launcher ends")
            self._finish()


def _processes(launch: LaunchSpec, group: WorkerGroup, restarts: int) -> list[ProcessSpec]:
    """The processes of a group on this machine, with the variables that torch's own agent sets."""
    assert group.group_rank is not None and group.group_world_size is not None
    assert group.master_addr is not None and group.master_port is not None
    local, processes = len(group.workers), []
    for worker in group.workers:
        place = Place(
            worker.global_rank, worker.local_rank, local, group.group_rank, group.group_world_size,
            group.master_addr, group.master_port,
        )  # fmt: skip
        variables = launch._replace(num_processes=worker.world_size).variables_at(place, restarts)
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
        f"the machine at {where}, which holds the rendezvous, is gone or cannot be reached. No machine can continue "
        "without it: start all of them again, there or with another --main_process_ip; the checkpoints are untouched"
    )


def open_rendezvous(spec: LaunchSpec, address: str, settings: dict[str, str]) -> RendezvousHandler:
    """Open the rendezvous of a launch.

    The machine with the address `main_process_ip` hosts the store of c10d; the others wait until it answers.

    Raises:
        LaunchError: the rendezvous cannot be reached in time, or its backend cannot be used.
    """
    least, _, most = spec.nnodes.partition(":")
    endpoint = f"{spec.main_process_ip}:{spec.main_process_port}"
    if spec.rdzv_backend == "static":
        backend = "c10d"
    else:
        backend = spec.rdzv_backend

    def create(**more: str) -> RendezvousHandler:
        parameters = {**settings, **more}
        return get_rendezvous_handler(
            RendezvousParameters(
                backend,
                endpoint,
                spec.rdzv_id,
                int(least),
                int(most or least),
                local_addr=address,
                **parameters,
            )
        )

    try:
        if backend != "c10d" or settings.get("is_host"):
            return create()
        main = resolve_address(spec.main_process_ip)
        if interface_of(main) is not None and not (
            spec.machine_rank and main in ("127.0.0.1", "::1")
        ):
            # Another launch of this machine may host it already.
            with contextlib.suppress(RendezvousConnectionError):
                return create(is_host="true")
        connect(
            spec.main_process_ip, spec.main_process_port, float(settings["join_timeout"])
        ).close()
        return create(is_host="false")
    except (RendezvousError, ImportError, ValueError) as error:
        raise LaunchError(
            f"the rendezvous at {endpoint} (--rdzv_backend {backend}) cannot be used: {error.__cause__ or error}"
        ) from error


def run_agent(spec: LaunchSpec, address: str, settings: dict[str, str]) -> int:
    """Run this machine's share of an elastic launch. Returns the exit code."""
    group = Group(open_rendezvous(spec, address, settings), spec, address, settings)
    agent = Agent(spec, group)
    try:
        agent.run()
    except RendezvousClosedError:
        if not agent.code:
            raise LaunchError(
                f"the run {spec.rdzv_id!r} at {group.where} is over: there is nothing to join"
            ) from None
    except RendezvousTimeoutError:
        raise LaunchError(
            f"gave up after {group.join_timeout} s (--rdzv_conf join_timeout) waiting for {group.min_machines} "
            f"machines at {group.where}"
        ) from None
    except (RendezvousError, DistError) as error:
        raise LaunchError(f"{lost(group.where)} ({error.__cause__ or error})") from error
    finally:
        group.watching.set()
    # It ends the run for all: the others go on without a machine that is interrupted.
    group.shutdown()
    return agent.code
