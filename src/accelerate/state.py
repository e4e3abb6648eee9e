# SPDX-License-Identifier: Apache-2.0
"""The shared views of a run: PartialState (processes) and AcceleratorState (options); GradientState from its file."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from .config import checks
from .core import devices, env
from .core.enums import DistributedType, DynamoBackend, PrecisionType
from .core.errors import ConfigurationError
from .core.imports import extension_names
from .core.lazy import public_names
from .core.topology import Topology
from .gradient_state import GradientState as GradientState
from .runtime import backends, channel, group, process

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

    from .config.deepspeed import DeepSpeedPlugin
    from .config.fsdp import FullyShardedDataParallelPlugin
    from .config.megatron import MegatronLMPlugin
    from .config.parallel import TorchTensorParallelPlugin
    from .config.training import TorchDynamoPlugin
    from .parallelism_config import ParallelismConfig


# What the shared states are, except on XLA devices.
SharedDict = dict


class ThreadLocalSharedDict(threading.local):
    """A class attribute with a dict for each thread that all instances share. Each thread may replace its own."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: object, objtype: type | None = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: object, value: dict[Any, Any]) -> None:
        self._storage = value


class ProcessView:
    """The rank of this process, and methods that run code on some processes only."""

    device: torch.device
    num_processes: int
    process_index: int
    local_process_index: int

    @property
    def use_distributed(self) -> bool:
        """Whether several processes work together."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process with rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this.

        Example:
            if accelerator.is_main_process:
                prepare_files()
            accelerator.wait_for_everyone()
        """
        _barrier("wait_for_everyone")

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Return a context in which the main process runs the block first, then all others.

        Raises:
            DistributedOperationException: on the other processes, where the block fails on the main process.

        Example:
            with accelerator.main_process_first():
                dataset = load_dataset("imdb")  # the others read the cache
        """
        with process.goes_first(self.is_main_process, _wait_for_first):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Return a context in which each machine's first process runs the block first, then all others.

        Example:
            with accelerator.local_main_process_first():
                dataset = load_dataset("imdb")
        """
        with process.goes_first(self.is_local_main_process, _wait_for_first):
            yield

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's consecutive slice of `inputs`.

        The lengths of the slices differ by at most one element.

        Args:
            inputs: a list, tuple, tensor or dataset, or a dict of them, with the same length on every process.
            apply_padding: repeat the last element, so that all slices have the same length, as for a `gather`.

        Example:
            >>> with state.split_between_processes(["a", "b", "c"]) as inputs:
            ...     print(inputs)
        """
        with process.split(
            inputs, self.process_index, self.num_processes, apply_padding, self.device
        ) as share:
            yield share

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run only on the main process; the other processes get None.

        Args:
            function: the function.

        Returns:
            The decorated function.

        Example:
            @accelerator.on_main_process
            def report(loss):
                print(loss)
        """
        return self.on_process(function, process_index=0)

    def on_local_main_process(
        self, function: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run only on the first process of each machine; the other processes get None.

        Args:
            function: the function.

        Returns:
            The decorated function.

        Example:
            @accelerator.on_local_main_process
            def clean_scratch():
                shutil.rmtree("/scratch/run")
        """
        return self.on_local_process(function, local_process_index=0)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function to run only on the last process; the other processes get None.

        Args:
            function: the function.

        Returns:
            The decorated function.

        Example:
            @accelerator.on_last_process
            def report(loss):
                print(loss)
        """
        return process.only_if(lambda: self.is_last_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run only on one process; the other processes get None.

        Args:
            function: the function; None if the decorator is used with arguments.
            process_index: the rank of the process; 0 by default. A single process runs the function for any index.

        Returns:
            The decorated function.

        Example:
            @state.on_process(process_index=1)
            def log(): ...
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        rank = process_index or 0
        return process.only_if(
            lambda: not self.use_distributed or self.process_index == rank, function
        )

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run only on one process of each machine; the other processes get None.

        Args:
            function: the function; None if the decorator is used with arguments.
            local_process_index: the rank of the process on its machine; 0 by default. A single process runs the
                function for any index.

        Returns:
            The decorated function.

        Example:
            @accelerator.on_local_process(local_process_index=1)
            def warm_cache():
                ...
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        rank = local_process_index or 0
        return process.only_if(
            lambda: not self.use_distributed or self.local_process_index == rank, function
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print only on the first process of each machine. The arguments are those of `print`.

        Example:
            accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
        """
        if self.is_local_main_process:
            print(*args, **kwargs)


def _barrier(operation: str, error: str = "") -> None:
    state = PartialState()
    if state.num_processes > 1:
        channel.barrier(operation, state.device, state.backend, error)


# Of both kinds of order: one inside the other pairs the end of the inner block with the beginning of the outer one.
_wait_for_first = functools.partial(_barrier, "main_process_first")


class PartialState(ProcessView):
    """The processes of the run: their number, and the rank and device of this process. All instances share one state.

    Args:
        cpu: use the CPU even if an accelerator is available.
        backend, init_method, timeout: passed to `torch.distributed.init_process_group`.

    Attributes: `device`, `process_index`, `num_processes`, `local_process_index`, `distributed_type`, `backend`,
    `debug`, `fork_launched`.

    Example:
        state = PartialState()
        with state.split_between_processes(prompts) as mine:
            results = [generate(prompt) for prompt in mine]
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes: ClassVar[list[str]] = [
        "_cpu", "backend", "device", "debug", "distributed_type", "num_processes", "process_index",
        "local_process_index", "fork_launched",
    ]  # fmt: skip

    backend: str | None
    debug: bool
    distributed_type: DistributedType
    fork_launched: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._start(cpu, **kwargs)

    def _start(
        self,
        cpu: bool,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        _use_sagemaker_dp: bool = False,
        _host_tensors: bool = False,
    ) -> None:
        env.check_run()
        cpu = checks.truth("cpu", cpu) or env.get_flag("ACCELERATE_USE_CPU")
        topology = _present_topology()
        device = devices.select(topology.local_rank, topology.local_world_size, cpu)
        kind = devices.kind_of(device)
        distributed_type, used_backend = DistributedType.NO, None
        if topology.world_size > 1:
            wanted, distributed_type = self._prepare_backend(cpu, _use_sagemaker_dp, backend)
            if _host_tensors and wanted == kind.backend:
                wanted = group.with_host(kind)
            used_backend = group.start(topology, wanted, timeout, init_method or kind.init_method)
            if backends.uses_deepspeed():
                backends.start_deepspeed(device)
        # Set at once, after everything has succeeded.
        self.__dict__.update(
            _cpu=cpu,
            backend=used_backend,
            device=device,
            debug=env.get_flag("ACCELERATE_DEBUG_MODE"),
            distributed_type=distributed_type,
            num_processes=topology.world_size,
            process_index=topology.rank,
            local_process_index=topology.local_rank,
            fork_launched=env.get_flag("FORK_LAUNCHED"),
        )
        if env.get_flag("ACCELERATE_CPU_AFFINITY"):
            from .runtime.hardware import set_numa_affinity

            set_numa_affinity(topology.local_rank)

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, DistributedType]:
        """The backend of several processes and their kind of run. Some packages replace it."""
        topology = _present_topology()
        device = devices.select(topology.local_rank, topology.local_world_size, cpu)
        kind = devices.kind_of(device)
        if sagemaker_dp or backends.uses_smddp():
            return backends.SMDDP, kind.distributed
        # "nccl" is the API's word for the device's own backend.
        if backend in (None, "nccl"):
            return kind.backend, kind.distributed
        return str(backend), kind.distributed

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared state; a process group is not changed."""
        PartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether the shared state exists."""
        return "distributed_type" in self.__dict__

    @property
    def default_device(self) -> torch.device:
        """The device that a single process would use: the accelerator, or the CPU."""
        kind = devices.accelerator_type()
        if kind is None:
            return torch.device("cpu")
        return torch.device(kind)

    def set_device(self) -> None:
        """Make this process's device the current one."""
        if self.device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(self.device)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Leave the process group (the default one). At the end of the run this happens automatically.

        In a function of `notebook_launcher` or `debug_launcher` the default group stays until the function returns,
        so that the function may make another `Accelerator` after `end_training`.
        """
        from .runtime import group as groups

        if group is None and self.fork_launched:
            return
        groups.stop(group)

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._known_attributes:
            raise AttributeError(
                f"`{type(self).__name__}` object has no attribute `{name}`: the state was reset. "
                "Create a new `Accelerator()` or `PartialState()` first."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def _present_topology() -> Topology:
    """The topology of an existing process group, else that of the environment."""
    topology = Topology.from_environment()
    if not group.is_running():
        if topology.launcher == "none":
            return backends.xla_topology() or topology
        return topology
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if topology.world_size == world_size and topology.rank == rank:
        return topology
    # The user created the group with other ranks; only the place on the machine is taken from the environment.
    if topology.launcher == "none":
        return Topology(rank, world_size, rank, world_size, launcher="user")
    return Topology(
        rank, world_size, topology.local_rank, topology.local_world_size, launcher="user"
    )


class AcceleratorState(ProcessView):
    """A PartialState with the options of the run: precision, plugins and mesh. All instances share one state."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes: ClassVar[list[str]] = [
        *PartialState._known_attributes,
        "deepspeed_plugin", "use_ipex", "fsdp_plugin", "megatron_lm_plugin", "dynamo_plugin", "parallelism_config",
        "device_mesh", "torch_tp_plugin",
    ]  # fmt: skip

    backend: str | None
    debug: bool
    distributed_type: DistributedType

    if TYPE_CHECKING:
        fsdp_plugin: FullyShardedDataParallelPlugin
        parallelism_config: ParallelismConfig | None
        device_mesh: DeviceMesh | None
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None
        dynamo_plugin: TorchDynamoPlugin
        torch_tp_plugin: TorchTensorParallelPlugin | None

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if not PartialState._shared_state:
            PartialState(cpu, **kwargs)
        if "_mixed_precision" not in self.__dict__:
            self.__dict__.update(PartialState._shared_state)
        if self.initialized:
            self._check_unchanged(mixed_precision, cpu)
            return
        from .config.training import TorchDynamoPlugin

        precision = _parse_precision(mixed_precision)
        self.__dict__.update(
            deepspeed_plugins=None,
            torch_tp_plugin=torch_tp_plugin,
            parallelism_config=parallelism_config,
            device_mesh=None,
            dynamo_plugin=dynamo_plugin or TorchDynamoPlugin(backend=DynamoBackend.NO),
        )
        # The plugin of the active strategy. The others stay absent: callers use `getattr`.
        if deepspeed_plugin is not None:
            self.deepspeed_plugins = deepspeed_plugin
            if isinstance(deepspeed_plugin, dict):
                plugins = list(deepspeed_plugin.values())
            else:
                plugins = [deepspeed_plugin]
            for plugin in plugins:
                plugin.set_mixed_precision(precision)
            plugins[0].select(_from_accelerator_state=True)
            self.distributed_type = DistributedType.DEEPSPEED
        elif megatron_lm_plugin is not None:
            self.__dict__["megatron_lm_plugin"] = megatron_lm_plugin
            self.distributed_type = DistributedType.MEGATRON_LM
        elif fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
        self.__dict__["_mixed_precision"] = precision

    def _check_unchanged(self, mixed_precision: str | None, cpu: bool) -> None:
        if cpu and not self.__dict__["_cpu"] and self.device.type != "cpu":
            raise ConfigurationError(
                "AcceleratorState already exists without cpu=True: pass cpu=True to the first Accelerator() "
                "or PartialState() of the process, or start a new process"
            )
        if mixed_precision is not None and mixed_precision != self.__dict__["_mixed_precision"]:
            raise ConfigurationError(
                "AcceleratorState already exists with "
                f"mixed_precision={self.__dict__['_mixed_precision']!r} and cannot become "
                f"{mixed_precision!r}: pass it to the first Accelerator() of the process, or "
                "start a new process"
            )

    def __repr__(self) -> str:
        text = f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"
        plugin = self.deepspeed_plugin
        if self.distributed_type is DistributedType.DEEPSPEED and plugin is not None:
            text += f"ds_config: {plugin.deepspeed_config}\n"
        return text

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the shared options, and the state of the processes with `reset_partial_state`."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        """Whether the shared state exists."""
        return "_mixed_precision" in self.__dict__

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16`, `bf16` or `fp8`; under DeepSpeed that of its configuration."""
        plugin = self.deepspeed_plugin
        if plugin is not None:
            config = plugin.deepspeed_config
            for name in ("fp16", "bf16"):
                if config.get(name, {}).get("enabled", False) is True:
                    return name
        return str(self.__dict__["_mixed_precision"])

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin: the only one, or the selected one of several; None without DeepSpeed."""
        # Absent after a reset: `__getattr__` then raises the error of this property.
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict):
            return plugins
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """The DeepSpeed plugin of this name, where several were given as a dict."""
        return self._named_plugins(name)[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed plugin of this name the active one."""
        plugins = self._named_plugins(name)
        for key, plugin in plugins.items():
            if key != name:
                plugin._selected = False
        plugins[str(name)].select(_from_accelerator_state=True)

    def _named_plugins(self, name: str | None) -> dict[str, DeepSpeedPlugin]:
        plugins = self.deepspeed_plugins
        if isinstance(plugins, dict) and name in plugins:
            return plugins
        if isinstance(plugins, dict):
            names = ", ".join(map(repr, plugins))
        else:
            names = "none with a name"
        raise ConfigurationError(f"there is no DeepSpeed plugin {name!r}: Accelerator got {names}")

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP2."""
        return self.distributed_type is DistributedType.FSDP and self.fsdp_plugin.fsdp_version == 2

    @property
    def fork_launched(self) -> bool:
        """See `PartialState.fork_launched`."""
        return PartialState().fork_launched

    @fork_launched.setter
    def fork_launched(self, value: bool) -> None:
        PartialState().fork_launched = value

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """See `PartialState.destroy_process_group`."""
        PartialState().destroy_process_group(group)

    def __getstate__(self) -> dict[str, Any]:
        # The groups of a mesh are those of this process.
        return {**self.__dict__, "device_mesh": None}

    def __getattr__(self, name: str) -> Any:
        is_reset = "_mixed_precision" not in self.__dict__
        if is_reset and name in (*self._known_attributes, "mixed_precision"):
            raise AttributeError(
                f"`AcceleratorState` object has no attribute `{name}`: the state was reset. "
                "Create a new `Accelerator()` first."
            )
        raise AttributeError(f"'AcceleratorState' object has no attribute '{name}'")


def _parse_precision(requested: str | None) -> str:
    origin = "mixed_precision"
    if requested is None:
        requested = env.get("ACCELERATE_MIXED_PRECISION", "no")
        origin = "ACCELERATE_MIXED_PRECISION"
    text = str(getattr(requested, "value", requested)).lower()
    if text in PrecisionType.list():
        return text
    added = extension_names("precision")
    if text not in added:
        choices = ", ".join([*PrecisionType.list(), *added])
        raise ConfigurationError(f"{origin}={requested!r} is unknown: use one of {choices}")
    return text


def is_initialized() -> bool:
    """Whether the shared options exist, as they do after an `Accelerator` was created."""
    return bool(AcceleratorState._shared_state)


def do_nothing(*args: object, **kwargs: object) -> None:
    """Return None."""


def wait_for_everyone() -> None:
    """Wait until every process has called this."""
    PartialState().wait_for_everyone()


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)
