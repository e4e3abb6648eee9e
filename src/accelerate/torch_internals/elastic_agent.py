# SPDX-License-Identifier: Apache-2.0
"""torch's elastic agent with another way to start and watch the ranks, for which it has private methods only."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup

from . import Internal

AGENT = Internal(
    name="elastic_agent",
    what="SimpleElasticAgent._start_workers, _monitor_workers, _stop_workers and _shutdown, its abstract methods",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="elastic runs: this package's supervisor starts the ranks, shows their output and reports failures",
    without="elastic runs end with NotImplementedError",
    test="tests/torch_internals/test_elastic_agent.py::test_agent_calls_the_methods_of_a_subclass",
)


class ElasticAgent(SimpleElasticAgent):
    """An agent whose subclass has the methods `start_ranks`, `check_ranks` and `stop_ranks`."""

    def start_ranks(self, workers: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this machine. Returns the process of each local rank."""
        raise NotImplementedError

    def check_ranks(self, workers: WorkerGroup) -> RunResult:
        """What has become of the ranks."""
        raise NotImplementedError

    def stop_ranks(self) -> None:
        """Stop the ranks of this machine, and wait for their end."""
        raise NotImplementedError

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not AGENT.is_on:
            raise NotImplementedError
        return self.start_ranks(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.check_ranks(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_ranks()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.stop_ranks()
