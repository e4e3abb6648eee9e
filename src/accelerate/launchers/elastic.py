# SPDX-License-Identifier: Apache-2.0
"""torch's elastic agent and rendezvous: machines that come and go, and restarts on all that are left."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError, LaunchError
from .base import Launcher
from .failure import Failure, cause_of
from .meeting import check_address, interface_of
from .process import die_with
from .spec import LaunchSpec, ProcessSpec
from .static import DEFAULT_PORT

# A node that dies is left behind in seconds: the agent's own defaults take most of a minute.
QUICK = {"last_call_timeout": "2", "keep_alive_interval": "1", "keep_alive_max_attempt": "2"}
# The store of an earlier attempt keeps the addresses of dead peers; each attempt gets its own.
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class ElasticLauncher(Launcher):
    """`nnodes` is a number of machines or a range as 1:4. Ranks are handed out by the rendezvous."""

    name = "elastic"

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(replace(spec, main_process_port=spec.main_process_port or DEFAULT_PORT))

    def check(self) -> None:
        super().check()
        check_address(self.spec.main_process_ip)
        if self.spec.tee != "0" and self.spec.log_dir is None:
            raise ConfigurationError("the elastic engine marks lines only when it also keeps them: give --log_dir")

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        guarded = [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), "<pid of the agent>"]
        variables = {**self.spec.variables, FRESH_STORE: "1"}
        return [
            ProcessSpec(rank, rank, (*guarded, *self.spec.program.argv()), variables)
            for rank in range(self.spec.local_processes)
        ]

    def run(self) -> int:
        address = _address_towards(self.spec.main_process_ip)
        variables: dict[str, str | None] = {**self.spec.variables, FRESH_STORE: "1"}
        if self.spec.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.spec.threads)
        if env.get("GLOO_SOCKET_IFNAME") is None and (name := interface_of(address)) is not None:
            variables["GLOO_SOCKET_IFNAME"] = name
        env.publish(variables)
        guarded = [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), str(os.getpid())]
        command = [*guarded, *self.spec.program.argv()]
        config = agent_config(
            self.spec,
            endpoint=f"{self.spec.main_process_ip}:{self.spec.main_process_port}",
            conf=self._settings(address),
            local_addr=address,
        )
        return _run_agent(config, command[0], command[1:], self.spec)

    def _settings(self, address: str) -> dict[str, str]:
        """Exactly one machine hosts the store: machine 0, or the one that has the address."""
        host = interface_of(socket.gethostbyname(self.spec.main_process_ip)) is not None
        given = self.spec.rendezvous_settings()
        first = self.spec.machine_rank == 0 if interface_of(address) == "lo" else host
        return {**QUICK, "is_host": str(first).lower(), **given}


def agent_config(spec: LaunchSpec, endpoint: str, conf: Mapping[str, str], local_addr: str | None, **more: Any) -> Any:
    """torch's LaunchConfig for a spec."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    least, _, most = spec.nnodes.partition(":")
    logs = None
    if spec.log_dir is not None:
        both = Std.ALL
        logs = DefaultLogsSpecs(log_dir=str(Path(spec.log_dir).expanduser()), redirects=both, tee=both)
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
        logs_specs=logs or DefaultLogsSpecs(log_dir=tempfile.mkdtemp(prefix="accelerate-elastic-")),
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
            cause=cause_of(first.exitcode, first.message if "Traceback" in str(first.message) else ""),
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


def _address_towards(host: str) -> str:
    """This machine's own address on the network that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


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
    chosen = replace(
        spec, rdzv_backend=backend, max_restarts=max_restarts, monitor_interval=monitor_interval,
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
