# SPDX-License-Identifier: Apache-2.0
"""Ray: the processes run where a cluster has resources, each started by an actor; supervised from this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ..core import env, messages
from ..core.device_kinds import DEVICES
from ..core.errors import ConfigurationError, LaunchError
from ..core.files import open_regular
from ..core.imports import is_available
from ..core.objects import is_secret
from .base import AGENT, Launcher, handling
from .ports import Waiting
from .ray_worker import KILLED, RayWorker, RemoteProcess, RemoteSupervisor, versions
from .spec import LaunchSpec, Place, ProcessSpec

# Ray's names of accelerators, in the order in which a cluster is searched for them.
ACCELERATORS = tuple(kind.ray for kind in DEVICES.values() if kind.ray is not None)
# Prefixes of the variables of this environment that are sent to the cluster's machines.
CARRIED = (
    "ACCELERATE_",
    "HF_",
    "TORCH_",
    "PYTORCH_",
    "NCCL_",
    "GLOO_",
    "PYTHON",
    "WANDB_",
    "TOKENIZERS_",
)
LOCAL = "local"
# Seconds for one look at what is waited for: signals are handled in between.
_TURN = 0.5
Resources = Mapping[str, float]


class RayLauncher(Launcher):
    """`ray_address` is the cluster's: host:port, ray://host:port, auto (the cluster on this machine) or local.

    local is a temporary cluster of this machine alone. None takes the cluster on this machine, else local.
    """

    name = "ray"
    remote = True
    uses_this_machine = False
    unused: tuple[str, ...] = (*AGENT, "mpirun_hostfile", "machine_rank", "main_process_ip")

    def check(self) -> None:
        """Check what this engine requires."""
        if not is_available("ray"):
            raise ConfigurationError(
                "the ray engine needs Ray, which is not installed: pip install 'ray>=2.40'"
            )
        _ = self.spec.join_timeout  # raises for settings that cannot be used
        address = self.spec.ray_address
        if address not in (None, "auto", LOCAL) and not re.fullmatch(
            r"(ray://)?[^/]+:\d+", str(address)
        ):
            raise ConfigurationError(
                f"ray_address={address!r} is not the address of a Ray cluster: use host:port, "
                "ray://host:port, auto or local"
            )

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """The processes as far as they are known without the cluster: the machines are not."""
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        processes = []
        for rank in range(self.spec.num_processes):
            position = Place(rank, 0, 0, 0, 0, "<address of rank 0>", self.spec.main_process_port)
            variables = carried(self.spec.env)
            variables |= self.spec.variables_at(position, attempt)
            variables |= dict.fromkeys(names, "<of its machine>")
            processes.append(ProcessSpec(rank, 0, tuple(self.spec.program.argv()), variables))
        return processes

    def dry_run(self) -> str:
        """Return the cluster, and the command and variables of each process."""
        where = self.spec.ray_address or "the cluster on this machine, otherwise a new one"
        return f"# cluster: {where}\n{super().dry_run()}".replace(f" on {socket.gethostname()}", "")

    def run(self) -> int:
        """Run the launch on the cluster, with restarts. Returns the exit code."""
        from .supervisor import with_restarts

        with _connected(self.spec):
            resource = _accelerator(self.spec)
            # A given timeout means a cluster that grows.
            if "join_timeout" not in self.spec.rendezvous_settings():
                check_resources(_nodes(), *bundles(self.spec, resource))
            return with_restarts(self.spec, partial(self._run_once, resource))

    def _run_once(self, resource: str | None, number: int) -> RemoteSupervisor:
        """Run all processes once, from their placement to their end."""
        import ray

        with _reserved(*bundles(self.spec, resource), self.spec.join_timeout) as group:
            members = _members(self.spec, group, resource)
            try:
                return self._supervise(members, number)
            finally:
                for member in members:
                    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                        ray.kill(member.worker)

    def _supervise(self, members: list[Member], number: int) -> RemoteSupervisor:
        import ray

        processes = self._specified(members, number)
        folder = None
        if "working_dir" not in (ray.get_runtime_context().runtime_env or {}):
            # A Ray job may bring the folder of the script along.
            folder = str(Path.cwd())
        calls = []
        for member, process in zip(members, processes, strict=True):
            start = member.worker.start
            calls.append(start.remote(self.spec.program, process.variables, folder))
        started = []
        for member, call in zip(members, calls, strict=True):
            started.append(RemoteProcess(_result(call), member.host, member.worker.signal.remote))
        pump = threading.Thread(target=_pump, args=(members, started), daemon=True)
        supervisor = RemoteSupervisor(self.spec, started, pump.start)
        supervisor.run(processes)
        return supervisor

    def _specified(self, members: list[Member], number: int) -> list[ProcessSpec]:
        """The processes, in the order of the ranks."""
        spec = self.spec
        first = members[0]
        nodes = list(dict.fromkeys(member.node for member in members))
        port = _result(first.worker.reserve_port.remote(spec.main_process_port))
        address = first.address if len(nodes) > 1 else "127.0.0.1"
        processes = []
        for rank, member in enumerate(members):
            local = [other for other in members if other.node == member.node]
            machine = nodes.index(member.node)
            local_rank = local.index(member)
            position = Place(rank, local_rank, len(local), machine, len(nodes), address, port)
            variables = carried(spec.env)
            variables |= spec.variables_at(position, number)
            variables |= visible_devices(local)
            if len(nodes) > 1 and "GLOO_SOCKET_IFNAME" not in variables:
                variables["GLOO_SOCKET_IFNAME"] = member.interface
            command = tuple(spec.program.argv())
            processes.append(ProcessSpec(rank, local_rank, command, variables))
        return processes


class Member(NamedTuple):
    """An actor in the cluster, and what it reports about its machine: see `RayWorker.introduce`."""

    worker: Any
    host: str
    node: str
    address: str
    interface: str | None
    devices: list[str]
    visible: dict[str, str]
    versions: dict[str, str]


def visible_devices(members: Sequence[Member]) -> dict[str, str]:
    """The variables for the devices of a machine's processes, in the order of their local ranks.

    Each process sees the devices of all and uses that of its local rank. Ray has set the variables that name exactly
    the device of a process, in some after a word such as `level_zero:`; the others are the machine's own.
    """
    all_devices: list[str] = []
    for member in members:
        all_devices += member.devices
    devices = ",".join(all_devices)
    first = ",".join(members[0].devices)
    variables = {}
    for name, text in members[0].visible.items():
        word, colon, listed = text.rpartition(":")
        if first and listed == first:
            variables[name] = word + colon + devices
    return variables


def bundles(spec: LaunchSpec, resource: str | None) -> tuple[list[Resources], str]:
    """The bundles to reserve and their strategy: the requested number of machines, else any free resources."""
    each = {"CPU": float(spec.threads or 1)} | ({resource: 1.0} if resource is not None else {})
    if spec.num_machines == 1:
        return [each] * spec.num_processes, "PACK"
    return [
        {name: n * spec.local_processes for name, n in each.items()}
    ] * spec.num_machines, "STRICT_SPREAD"


def check_resources(
    nodes: Sequence[tuple[str, Resources]], reserved: Sequence[Resources], strategy: str
) -> None:
    """ConfigurationError where the processes would not fit even if nobody else used the cluster."""
    bundle = reserved[0]
    fits = [
        min(int(resources.get(name, 0) // much) for name, much in bundle.items())
        for _, resources in nodes
    ]
    if (sum(fits) if strategy == "PACK" else sum(map(bool, fits))) < len(reserved):
        what = "processes" if strategy == "PACK" else "machines"
        raise ConfigurationError(
            f"{len(reserved)} {what} with {_words(bundle)} each do not fit: the Ray cluster has "
            f"{_shown(nodes)}. Request fewer, or wait for a growing cluster with --rdzv_conf "
            "join_timeout=SECONDS"
        )


def _nodes() -> list[tuple[str, Resources]]:
    """The address and the resources of each machine of the cluster."""
    import ray

    return [
        (node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]


def _shown(nodes: Sequence[tuple[str, Resources]]) -> str:
    return (
        "; ".join(f"{_words(resources) or 'nothing'} on {address}" for address, resources in nodes)
        or "no machine"
    )


def _words(resources: Resources) -> str:
    """The processors and accelerators among resources."""
    return ", ".join(
        f"{resources[name]:g} {name}" for name in ("CPU", *ACCELERATORS) if resources.get(name)
    )


def _accelerator(spec: LaunchSpec) -> str | None:
    """The resource of which each process gets one; None runs on the CPU."""
    if spec.device == "cpu":
        return None
    nodes = _nodes()
    kind = next(
        (name for name in ACCELERATORS if any(resources.get(name) for _, resources in nodes)), None
    )
    if kind is None and spec.device != "auto":
        raise ConfigurationError(
            f"the Ray cluster does not have an accelerator ({_shown(nodes)}): add --cpu to run "
            "without one"
        )
    if kind is None and not spec.quiet:
        messages.show("the Ray cluster does not have an accelerator: the processes run on the CPU")
    return kind


def running_cluster() -> str | None:
    """The address of the cluster on this machine, from the file that Ray keeps of it; None without one.

    Raises ConfigurationError where another user may have written the file: others can write in its folder.
    """
    path = Path(env.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    try:
        with open(path, opener=open_regular) as file:
            status = os.fstat(file.fileno())
            users = {0}
            if sys.platform != "win32":
                users.add(os.geteuid())
            if status.st_uid not in users or status.st_mode & 0o022:
                raise ConfigurationError(
                    f"{path} may belong to another user (owner {status.st_uid}, mode "
                    f"{status.st_mode & 0o777:o}): pass the address of the cluster with "
                    "--ray_address"
                )
            return file.read().strip() or None
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _connected(spec: LaunchSpec) -> Iterator[None]:
    import ray

    if spec.ray_address in (None, "auto"):
        address = running_cluster()
    else:
        address = spec.ray_address
    try:
        if address is None:
            raise OSError("none runs on this machine")
        if address != LOCAL:
            # Ray itself would wait for minutes.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
    except OSError as error:
        if spec.ray_address is not None:
            raise ConfigurationError(
                f"a Ray cluster does not answer at {spec.ray_address}: {error.strerror or error}"
            ) from None
        address = LOCAL
        if not spec.quiet:
            messages.show(
                "a Ray cluster is not running here: starting a temporary one on this machine alone"
            )
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address == LOCAL:
        options = {"include_dashboard": False}
    else:
        options = {}
    with _ending_on_signals():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigurationError(
                f"the Ray cluster at {address} cannot be used: {_in_a_line(error)}"
            ) from None
        try:
            # Ray has installed its own signal handlers.
            with _ending_on_signals():
                yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _reserved(reserved: Sequence[Resources], strategy: str, timeout: float) -> Iterator[Any]:
    """A placement group whose resources are reserved."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in reserved], strategy=strategy)
    waiting = Waiting()
    try:
        while not group.wait(_TURN):
            if waiting.seconds > timeout:
                raise LaunchError(
                    f"the Ray cluster did not have free resources within {timeout:.0f} s; it has "
                    f"{_shown(_nodes())}"
                )
            if waiting.is_due():
                free = _words(ray.available_resources()) or "nothing"
                messages.show(
                    f"waiting for resources: {len(reserved)} x {_words(reserved[0])}; free now: {free}"
                )
        yield group
    finally:
        remove_placement_group(group)


