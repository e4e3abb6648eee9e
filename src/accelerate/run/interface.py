# SPDX-License-Identifier: Apache-2.0
"""The base class of `Accelerator`: what it shows of its run, control of execution, and collectives."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from .. import collectives
from ..config import checks
from ..config.training import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)
from ..core.enums import DistributedType, FP8BackendType
from ..core.lazy import ROOT
from ..core.objects import computed, forwarded
from ..core.observers import RunLoop
from ..data_loader.metrics import gather_for_metrics
from ..parallel.base import Strategy
from ..parallel.ddp.strategy import DataParallel
from ..precision.amp import MixedPrecision
from ..precision.base import Precision
from ..state import AcceleratorState, GradientState, ProcessView
from .objects import RunObjects
from .resolve import Plan

if TYPE_CHECKING:
    from ..config.precision import AutocastKwargs
    from ..parallelism_config import ParallelismConfig

P = ParamSpec("P")
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

_REPLACEABLE: dict[str, Callable[..., Any]] = {}


def replaceable(method: Method) -> Method:
    """Register a method whose replacement (of a subclass, or assigned by a package) another method has to call."""
    _REPLACEABLE[method.__name__] = method
    return method


def replaced(path: str, exporters: Iterable[str]) -> Any:
    """Return what a package has assigned in place of a function, in one of the modules that have it; or None.

    Args:
        path: the module of this package that defines the function, and its name.
        exporters: modules of this package under whose names it is imported as well.
    """
    home, _, name = path.rpartition(".")
    definition = sys.modules.get(f"{ROOT}.{home}")
    for exporter in (*exporters, home):
        module = sys.modules.get(f"{ROOT}.{exporter}")
        if module is None:
            continue
        # Its own names: others would be imported.
        value = vars(module).get(name)
        if value is None:
            continue
        # A function that this package defines has the names of its module as its globals.
        names = getattr(value, "__globals__", None)
        if definition is None or names is not vars(definition):
            return value
    return None


def observed(
    collective: Callable[Concatenate[RunInterface, P], T],
) -> Callable[Concatenate[RunInterface, P], T]:
    """Tell the loop of the run of a method that communicates, and its observers how long it has taken."""

    @functools.wraps(collective)
    def call(self: RunInterface, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._loop.before_collective()
        begin = perf_counter()
        result = collective(self, *args, **kwargs)
        for observer in self._loop.active:
            observer.after_collective(perf_counter() - begin)
        return result

    return call


def _mesh_rank(dimension: str, meaning: str) -> Any:
    def rank(self: RunInterface) -> int:
        mesh = self.state.device_mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            raise RuntimeError(f"{meaning} is not configured. Set `parallelism_config` first.")
        return int(mesh[dimension].get_local_rank())

    return property(
        rank,
        doc=f"This process's rank in the mesh dimension {dimension}. {meaning} must be configured.",
    )


class RunInterface(ProcessView):
    """The process, the options and the layout of a run under the API's names, and what runs on some processes."""

    plan: Plan
    state: AcceleratorState
    gradient_state: GradientState
    precision: Precision
    strategy: Strategy
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    flag_tensor: torch.Tensor | None
    _objects: RunObjects
    _loop: RunLoop

    def replacement(self, name: str) -> Callable[..., Any] | None:
        """Return what a subclass or an assignment uses instead of a method of the package; None by default.

        Args:
            name: the name of a method that another one reaches through `self`.
        """
        method = getattr(self, name)
        if getattr(method, "__func__", None) is _REPLACEABLE[name]:
            return None
        replaced: Callable[..., Any] = method
        return replaced

    # -- identity of the process

    distributed_type: DistributedType = forwarded(
        "state.distributed_type", "How the processes work together."
    )
    num_processes: int = forwarded("state.num_processes", "The number of processes in the run.")
    process_index: int = forwarded("state.process_index", "The rank of this process.")
    local_process_index: int = forwarded(
        "state.local_process_index", "The rank of this process on its machine."
    )
    device: torch.device = forwarded("state.device", "The device of this process.")
    mixed_precision: str = forwarded(
        "state.mixed_precision", "The precision of the run: no, fp16, bf16 or fp8."
    )

    @property
    def multi_device(self) -> bool:
        """Whether several processes work together, each on an accelerator."""
        return self.use_distributed and self.device.type != "cpu"

    deepspeed_plugin: Any = forwarded(
        "state.deepspeed_plugin", "The selected DeepSpeed plugin, or None."
    )
    is_fsdp2: bool = forwarded("state.is_fsdp2", "Whether models are sharded with FSDP2.")

    # -- data between the ranks

    @replaceable
    @observed
    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along dimension 0, in rank order.

        It sends one message, whatever the number of tensors.

        Args:
            tensor: nested tensors, with the same structure and shapes on every process.

        Returns:
            The same structure on every process, with `num_processes` times the rows.

        Raises:
            DistributedOperationException: the structures, shapes or dtypes differ between processes.

        Example:
            losses = accelerator.gather(loss.detach())  # shape (num_processes,)
        """
        return collectives.gather(tensor)

    @observed
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather one row for each sample, without the rows that pad the last batch.

        Ranks that read the same samples (tensor, context and pipeline parallelism) contribute them once. After a
        forward on sharded sequences each rank contributes its shard.

        Args:
            input_data: nested tensors with one row for each sample of the batch, or other objects.
            use_gather_object: gather `input_data` as objects even if it consists of tensors.

        Returns:
            The gathered tensors; for objects, the flat list over all ranks.

        Example:
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        """
        strategy = self.strategy
        return gather_for_metrics(
            input_data,
            self.gradient_state.active_dataloader,
            use_gather_object,
            strategy.data_shard[1],
            strategy.data_group,
            None if strategy.sequence is None else strategy.sequence.last_group,
            self.replacement("gather"),
        )

    @observed
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average tensors over all processes.

        Args:
            tensor: nested tensors, with the same structure and shapes on every process.
            reduction: "sum", "mean", "max", "min", or "none", which returns `tensor`.
            scale: a factor for the result.

        Returns:
            The same structure on every process.

        Raises:
            DistributedOperationException: the structures, shapes or dtypes differ between processes.

        Example:
            mean_loss = accelerator.reduce(loss.detach(), "mean")
        """
        return collectives.reduce(tensor, reduction, scale)

    @observed
    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors to the largest size on any process.

        Args:
            tensor: nested tensors.
            dim: the dimension to pad.
            pad_index: the value of the padding.
            pad_first: pad at the beginning instead of the end.

        Returns:
            The same structure, with the same size along `dim` on every process.

        Example:
            tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=tokenizer.pad_token_id)
            tokens = accelerator.gather(tokens)
        """
        return collectives.pad_across_processes(
            tensor, dim=dim, pad_index=pad_index, pad_first=pad_first
        )

    wait_for_everyone = replaceable(observed(ProcessView.wait_for_everyone))

    # -- a flag that any process may raise

    def set_trigger(self) -> None:
        """Set a flag on this process, which `check_trigger` then reports on every process.

        Example:
            if not torch.isfinite(loss):
                accelerator.set_trigger()
            if accelerator.check_trigger():  # the same answer on every process
                break
        """
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any process called `set_trigger` since the last True. Every process must call it.

        Example:
            if accelerator.check_trigger():
                break
        """
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        if bool(self.reduce(self.flag_tensor, "sum") >= 1):
            self.flag_tensor = torch.tensor(0, device=self.device)
            return True
        return False

    # -- options by the API's names

    @property
    def ddp_handler(self) -> Any:
        """The `DistributedDataParallelKwargs` of the run, or None."""
        return self.plan.handlers.ddp

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs | None) -> None:
        # transformers 4 sets it after the constructor, before `prepare`.
        self.plan.handlers.ddp = value
        if isinstance(self.strategy, DataParallel):
            self.strategy.options = value or DistributedDataParallelKwargs()

    scaler_handler: Any = forwarded(
        "plan.handlers.scaler", "The `GradScalerKwargs` of the run, or None.", settable=True
    )
    init_handler: Any = forwarded(
        "plan.handlers.init", "The `InitProcessGroupKwargs` of the run, or None.", settable=True
    )

    @property
    def autocast_handler(self) -> Any:
        """The `AutocastKwargs` of the run, or None."""
        return self.plan.handlers.autocast

    @autocast_handler.setter
    def autocast_handler(self, value: AutocastKwargs | None) -> None:
        self.plan.handlers.autocast = value
        if isinstance(self.precision, MixedPrecision):
            self.precision.options = value

    profile_handler: Any = forwarded(
        "plan.handlers.profile", "The `ProfileKwargs` of the run, or None.", settable=True
    )

    fp8_recipe_handler: Any = computed(
        lambda self: self.plan.handlers.fp8_recipe, "The recipe for fp8 training, or None."
    )
    ao_recipe_handler: Any = forwarded(
        "plan.handlers.ao", "The `AORecipeKwargs` of the run, or None.", settable=True
    )
    te_recipe_handler: Any = forwarded(
        "plan.handlers.te", "The `TERecipeKwargs` of the run, or None.", settable=True
    )
    msamp_recipe_handler: Any = forwarded(
        "plan.handlers.msamp", "The `MSAMPRecipeKwargs` of the run, or None.", settable=True
    )

    has_fp8_handler: bool = computed(
        lambda self: self.fp8_recipe_handler is not None,
        "Whether a recipe for fp8 training was passed.",
    )

    fp8_enabled: bool = computed(
        lambda self: self.mixed_precision == "fp8", "Whether the run computes in fp8."
    )

    # Transformer Engine's autocast is put around the forward before the model is laid out, in every layout.
    delayed_fp8_autocast = False

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; `NO` for other precisions."""
        return getattr(self.precision, "backend", FP8BackendType.NO)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16, or None."""
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.precision.scaler = scaler
        for optimizer in self._objects.optimizers:
            optimizer.scaler = scaler

    native_amp: bool = forwarded(
        "precision.native_amp",
        "Whether forwards run under torch's autocast. Set to False, those of mixed precision do not either.",
        settable=True,
    )

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The `DeepSpeedEngineWrapper`; None without DeepSpeed and before `prepare`."""
        return getattr(self.strategy, "engine", None)

    split_batches: bool = forwarded(
        "dataloader_config.split_batches", "Whether batch sizes are totals over all processes."
    )
    dispatch_batches: bool | None = forwarded(
        "dataloader_config.dispatch_batches",
        "Whether the main process reads all batches and distributes them; None decides by the dataset.",
    )

    even_batches: bool = forwarded(
        "dataloader_config.even_batches",
        "Whether the last batches are padded so that every process has the same number.",
        settable=True,
    )

    use_seedable_sampler: bool = forwarded(
        "dataloader_config.use_seedable_sampler",
        "Whether shuffling depends only on the seed and the epoch.",
    )

    non_blocking: bool = forwarded(
        "dataloader_config.non_blocking", "Whether copies to the device are asynchronous."
    )
    use_stateful_dataloader: bool = forwarded(
        "dataloader_config.use_stateful_dataloader",
        "Whether loaders are torchdata's `StatefulDataLoader`.",
    )

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of batches for each optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = checks.integer(
            "gradient_accumulation_steps", steps
        )

    sync_gradients: bool = forwarded(
        "gradient_state.sync_gradients",
        "Whether the current batch ends an accumulation window, so that gradients synchronize.",
        settable=True,
    )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._objects.optimizers)

    # -- the layout

    parallelism_config: ParallelismConfig | None = forwarded(
        "state.parallelism_config", "The sizes of the device mesh, or None."
    )

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh of the `parallelism_config`, or None without one."""
        if self.parallelism_config is None:
            return None
        return self.state.device_mesh

    is_composable_parallelism_enabled: bool = forwarded(
        "state.is_fsdp2", "Whether models are sharded with FSDP2."
    )

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the files of `save_model`, which all processes call."""
        each_node = self.project_configuration.save_on_each_node
        if each_node:
            return self.state.is_local_main_process
        return self.state.is_main_process

    data_parallel_rank: int = _mesh_rank("dp_replicate", "Data parallelism")
    data_parallel_shard_rank: int = _mesh_rank("dp_shard", "Shard-based data parallelism")
    tensor_parallel_rank: int = _mesh_rank("tp", "Tensor parallelism")
    context_parallel_rank: int = _mesh_rank("cp", "Context parallelism")
    pipeline_parallel_rank: int = _mesh_rank("pp", "Pipeline parallelism")
