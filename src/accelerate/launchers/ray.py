# SPDX-License-Identifier: Apache-2.0
"""Ray: the processes run where a cluster has resources, each started by an actor; supervised from this machine."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..core import env
from ..core.device_kinds import DEVICES, VISIBLE
from ..core.errors import ConfigurationError, LaunchError
from ..core.imports import is_available
from .base import AGENT, Launcher, handling, print_message
from .ray_worker import RayWorker, RemoteProcess, RemoteSupervisor
from .spec import LaunchSpec, Place, ProcessSpec
from .static import Waiting

INSTALL = "pip install 'ray>=2.40'"
# Ray's names of accelerators, in the order in which a cluster is searched for them.
ACCELERATORS = tuple(kind.ray for kind in DEVICES.values() if kind.ray is not None)
# Prefixes of the variables of this environment that are sent to the cluster's machines.
CARRIED = ("ACCELERATE_", "HF_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "PYTHON", "WANDB_", "TOKENIZERS_")
LOCAL = "local"
_CONNECT = 3.0
_TURN = 0.5


class RayLauncher(Launcher):
    """`ray_address` is the cluster's: host:port, ray://host:port, auto (the cluster on this machine) or local.

    local is a temporary cluster of this machine alone. None takes the cluster on this machine, else local.
    """

    name = "ray"
    remote = True
    uses_this_machine = False
    unused: tuple[str, ...] = (*AGENT, "mpirun_hostfile")

    def _check(self) -> None:
        self.refuse_place("the ray engine is started once and finds the machines itself")
        if not is_available("ray"):
            raise ConfigurationError(f"the ray engine needs Ray, which is not installed: {INSTALL}")
        _ = self.spec.join_timeout  # raises for settings that cannot be used
        if self.spec.ray_address not in (None, "auto", LOCAL):
            _host_and_port(str(self.spec.ray_address))

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """The processes as far as they are known without the cluster: the machines are not."""
        spec, unknown = self.spec, "<of its machine>"
        processes = []
        for rank in range(spec.num_processes):
            place = Place(rank, 0, 0, 0, 0, "<address of rank 0>", spec.main_process_port)
            variables = {**_carried(), **spec.variables_at(place, attempt)}
            variables.update(
                dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"), unknown)
            )
            processes.append(ProcessSpec(rank, 0, tuple(spec.program.argv()), variables))
        return processes

    def dry_run(self) -> str:
        """Return the cluster, the placement group, and the command and variables of each process."""
        bundles, strategy = _bundles(self.spec, None if self.spec.device == "cpu" else ACCELERATORS[0])
        where = self.spec.ray_address or "the cluster on this machine, else a new one"
        accelerators = "" if self.spec.device == "cpu" else f"; without {ACCELERATORS[0]} where the cluster has none"
        lines = [f"# cluster: {where}", f"# placement group: {strategy}, {bundles}{accelerators}"]
        return "\n".join([*lines, *super().dry_run().splitlines()]).replace(f" on {socket.gethostname()}", "")

    def run(self) -> int:
        """Run the launch on the cluster, with restarts. Returns the exit code."""
        from .supervisor import with_restarts

        with _ending_on_signals(), _connected(self.spec.ray_address, self.spec.quiet) as cluster:
            resource = cluster.accelerator(self.spec)
            # A given timeout means a cluster that grows.
            if "join_timeout" not in self.spec.rendezvous_settings():
                cluster.check_resources(*_bundles(self.spec, resource))
            return with_restarts(self.spec, lambda number: self._run_once(cluster, resource, number))

    def _run_once(self, cluster: Cluster, resource: str | None, number: int) -> RemoteSupervisor:
        """Run all processes once, from their placement to their end."""
        with _reserved(cluster, *_bundles(self.spec, resource), self.spec.join_timeout) as group:
            members = _members(self.spec, group, resource, cluster)
            try:
                return self._supervise(cluster, _placed(members, _own_node()), number)
            finally:
                _dismiss(members)

    def _supervise(self, cluster: Cluster, members: list[RayMember], number: int) -> RemoteSupervisor:
        processes, spec = self._specified(members, number), self.spec
        folder = None if cluster.brings_folder else str(Path.cwd())
        calls = [
            member.worker.start.remote(spec.program, process.variables, folder)
            for member, process in zip(members, processes, strict=True)
        ]
        for member, call in zip(members, calls, strict=True):
            member.started = RemoteProcess(_result(call), member.info["host"], member.send)
        pump = threading.Thread(target=_pump, args=(members,), daemon=True)
        supervisor = RemoteSupervisor(spec, [member.process for member in members], pump.start)
        supervisor.run(processes)
        return supervisor

    def _specified(self, members: list[RayMember], number: int) -> list[ProcessSpec]:
        """The processes, in the order of the ranks."""
        spec, first = self.spec, members[0]
        nodes = list(dict.fromkeys(member.node for member in members))
        port = _result(first.worker.reserve_port.remote(spec.main_process_port))
        address = first.address if len(nodes) > 1 else "127.0.0.1"
        processes = []
        for rank, member in enumerate(members):
            here = [other for other in members if other.node == member.node]
            machine = nodes.index(member.node)
            place = Place(rank, here.index(member), len(here), machine, len(nodes), address, port)
            variables = {**_carried(), **spec.variables_at(place, number), **_visible(here)}
            if len(nodes) > 1 and "GLOO_SOCKET_IFNAME" not in variables:
                variables["GLOO_SOCKET_IFNAME"] = member.info["interface"]
            processes.append(ProcessSpec(rank, place.local_rank, tuple(spec.program.argv()), variables))
        return processes


@dataclass
class RayMember:
    """An actor in the cluster, what it reports about its machine, and the process that it has started."""

    worker: Any
    info: dict[str, Any]
    started: RemoteProcess | None = None

    @property
    def node(self) -> str:
        """The id of the node of the cluster."""
        return str(self.info["node"])

    @property
    def address(self) -> str:
        """The IP address of the node."""
        return str(self.info["address"])

    @property
    def process(self) -> RemoteProcess:
        """The started process."""
        assert self.started is not None
        return self.started

    def send(self, number: int, group: bool) -> None:
        """Send a signal to the process, or to its process group."""
        self.worker.signal.remote(number, group)


class RayActor(RayWorker):
    """A worker that reports its place in a Ray cluster."""

    def introduce(self) -> dict[str, Any]:
        """Return the place of this worker in the cluster."""
        import ray

        from .static import interface_of

        address = ray.util.get_node_ip_address()
        given = ray.get_runtime_context().get_accelerator_ids()
        return {
            **super().introduce(),
            "node": ray.get_runtime_context().get_node_id(),
            "address": address,
            "interface": interface_of(address),
            "devices": [str(number) for number in next((ids for ids in given.values() if ids), [])],
            "visible": {name: text for name in VISIBLE if (text := env.get(name)) is not None},
        }


class Cluster:
    """The Ray cluster that this process is connected to."""

    def __init__(self, address: str, brings_folder: bool) -> None:
        self.address = address
        self.brings_folder = brings_folder

    def nodes(self) -> dict[str, dict[str, float]]:
        """The resources of each machine, by its address."""
        import ray

        return {
            node["NodeManagerAddress"] + ":" + node["NodeID"]: node["Resources"]
            for node in ray.nodes()
            if node["Alive"]
        }

    def accelerator(self, spec: LaunchSpec) -> str | None:
        """The resource of which each process gets one; None runs on the CPU."""
        if spec.device == "cpu":
            return None
        found = next((name for name in ACCELERATORS if any(node.get(name) for node in self.nodes().values())), None)
        if found is None and spec.device != "auto":
            raise ConfigurationError(f"{self} has no accelerator ({self.shown()}): give --cpu to run without")
        if found is None and not spec.quiet:
            print_message(f"{self} has no accelerator: the processes run on the CPU")
        return found

    def check_resources(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        """ConfigurationError where the processes would not fit even if nobody else used the cluster."""
        bundle = bundles[0]
        fits = [min(int(node.get(name, 0) // much) for name, much in bundle.items()) for node in self.nodes().values()]
        total = sum(fits) if strategy == "PACK" else sum(1 for here in fits if here)
        if total < len(bundles):
            what = "processes" if strategy == "PACK" else "machines"
            raise ConfigurationError(
                f"{len(bundles)} {what} with {_words(bundle)} each do not fit: {self} has {self.shown()}. "
                "Request fewer; for a cluster that grows, --rdzv_conf join_timeout=SECONDS waits"
            )

    def shown(self) -> str:
        """The resources of its machines."""
        shown = []
        for name, node in self.nodes().items():
            here = {key: node[key] for key in ("CPU", *ACCELERATORS) if node.get(key)}
            shown.append(f"{_words(here) or 'nothing'} on {name.partition(':')[0]}")
        return "; ".join(shown) or "no machine"

    def __str__(self) -> str:
        return "the Ray cluster of this machine" if self.address == LOCAL else f"the Ray cluster at {self.address}"


def _bundles(spec: LaunchSpec, resource: str | None) -> tuple[list[dict[str, float]], str]:
    """The bundles to reserve and their strategy: the requested number of machines, else any free resources."""
    each: dict[str, float] = {"CPU": spec.threads or 1}
    if resource is not None:
        each[resource] = 1
    if spec.num_machines == 1:
        return [each] * spec.num_processes, "PACK"
    here = {name: much * spec.local_processes for name, much in each.items()}
    return [here] * spec.num_machines, "STRICT_SPREAD"


@contextlib.contextmanager
def _connected(address: str | None, quiet: bool) -> Iterator[Cluster]:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    found = _resolved(address)
    if found == LOCAL and not quiet:
        print_message("no Ray cluster is given or runs here: a temporary one of this machine alone is started")
    more = {} if found.startswith("ray://") else {"include_dashboard": False if found == LOCAL else None}
    try:
        context = ray.init(address=found, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigurationError(f"the Ray cluster at {found} cannot be used: {_in_a_line(error)}") from None
    try:
        # Ray installs its own signal handlers.
        with _ending_on_signals():
            brought = ray.get_runtime_context().runtime_env or {}
            yield Cluster(found, brings_folder="working_dir" in brought)
    finally:
        del context
        ray.shutdown()


def _resolved(address: str | None) -> str:
    """The address of a cluster that answers, or `local`."""
    if address in (None, "auto"):
        running = Path(env.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        found = running.read_text().strip() if running.is_file() else None
        if found and _answers(found) is None:
            return found
        if address == "auto":
            raise ConfigurationError("no Ray cluster runs on this machine: start one with `ray start --head`")
        return LOCAL
    if address != LOCAL:
        problem = _answers(str(address))
        if problem is not None:
            raise ConfigurationError(f"no Ray cluster answers at {address}: {problem}")
    return str(address)


def _answers(address: str) -> str | None:
    """Why an address does not answer; None where it does."""
    try:
        socket.create_connection(_host_and_port(address), timeout=_CONNECT).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ConfigurationError(
            f"ray_address={address!r} is not an address of a Ray cluster: host:port, ray://host:port, auto or local"
        )
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _reserved(
    cluster: Cluster, bundles: Sequence[Mapping[str, float]], strategy: str, timeout: float
) -> Iterator[Any]:
    """A placement group whose resources are reserved."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    waiting = Waiting()
    try:
        while not group.wait(_TURN):
            if waiting.seconds > timeout:
                raise LaunchError(f"{cluster} had no free resources within {timeout:.0f} s; it has {cluster.shown()}")
            if waiting.is_due():
                free = {key: much for key, much in ray.available_resources().items() if key in ("CPU", *ACCELERATORS)}
                wanted = f"{len(bundles)} x {_words(bundles[0])}"
                print_message(f"waiting for resources: {wanted}; free now: {_words(free) or 'nothing'}")
        yield group
    finally:
        remove_placement_group(group)


