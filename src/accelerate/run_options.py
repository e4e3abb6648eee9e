# SPDX-License-Identifier: Apache-2.0
"""The base class of `Accelerator` with the options and the layout of the run, under the API's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .config.training import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
    check_accumulation_steps,
)
from .core.enums import FP8BackendType
from .parallel.base import Strategy
from .parallel.ddp.strategy import DataParallel
from .precision.base import Precision
from .resolve import Plan
from .run_objects import RunObjects
from .state import AcceleratorState, GradientState

if TYPE_CHECKING:
    from .parallelism_config import ParallelismConfig


class RunOptions:
    """Properties that read what `resolve` decided; a few of them can be set."""

    plan: Plan
    state: AcceleratorState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    precision: Precision
    strategy: Strategy
    dataloader_config: DataLoaderConfiguration
    _objects: RunObjects

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

    @property
    def scaler_handler(self) -> Any:
        """The `GradScalerKwargs` of the run, or None."""
        return self.plan.handlers.scaler

    @property
    def init_handler(self) -> Any:
        """The `InitProcessGroupKwargs` of the run, or None."""
        return self.plan.handlers.init

    @property
    def autocast_handler(self) -> Any:
        """The `AutocastKwargs` of the run, or None."""
        return self.plan.handlers.autocast

    @property
    def profile_handler(self) -> Any:
        """The `ProfileKwargs` of the run, or None."""
        return self.plan.handlers.profile

    @property
    def fp8_recipe_handler(self) -> Any:
        """The recipe of fp8 training, or None."""
        handlers = self.plan.handlers
        return handlers.fp8 or handlers.ao or handlers.te or handlers.msamp

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; `NO` for other precisions."""
        return getattr(self.precision, "backend", FP8BackendType.NO)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16 training, or None."""
        return self.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether the forward runs under torch's autocast."""
        return self.precision.native_amp

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The `DeepSpeedEngineWrapper`; None without DeepSpeed and before `prepare`."""
        return getattr(self.strategy, "engine", None)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads all batches and distributes them; None decides by the dataset."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are filled up so that every process has the same number."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends only on the seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device are asynchronous."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's `StatefulDataLoader`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of batches for each optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = check_accumulation_steps(steps, "gradient_accumulation_steps")

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an accumulation window, so that gradients synchronize."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._objects.optimizers)

    # -- the layout

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the device mesh, or None."""
        config: ParallelismConfig | None = self.state.parallelism_config
        return config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh of the `parallelism_config`, or None without one."""
        return None if self.parallelism_config is None else self.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded with FSDP2."""
        return self.state.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the files of `save_model`, which all processes call."""
        each_node = self.project_configuration.save_on_each_node
        return self.state.is_local_main_process if each_node else self.state.is_main_process

    @property
    def data_parallel_rank(self) -> int:
        """This process's rank in the mesh dimension of replicas."""
        return self._mesh_rank("dp_replicate", "Data parallelism")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's rank in the mesh dimension of FSDP shards."""
        return self._mesh_rank("dp_shard", "Shard-based data parallelism")

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's rank in the mesh dimension of tensor parallelism."""
        return self._mesh_rank("tp", "Tensor parallelism")

    @property
    def context_parallel_rank(self) -> int:
        """This process's rank in the mesh dimension of context parallelism."""
        return self._mesh_rank("cp", "Context parallelism")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's pipeline stage."""
        return self._mesh_rank("pp", "Pipeline parallelism")

    def _mesh_rank(self, dimension: str, meaning: str) -> int:
        mesh = self.state.device_mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            raise RuntimeError(f"{meaning} is not configured. Set `parallelism_config` first.")
        return int(mesh[dimension].get_local_rank())
