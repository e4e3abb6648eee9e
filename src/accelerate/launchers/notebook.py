# SPDX-License-Identifier: Apache-2.0
"""Launch a training function from a notebook or an interactive session."""

from __future__ import annotations

import contextlib
import functools
import os
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core import env, messages, system
from ..core.availability import is_torch_xla_available
from ..core.enums import PrecisionType
from ..core.errors import ConfigurationError, LaunchError
from ..core.objects import counted
from .functions import finish_forked, forget_parent, run_functions
from .plan import shortage_of_cpus
from .ports import ReservedPort, is_port_in_use
from .process import die_with
from .shared_store import QUIET
from .spec import RENDEZVOUS_SETTINGS, LaunchSpec, Program

DEFAULT_PORT = "29500"


class PrepareForLaunch:
    """A function to start as one of several processes.

    Call it with the index of the process, which becomes its rank, and the function's own arguments.

    Args:
        launcher: the function.
        distributed_type: `XLA` where torch_xla assigns the ranks.
        debug: unused; part of the API.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type: str = str(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> Any:
        """Set the variables of the rank, and call the function."""
        if self.distributed_type != "XLA":
            world = env.get_int("WORLD_SIZE") or 1
            nodes = env.get_int("NNODES") or 1
            first = (env.get_int("NODE_RANK") or 0) * (world // nodes)
            env.publish({"LOCAL_RANK": index, "RANK": first + index, "FORK_LAUNCHED": "1"})
        return self.launcher(*args)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    return_values: bool = False,
) -> list[Any] | None:
    """Run a training function on several processes of this machine, forked from the notebook.

    A single process is a plain call. The function creates its own `Accelerator`.

    Args:
        function: called as `function(*args)` in each process.
        args: its arguments.
        num_processes: number of processes on this machine; 1 by default on the CPU.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`.
        use_port: port of rank 0. If the default port is in use, a single machine uses a free one.
        master_addr: address of the first machine.
        node_rank: number of this machine. Each machine calls this function.
        num_nodes: number of machines.
        rdzv_backend: rendezvous backend of torch's elastic agent, which runs the processes if this is not `static`
            or if `rdzv_endpoint` or `max_restarts` is set.
        rdzv_endpoint: its address, `host:port`.
        rdzv_conf: its settings.
        rdzv_id: its name for the run.
        max_restarts: number of restarts after failures.
        monitor_interval: seconds between the elastic agent's checks of the processes.
        log_line_prefix_template: prefix of each line of output, with `${rank}`, `${local_rank}` and `${role_name}`.
            Without it, the lines of all ranks except 0 begin with their rank.
        return_values: return what the function returns on each process of this machine. It must be picklable.

    Returns:
        None, or with `return_values` a list with the value of each rank.

    Raises:
        ValueError: for invalid arguments.
        RuntimeError: the notebook has already used an accelerator.
        LaunchError: with the traceback of the process that failed first.

    Example:
        >>> from accelerate import notebook_launcher
        >>> notebook_launcher(train, args=(3,), num_processes=2)
    """
    precision = str(mixed_precision).lower()
    if precision not in PrecisionType.list():
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} is unknown: choose one of {', '.join(PrecisionType.list())}"
        )
    published = {"ACCELERATE_MIXED_PRECISION": precision}
    elastic = bool(max_restarts or rdzv_backend != "static" or rdzv_endpoint)
    on_tpu = is_torch_xla_available(check_is_tpu=True)
    if return_values and (elastic or on_tpu):
        raise ConfigurationError(
            "return_values=True: torch's elastic agent (max_restarts, rdzv_backend, "
            "rdzv_endpoint) and torch_xla do not return values; have the function write them to "
            "files"
        )
    if on_tpu:
        import torch_xla

        # It starts a process for each core.
        env.publish(published)
        torch_xla.launch(PrepareForLaunch(function, "XLA"), args=tuple(args), start_method="fork")
        return None
    device, count = _device_and_count(num_processes, num_nodes, node_rank)
    if count == 1 and num_nodes == 1:
        messages.show(f"1 process on {device}")
        if device == "mps":
            # Operations that the Apple GPU lacks run on the CPU instead of failing.
            published["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"
        with env.patch_environment(**published):
            value = function(*args)
        if return_values:
            return [value]
        return None
    _check_untouched(device)
    _check_capacity(count)
    messages.show(f"{counted(count, 'process')} on {device}")
    spec = LaunchSpec(
        program=Program(getattr(function, "__name__", "function"), kind="program"),
        num_processes=count * num_nodes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr,
        device=device,
        variables={**published, "FORK_LAUNCHED": "1"},
    )
    if elastic:
        if not rdzv_endpoint and num_nodes > 1:
            rdzv_endpoint = f"{master_addr}:{use_port}"
        _run_elastic(
            function,
            args,
            spec,
            endpoint=rdzv_endpoint,
            backend=rdzv_backend,
            conf=rdzv_conf or {},
            run_id=rdzv_id,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            prefix=log_line_prefix_template,
        )
        return None
    with _port_of_rank_0(spec, use_port) as port:
        variables = [spec.process(index, port).variables for index in range(count)]
        marks = [_mark(of_rank, log_line_prefix_template) for of_rank in variables]
        try:
            values = run_functions(function, args, variables, marks, return_values)
        except LaunchError as error:
            # The message contains the traceback of the rank. The cell does not need the launcher's frames too.
            raise error.with_traceback(None) from None
    if return_values:
        return values
    return None


def _run_elastic(
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
    """Run a function in processes that torch's own elastic agent forks and restarts. LaunchError where it fails."""
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


def _device_and_count(num_processes: int | None, num_nodes: int, node_rank: int) -> tuple[str, int]:
    """The kind of device, and the number of processes on this machine, checked."""
    present = system.accelerators()
    if num_processes is None and present.number > 1:
        raise ConfigurationError(
            f"this machine has {present.number} {present.kind} devices: set num_processes to the number to use"
        )
    count = 1 if num_processes is None else num_processes
    if count < 1 or num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise ConfigurationError(
            f"num_processes={num_processes}, num_nodes={num_nodes}, node_rank={node_rank} do not describe a run"
        )
    if present.number and count > present.number:
        raise ConfigurationError(
            f"num_processes={count}: this machine has {present.number} {present.kind} devices"
        )
    return present.kind, count


@contextlib.contextmanager
def _port_of_rank_0(spec: LaunchSpec, requested: str) -> Iterator[int]:
    """The port that rank 0 listens on, reserved on its machine."""
    if spec.machine_rank:
        yield int(requested)
        return
    number = int(requested)
    if spec.num_machines == 1 and str(requested) == DEFAULT_PORT and is_port_in_use(requested):
        # No other machine has to know it: any free one.
        number = 0
    with ReservedPort(number) as port:
        yield port.number


def _mark(variables: Mapping[str, str | None], template: str | None) -> str:
    """What each line of a rank begins with. Rank 0 writes most lines, and its progress bars: they stay as they are."""
    rank = variables["RANK"]
    if template is None:
        if rank == "0":
            return ""
        return f"[rank {rank}] "
    words = {"rank": rank, "local_rank": variables["LOCAL_RANK"], "role_name": "default"}
    return string.Template(template).safe_substitute(words)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """Run a function on a few forked CPU processes that communicate, to try out distributed code.

    Args:
        function: called as `function(*args)` in each process.
        args: its arguments.
        num_processes: number of processes.

    Raises:
        LaunchError: with the traceback of the process that failed first.

    Example:
        debug_launcher(train, args=(3,), num_processes=2)
    """
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes}: use 1 or more")
    _check_capacity(num_processes)
    spec = LaunchSpec(
        program=Program(getattr(function, "__name__", "function"), kind="program"),
        num_processes=num_processes,
        variables={
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_USE_CPU": "true",
            "FORK_LAUNCHED": "1",
        },
    )
    with ReservedPort() as port:
        run_functions(
            function,
            args,
            [spec.process(index, port.number).variables for index in range(num_processes)],
            marks=[""] * num_processes,
        )


def _check_capacity(processes: int) -> None:
    """Warn where the processes share processors."""
    warning = shortage_of_cpus(processes, None)
    if warning:
        messages.warn(warning)


def _check_untouched(kind: str) -> None:
    """Check that the notebook has neither used a device nor a process state, which forked processes cannot use."""
    if "accelerate.state" in sys.modules:
        from .. import state

        if state.PartialState._shared_state:
            raise ConfigurationError(
                "this notebook already has an Accelerator (or PartialState). Create it only "
                "inside the launched function, restart the kernel and launch again"
            )
    if kind == "cpu" or "torch" not in sys.modules:
        return
    from ..core import devices

    if devices.is_initialized(kind):
        raise LaunchError(
            f"{kind.upper()} was used in this notebook before the launch, so forked processes "
            "cannot use it. Restart the kernel, and use the device only inside the launched "
            "function."
        )


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla version that fits the installed torch, with the TPU library, in Google Colab.

    Args:
        upgrade: replace an installed torch_xla.

    Raises:
        LaunchError: this is not Google Colaboratory, or pip fails.
    """
    if "google.colab" not in sys.modules:
        raise LaunchError(
            "install_xla() works only in Google Colab; elsewhere: pip install 'torch_xla[tpu]'"
        )
    version = system.torch_build().get("version")
    if version is None:
        raise LaunchError("install_xla() needs an installed torch: install torch first")
    # torch_xla is released with torch, under the same major and minor number.
    minor = ".".join(version.split(".")[:2])
    upgrading = ["--upgrade"] if upgrade else []
    command = [sys.executable, "-m", "pip", "install", *upgrading, f"torch_xla[tpu]~={minor}.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(
            f"{' '.join(command)} failed (exit code {done.returncode}):\n{done.stderr.strip()[-1000:]}"
        )
