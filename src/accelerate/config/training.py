# SPDX-License-Identifier: Apache-2.0
"""Options of a training run: data loading, accumulation, project folders, DDP, process group, profile, compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..core import env
from ..core.buckets import is_bucket
from ..core.enums import DDPCommunicationHookType, DynamoBackend
from ..core.errors import ConfigurationError
from ..core.files import path_text, user_path
from ..core.messages import warn
from ..core.options import DYNAMO_MODES
from . import checks


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders share a dataset between processes.

    Fields:
        split_batches: the loader's batch size is the total over all processes, and each process takes its part.
        dispatch_batches: the main process reads and sends each process its part; None decides by the dataset
            (iterable: yes).
        even_batches: fill the last batch with samples from the start, so that all processes have the same number.
        use_seedable_sampler: shuffle from (data_seed + epoch), the same on any number of processes.
        data_seed: the seed of that sampler; None uses torch's seed at `prepare`.
        non_blocking: overlap copies to the device with work on the host (needs pinned memory).
        use_stateful_dataloader: build loaders as torchdata's `StatefulDataLoader`.
        device_placement: "lazy" leaves batches on the host, and the forward of a prepared model moves its inputs to
            the device. Defaults to ACCELERATE_DEVICE_PLACEMENT; otherwise the loader moves them.

    Example:
        config = DataLoaderConfiguration(non_blocking=True, use_seedable_sampler=True)
        accelerator = Accelerator(dataloader_config=config)
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    device_placement: str | None = None

    def __post_init__(self) -> None:
        checks.fields_of(self)
        self.device_placement = checks.value_or(
            self.device_placement, "ACCELERATE_DEVICE_PLACEMENT"
        )
        if self.device_placement is None:
            return
        self.device_placement = checks.word("device_placement", self.device_placement, ("lazy",))
        if self.dispatch_batches:
            raise ConfigurationError(
                "device_placement='lazy' does not work with dispatch_batches=True, where the "
                "main process sends batches to the devices. Remove one of them"
            )


@dataclass
class GradientAccumulationPlugin(checks.KwargsHandler):
    """How gradients accumulate over batches.

    Fields:
        num_steps: batches for each optimizer step, at least 1.
        adjust_scheduler: the scheduler also counts batches without an optimizer step.
        sync_with_dataloader: the end of a loader ends the window, even if it is short.
        sync_each_batch: reduce the gradients at each batch (less memory under sharding, more communication).
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        checks.fields_of(self)
        if self.num_steps is not None:
            checks.integer("GradientAccumulationPlugin.num_steps", self.num_steps)


@dataclass
class ProjectConfiguration:
    """Where a run writes its files.

    Fields:
        project_dir: the run's folder, or its location in a bucket ("s3://bucket/runs/gpt").
        logging_dir: the folder of trackers and telemetry. By default project_dir, and for a bucket the local folder
            with the name that the run has in the bucket ("runs/gpt").
        automatic_checkpoint_naming: `save_state()` writes checkpoints/checkpoint_<iteration> below `project_dir`.
        total_limit: how many checkpoints to keep. iteration: the number of the next one.
        save_on_each_node: write a copy on each machine, if they do not share a file system.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        checks.fields_of(self)
        checks.integer("ProjectConfiguration.iteration", self.iteration, least=0)
        if self.total_limit is not None:
            checks.integer("ProjectConfiguration.total_limit", self.total_limit)
        if self.logging_dir is not None:
            self.logging_dir = path_text(self.logging_dir, "ProjectConfiguration.logging_dir")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` with it where it has none yet."""
        if project_dir is None:
            self.project_dir = None
        else:
            self.project_dir = path_text(project_dir, "project_dir")
        if self.logging_dir is None:
            folder = self.project_dir
            if is_bucket(folder):
                bucket, _, prefix = str(folder).partition(":")[2].strip("/").partition("/")
                folder = prefix or bucket
            self.logging_dir = folder


