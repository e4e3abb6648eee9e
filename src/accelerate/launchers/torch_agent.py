# SPDX-License-Identifier: Apache-2.0
"""A notebook's function under torch's own elastic agent, which forks its processes and restarts them."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core import env
from ..core.errors import LaunchError
from .functions import finish_forked, forget_parent
from .process import die_with
from .shared_store import QUIET
from .spec import RENDEZVOUS_SETTINGS, LaunchSpec


def run_function_elastic(
    function: Callable[..., Any],
    args: Sequence[Any],
    spec: LaunchSpec,
    endpoint: str,
    backend: str,
    conf: Mapping[str, Any],
    run_id: str,
    max_restarts: int,
    monitor_interval: float,
    prefix: str | None,
) -> None:
    """Run a function in forked processes under torch's agent. LaunchError where it fails for good."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A node that dies is left behind in seconds: torch's own defaults take most of a minute.
    settings = {**{key: str(value) for key, value in RENDEZVOUS_SETTINGS.items()}, **conf}
    if not endpoint:
        endpoint, settings = "localhost:0", {"is_host": "true", **settings}
    env.publish(
        {
            **spec.variables,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": QUIET["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"],
        }
    )
    parent = os.getpid()

    @functools.wraps(function)  # torch names the processes after it
    def member(*args: Any) -> Any:
        # It dies with the notebook.
        prepare = die_with(parent)
        if prepare is not None:
            prepare()
        forget_parent()
        try:
            return function(*args)
        finally:
            finish_forked()

    with tempfile.TemporaryDirectory(prefix="accelerate-elastic-") as folder:
        config = LaunchConfig(
            min_nodes=spec.num_machines,
            max_nodes=spec.num_machines,
            nproc_per_node=spec.local_processes,
            run_id=run_id,
            rdzv_endpoint=endpoint,
            rdzv_backend="c10d" if backend == "static" else backend,
            rdzv_configs=settings,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            start_method="fork",
            # torch keeps each rank's report of its error there.
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            log_line_prefix_template=prefix,
        )
        try:
            elastic_launch(config, member)(*args)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            raise LaunchError(
                f"rank {rank} failed with exit code {first.exitcode}: {first.message}"
            ) from None
