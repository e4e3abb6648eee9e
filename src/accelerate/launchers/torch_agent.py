# SPDX-License-Identifier: Apache-2.0
"""torch's own elastic agent: for functions in a notebook, and for rendezvous backends such as etcd."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import env
from ..core.errors import LaunchError
from .failure import Failure, cause_of
from .process import die_with, guarded
from .spec import LaunchSpec

# A node that dies is left behind in seconds: the agent's own defaults take most of a minute.
QUICK = {"last_call_timeout": "2", "keep_alive_interval": "1", "keep_alive_max_attempt": "2"}
# The store of an earlier attempt keeps the addresses of dead peers; each attempt gets its own.
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def agent_config(spec: LaunchSpec, endpoint: str, conf: Mapping[str, str], local_addr: str | None, **more: Any) -> Any:
    """Return the `LaunchConfig` of torch for a spec."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    least, _, most = spec.nnodes.partition(":")
    if spec.log_dir is not None:
        logs = DefaultLogsSpecs(log_dir=str(Path(spec.log_dir).expanduser()), redirects=Std.ALL, tee=Std.ALL)
    else:
        # torch keeps each rank's report of its error there.
        folder = tempfile.mkdtemp(prefix="accelerate-elastic-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logs = DefaultLogsSpecs(log_dir=folder)
    backend = spec.rdzv_backend if spec.rdzv_backend != "static" else "c10d"
    return LaunchConfig(
        min_nodes=int(least),
        max_nodes=int(most or least),
        nproc_per_node=spec.local_processes,
        run_id=more.pop("run_id", spec.rdzv_id),
        role=spec.role,
        rdzv_endpoint=endpoint,
        rdzv_backend=backend,
        rdzv_configs=dict(conf),
        max_restarts=spec.max_restarts,
        monitor_interval=spec.monitor_interval,
        local_addr=local_addr,
        logs_specs=logs,
        **more,
    )


def _run_agent(config: Any, entrypoint: Any, args: Sequence[Any], spec: LaunchSpec) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(config, entrypoint)(*args)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        failure = Failure(
            rank=rank, local_rank=first.local_rank, pid=first.pid, code=first.exitcode,
            host=socket.gethostname(), time=time.time(),
            cause=cause_of(first.exitcode, str(first.message) if "Traceback" in str(first.message) else ""),
        )  # fmt: skip
        print("\n".join(failure.lines()), file=sys.stderr)
        if spec.error_file:
            failure.write(spec.error_file)
        return failure.exit_code
    except SignalException as error:
        print(f"accelerate launch: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except Exception as error:
        # The agent's own errors come in many types; what they have in common is that no rank has failed.
        raise LaunchError(f"the elastic agent gave up: {type(error).__name__}: {error}") from error
    return 0


def run_program_elastic(spec: LaunchSpec, address: str) -> int:
    """Run the launch's program under torch's agent and any rendezvous backend that it knows."""
    env.publish({**spec.variables, FRESH_STORE: "1"})
    command = [*guarded(os.getpid()), *spec.program.argv()]
    config = agent_config(
        spec,
        endpoint=f"{spec.main_process_ip}:{spec.main_process_port}",
        conf={**QUICK, **spec.rendezvous_settings()},
        local_addr=address,
    )
    return _run_agent(config, command[0], command[1:], spec)


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
    chosen = spec._replace(
        rdzv_backend=backend, max_restarts=max_restarts, monitor_interval=monitor_interval,
        nnodes=str(spec.num_machines),
    )  # fmt: skip
    settings = {key: str(value) for key, value in conf.items()}
    if not endpoint:
        endpoint, settings = "localhost:0", {**QUICK, "is_host": "true", **settings}
    env.publish({**spec.variables, FRESH_STORE: "1"})
    more = {"log_line_prefix_template": prefix} if prefix else {}
    config = agent_config(chosen, endpoint, settings, None, start_method="fork", run_id=run_id, **more)
    code = _run_agent(config, _Guarded(function, os.getpid()), args, chosen)
    if code:
        raise LaunchError(f"the launched function failed with code {code}; its traceback is above")


class _Guarded:
    """A function whose process dies with the notebook's."""

    def __init__(self, function: Callable[..., Any], parent: int) -> None:
        self.function, self.parent = function, parent
        self.__qualname__ = self.__name__ = getattr(function, "__name__", "function")

    def __call__(self, *args: Any) -> Any:
        prepare = die_with(self.parent)
        if prepare is not None:
            prepare()
        from .functions import finish_forked, forget_parent

        forget_parent()
        try:
            return self.function(*args)
        finally:
            finish_forked()