@dataclass
class DistributedDataParallelKwargs(checks.KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel` and of its communication hook.

    The fields that are not listed are the arguments of torch's class, with the same names and defaults.

    Fields:
        bucket_cap_mb: size of a gradient bucket, in MiB.
        find_unused_parameters: search each forward for parameters without a gradient. Set this if some steps do not
            use all parameters.
        comm_hook: compression of the gradients for the reduction: fp16, bf16, power_sgd or batched_power_sgd.
        comm_wrapper: fp16 or bf16, the dtype in which `comm_hook` sends its data.
        comm_state_option: arguments of torch's `PowerSGDState`, such as `matrix_approximation_rank`.

    Raises:
        ConfigurationError: a hook is unknown, or a wrapper has no hook to wrap.

    Example:
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.fields_of(self)
        self.comm_hook = checks.member("comm_hook", self.comm_hook, DDPCommunicationHookType)
        self.comm_wrapper = checks.member(
            "comm_wrapper", self.comm_wrapper, DDPCommunicationHookType
        )
        wrappers = (
            DDPCommunicationHookType.NO,
            DDPCommunicationHookType.FP16,
            DDPCommunicationHookType.BF16,
        )
        if self.comm_wrapper not in wrappers:
            raise ConfigurationError(
                f"comm_wrapper={self.comm_wrapper.value!r}: use one of no, fp16, bf16"
            )
        if (
            self.comm_wrapper is not DDPCommunicationHookType.NO
            and self.comm_hook is DDPCommunicationHookType.NO
        ):
            raise ConfigurationError(
                f"comm_wrapper={self.comm_wrapper.value!r} wraps a comm_hook, but comm_hook is "
                "not set"
            )

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The fields that are DDP's own arguments (without those of the hook)."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the hook on a DDP model; nothing to do if there is none."""
        from ..parallel.ddp.comm_hooks import register

        register(model, self.comm_hook, self.comm_wrapper, self.comm_state_option)


@dataclass
class InitProcessGroupKwargs(checks.KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Fields:
        backend: name of the backend. The default "nccl" stands for the usual backend of the device, such as gloo on
            the CPU. Any other name is used unchanged.
        init_method: URL at which the processes meet. None uses the variables MASTER_ADDR and MASTER_PORT.
        timeout: the longest time that a collective waits for other ranks. None keeps torch's default.

    Example:
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=60))])
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(checks.KwargsHandler):
    """Options of `torch.profiler.profile`.

    Fields:
        activities: of cpu, cuda, xpu, mtia, hpu; None takes torch's choice.
        schedule_option: arguments of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first).
        on_trace_ready: called with the profiler each time a trace is ready.
        output_trace_dir: folder for one `profile_<rank>.json` for each process, in Chrome's trace format.
        record_shapes: record the shapes of the inputs of each operation.
        profile_memory: record allocations.
        with_stack: record the file and line of each operation.
        with_flops: estimate the floating point operations of matrix products and convolutions.
        with_modules: record the modules of a TorchScript model.

    Raises:
        ConfigurationError: an activity is unknown.

    Example:
        accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir="traces")])
        with accelerator.profile():
            train_some_steps()
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        checks.fields_of(self)
        if self.activities is not None:
            if isinstance(self.activities, str):
                activities = [self.activities]
            else:
                activities = self.activities
            known = ("cpu", "cuda", "xpu", "mtia", "hpu")
            self.activities = [
                checks.word("ProfileKwargs.activities", name, known) for name in activities
            ]
        if self.output_trace_dir is not None:
            self.output_trace_dir = str(
                user_path(self.output_trace_dir, "ProfileKwargs.output_trace_dir")
            )

    def build(self) -> Any:
        """A `torch.profiler.profile` of these options, not started."""
        import torch

        activities = None
        if self.activities is not None:
            activities = [
                getattr(torch.profiler.ProfilerActivity, name.upper()) for name in self.activities
            ]
        if self.schedule_option is None:
            schedule = None
        else:
            schedule = torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class OptimizerOffloadKwargs(checks.KwargsHandler):
    """Keep optimizer states in host memory between steps; a step streams them through the device in chunks.

    For torch's elementwise optimizers on one accelerator and with DDP. FSDP2 and DeepSpeed have their own options
    (`fsdp_plugin.cpu_offload`, `offload_optimizer_device`). It has no effect on the CPU. Hooks of the
    optimizer's step are called for each chunk. Example:

        accelerator = Accelerator(kwargs_handlers=[OptimizerOffloadKwargs()])

    Args:
        chunk_size: bytes of state in a chunk. Three chunks are on the device during a step.
    """

    chunk_size: int = 64 * 2**20

    def __post_init__(self) -> None:
        checks.integer("OptimizerOffloadKwargs.chunk_size", self.chunk_size)


@dataclass
class TorchDynamoPlugin(checks.KwargsHandler):
    """Arguments of `torch.compile`. If one is None, the variable ACCELERATE_DYNAMO_* of its name sets it.

    Fields:
        backend: name of the compiler, such as "inductor". "no" leaves models uncompiled.
        mode: a named set of the backend's options, such as "max-autotune". Excludes `options`.
        fullgraph: raise an error if the model cannot be compiled as one graph.
        dynamic: compile for varying shapes. None lets torch decide.
        options: the backend's options, a dict. Excludes `mode`.
        disable: return models uncompiled.
        use_regional_compilation: compile each repeated block once, instead of the entire model.

    Raises:
        ConfigurationError: a value is unknown.

    Example:
        accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))
    """

    backend: DynamoBackend = None  # type: ignore[assignment]
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        backend = checks.value_or(self.backend, "ACCELERATE_DYNAMO_BACKEND", "no")
        self.backend = checks.member(
            "backend", str(getattr(backend, "value", backend)).upper(), DynamoBackend
        )
        names = ("options", "fullgraph", "dynamic", "use_regional_compilation")
        names_given = [name for name in names if getattr(self, name)] + ["mode"] * (
            self.mode not in (None, "default")
        )
        if self.mode is None and self.options is None:
            self.mode = env.get("ACCELERATE_DYNAMO_MODE", "default")
        if self.mode is not None:
            self.mode = checks.word("mode", self.mode, DYNAMO_MODES)
        self.fullgraph = checks.truth_or(
            "fullgraph", self.fullgraph, "ACCELERATE_DYNAMO_USE_FULLGRAPH"
        )
        self.use_regional_compilation = checks.truth_or(
            "use_regional_compilation",
            self.use_regional_compilation,
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        )
        self.disable = checks.truth("disable", self.disable)
        self.dynamic = checks.value_or(self.dynamic, "ACCELERATE_DYNAMO_USE_DYNAMIC")
        if self.dynamic is not None:
            self.dynamic = checks.truth("dynamic", self.dynamic)
        if names_given and self.backend is DynamoBackend.NO:
            warn(
                f"TorchDynamoPlugin: {', '.join(names_given)} has no effect with backend='no', which compiles "
                "nothing. Set backend='inductor', or another of torch's"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as arguments of `torch.compile` (the backend by its lower-case name)."""
        values = super().to_dict()
        values["backend"] = values["backend"].value.lower()
        return values

    def to_kwargs(self) -> dict[str, Any]:
        """What `torch.compile` takes of these options."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        # Fields that the environment fills differ from the class's defaults also where nothing was set.
        unset = {"backend": "no", "mode": "default", "fullgraph": False}
        return {
            name: value
            for name, value in kwargs.items()
            if name not in unset or unset[name] != value
        }