def _members(spec: LaunchSpec, group: Any, resource: str | None, cluster: Cluster) -> list[RayMember]:
    """An actor for each process. ConfigurationError where one has another version than this launcher."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = ray.remote(RayActor)
    options: dict[str, Any] = {"num_cpus": spec.threads or 1, "max_concurrency": 3}
    if resource == "GPU":
        options["num_gpus"] = 1
    elif resource is not None:
        options["resources"] = {resource: 1}
    share = 1 if spec.num_machines == 1 else spec.local_processes
    workers = []
    for number in range(spec.num_processes):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number // share)
        workers.append(kind.options(scheduling_strategy=place, **options).remote())
    members = [RayMember(worker, _result(worker.introduce.remote())) for worker in workers]
    ours = RayWorker().introduce()
    for member in members:
        for key in ("accelerate", "torch"):
            if member.info[key] != ours[key]:
                raise ConfigurationError(
                    f"{member.info['host']} of {cluster} has {key} {member.info[key]}, this machine has {ours[key]}: "
                    "install the same"
                )
    return members


def _own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _placed(members: Sequence[RayMember], here: str) -> list[RayMember]:
    """In the order of the ranks: machine by machine, this one first, and on each by its devices."""

    def place(member: RayMember) -> tuple[object, ...]:
        # Numbers in their order, before the names of devices.
        devices = [(not name.isdigit(), int(name) if name.isdigit() else 0, name) for name in member.info["devices"]]
        return (member.node != here, member.node, devices)

    return sorted(members, key=place)


def _visible(members: Sequence[RayMember]) -> dict[str, str]:
    """The variables for the devices of a machine's processes, in the order of their local ranks.

    Each process sees the devices of all and uses that of its local rank. Ray has set the variables that name exactly
    the device of a process, in some after a word such as `level_zero:`; the others are the machine's own.
    """
    devices = [name for member in members for name in member.info["devices"]]
    if len(set(devices)) < len(devices):
        raise LaunchError(
            f"Ray gave one device to several processes of {members[0].info['host']} (devices {', '.join(devices)}): "
            "each needs its own"
        )
    found = {}
    for name, text in members[0].info["visible"].items():
        word, colon, listed = text.rpartition(":")
        if devices and listed == ",".join(members[0].info["devices"]):
            found[name] = word + colon + ",".join(devices)
    return found


def _carried() -> dict[str, str]:
    return {name: text for prefix in CARRIED for name, text in env.all_with_prefix(prefix).items()}


def _pump(members: Sequence[RayMember]) -> None:
    """Forward what the actors read until every process has ended."""
    import ray

    calls = {member.worker.read.remote(): member for member in members}
    while calls:
        (ready, *_), _ = ray.wait(list(calls), num_returns=1)
        member = calls.pop(ready)
        try:
            member.process.take(*ray.get(ready))
        except Exception as error:
            # After any error here, the state of the process is unknown.
            member.process.lose(_in_a_line(error))
        if not member.process.ended:
            calls[member.worker.read.remote()] = member


def _dismiss(members: Sequence[RayMember]) -> None:
    import ray

    for member in members:
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            ray.kill(member.worker)


def _result(call: Any) -> Any:
    """The result of an actor's call, with its errors translated."""
    import ray

    while True:
        try:
            return ray.get(call, timeout=_TURN)
        except ray.exceptions.GetTimeoutError:
            # Short waits, so that signals are handled.
            continue
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (LaunchError, ConfigurationError)):
                raise type(cause)(str(cause)) from None
            raise LaunchError(f"a process could not be started in the Ray cluster: {_in_a_line(cause)}") from error
        except ray.exceptions.RayError as error:
            raise LaunchError(
                "a process could not be started in the Ray cluster (is accelerate installed on all of its machines?): "
                f"{_in_a_line(error)}"
            ) from None


def _ending_on_signals() -> contextlib.AbstractContextManager[None]:
    """Have Ctrl-C and SIGTERM end the launch while no process runs yet."""

    def end(number: int, frame: FrameType | None) -> None:
        print_message(f"ended by {signal.Signals(number).name}; nothing runs")
        raise SystemExit(128 + number)

    return handling(("SIGINT", "SIGTERM"), end)


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{much:g} {name}" for name, much in resources.items())


def _in_a_line(error: BaseException) -> str:
    """The most informative line of a long error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named[-1] if named else lines[0] if lines else type(error).__name__)[:300]
