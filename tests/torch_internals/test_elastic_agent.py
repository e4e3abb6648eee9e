# SPDX-License-Identifier: Apache-2.0
"""torch's elastic agent, whose ranks a subclass starts and watches."""

from __future__ import annotations

from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from accelerate.torch_internals.elastic_agent import ElasticAgent


class Agent(ElasticAgent):
    """Has "ranks" that fail once."""

    started = 0
    stopped = 0

    def start_ranks(self, workers: WorkerGroup) -> dict[int, Any]:
        self.started += 1
        return {worker.local_rank: worker.local_rank for worker in workers.workers}

    def check_ranks(self, workers: WorkerGroup) -> RunResult:
        if self.started == 1:
            return RunResult(state=WorkerState.FAILED)
        values = {worker.global_rank: None for worker in workers.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def stop_ranks(self) -> None:
        self.stopped += 1


def test_agent_calls_the_methods_of_a_subclass() -> None:
    store = HashStore()
    backend = C10dRendezvousBackend(store, "run")
    handler = DynamicRendezvousHandler.from_backend(
        "run", store, backend, 1, 1, local_addr="127.0.0.1"
    )
    agent = Agent(
        WorkerSpec(
            role="default",
            local_world_size=2,
            rdzv_handler=handler,
            entrypoint="script",
            max_restarts=1,
            monitor_interval=0.01,
        )
    )
    result = agent.run()
    assert result.state == WorkerState.SUCCEEDED
    assert agent.started == 2 and agent.stopped >= 1