def _members(spec: LaunchSpec, group: Any, resource: str | None) -> list[Member]:
    """An actor for each process in the order of the ranks: machine by machine, this one first.

    ConfigurationError where one has another version than this launcher.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {"num_cpus": spec.threads or 1, "max_concurrency": 3}
    if resource is not None:
        options |= {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
    share = 1 if spec.num_machines == 1 else spec.local_processes
    workers = []
    for number in range(spec.num_processes):
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number // share
        )
        workers.append(ray.remote(RayWorker).options(**options).remote())
    members = [Member(worker, **_result(worker.introduce.remote())) for worker in workers]
    ours = versions()
    for member in members:
        for name, version in ours.items():
            if member.versions[name] != version:
                raise ConfigurationError(
                    f"{member.host} of the Ray cluster has {name} {member.versions[name]}, but "
                    f"this machine has {version}: install the same version"
                )
    node = str(ray.get_runtime_context().get_node_id())
    return sorted(members, key=lambda member: (member.node != node, member.node))


def carried(requested: Sequence[str]) -> dict[str, str | None]:
    """The variables of this environment for the processes: no tokens, but what --env names, as NAME=VALUE or NAME."""
    variables: dict[str, str | None] = {}
    for prefix in CARRIED:
        for name, text in env.all_with_prefix(prefix).items():
            if not is_secret(name):
                variables[name] = text
    for item in requested:
        name, equals, text = item.partition("=")
        if equals:
            variables[name] = text
        else:
            variables[name] = env.all_with_prefix(name).get(name)
    return variables


def _pump(members: Sequence[Member], processes: Sequence[RemoteProcess]) -> None:
    """Forward what the actors read until every process has ended."""
    import ray

    calls = {pair[0].worker.read.remote(): pair for pair in zip(members, processes, strict=True)}
    while calls:
        (ready, *_), _ = ray.wait(list(calls), num_returns=1)
        member, process = calls.pop(ready)
        try:
            process.take(*ray.get(ready))
        except Exception as error:
            # After any error here, the state of the process is unknown.
            lost = f"accelerate: {member.host} (pid {process.pid}) is lost: {_in_a_line(error)}\n"
            process.take([(2, lost.encode())], KILLED)
        if process.poll() is None:
            calls[member.worker.read.remote()] = (member, process)


def _result(call: Any) -> Any:
    """The result of an actor's call, with its errors translated."""
    import ray

    while True:
        try:
            return ray.get(call, timeout=_TURN)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (LaunchError, ConfigurationError)):
                raise type(cause)(str(cause)) from None
            raise LaunchError(
                f"a process could not be started in the Ray cluster: {_in_a_line(cause)}"
            ) from error
        except ray.exceptions.RayError as error:
            raise LaunchError(
                "a process could not be started in the Ray cluster (is accelerate installed on all of its machines?): "
                f"{_in_a_line(error)}"
            ) from None


def _ending_on_signals() -> contextlib.AbstractContextManager[None]:
    """Have Ctrl-C and SIGTERM end the launch while no process runs yet."""

    def end(number: int, frame: FrameType | None) -> None:
        messages.show(f"ended by {signal.Signals(number).name}; nothing runs")
        raise SystemExit(128 + number)

    return handling(("SIGINT", "SIGTERM"), end)


def _in_a_line(error: BaseException) -> str:
    """The most informative line of a long error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return [*errors[-1:], *lines[:1], type(error).__name__][0][:300]
