# SPDX-License-Identifier: Apache-2.0
"""What FSDP2, tensor parallelism and pipelines share: strategies whose processes have shards of a model."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from ..collectives import rng
from ..core.devices import kind_of
from ..core.errors import PrepareError
from ..core.modules import class_name
from ..logging import MultiProcessAdapter, get_logger
from ..parallelism_config import ParallelismConfig
from ..precision.base import Precision
from ..runtime import group, mesh
from ..torch_internals.compiled import uncompiled
from ..torch_internals.fsdp2 import (
    read_again,
    replaceable,
    sharded_parameter,
    shards_of,
    unsharded_parameter,
)
from . import gradients
from .accumulated import AccumulatedGradients
from .base import Bundle, Strategy
from .context.region import ContextParallel
from .fsdp import state as fsdp_state
from .gradients import AgreeingScaler, GradientReducer
from .matrices import share_step
from .prepared import PreparedModel, PreparedOptimizer
from .sharded_optimizer import (
    ParameterPlaces,
    Replacements,
    check_trained,
    lay_out_step,
    reshard_before_step,
)
from .unwrap import require_state_dict

logger: MultiProcessAdapter = get_logger(__name__)

_REDISTRIBUTE_LOG = "torch.distributed.tensor._redistribute"


def _is_about_layout(record: logging.LogRecord) -> bool:
    """Drop torch's note that a DTensor which two mesh dimensions shard in the same way is gathered in two messages."""
    return "While redistributing from" not in record.getMessage()


class ShardedModel(PreparedModel):
    """A model whose parameters are DTensors.

    Args:
        module: what `prepare` returns to the user.
        precision: the run's precision.
        device: the run's device.
        sequence: splits sequences over ranks; None if none is split.
        saves_shards: whether a checkpoint stores shards.
    """

    is_partial = True

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        sequence: ContextParallel | None = None,
        saves_shards: bool = False,
    ) -> None:
        super().__init__(module, precision)
        self.device = device
        self.sequence = sequence
        self.saves_shards = saves_shards
        self.reducers: list[GradientReducer] = []

    @property
    def inner(self) -> nn.Module:
        """The module without the compiled wrapper."""
        module: nn.Module = uncompiled(self.module)
        return module

    def units(self) -> Iterable[nn.Module]:
        """The modules that contain the FSDP2 units."""
        return [self.inner]

    # -- the step

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in this context leave to a later one what they do not reduce themselves."""
        return gradients.deferred(self.reducers)

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """Those of the module, and the shards."""
        return itertools.chain(
            self.module.parameters(),
            (sharded_parameter(shard) for shard in shards_of(self.units())),
        )

    def reshard(self) -> None:
        """Reshard all FSDP2 units."""
        reshard(self.units())

    @contextlib.contextmanager
    def swappable(self) -> Iterator[None]:
        """FSDP2 ignores replaced parameters in this context."""
        self.reshard()
        with replaceable(shards_of(self.units())):
            yield

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The full state under the user's names: on the host of rank 0, empty on the other ranks."""
        # Tensors of inference mode could not be trained with after they are loaded.
        with torch.inference_mode(False):
            return fsdp_state.full_model_state(self.inner)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which only rank 0 needs to have; every rank calls it."""
        fsdp_state.load_full_model_state(self.inner, state, self.device, strict)

    def accumulated_gradients(self) -> AccumulatedGradients | None:
        """The gradients of an unfinished window, sharded and unsharded."""
        self.reshard()
        return AccumulatedGradients(self.inner)

    def prepared_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        """An optimizer whose state is sharded."""
        return ShardedOptimizer(optimizer, self)


class ShardedOptimizer(PreparedOptimizer):
    """An optimizer of a `ShardedModel`."""

    model: ShardedModel

    def state_dict(self) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        return fsdp_state.full_optimizer_state(self.model.inner, self.inner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer state of a single process, which only rank 0 needs to have; every rank calls it."""
        fsdp_state.load_full_optimizer_state(self.model.inner, self.inner, state)


class ShardedStrategy(Strategy):
    """Parameters become DTensors on one mesh; optimizers made before that are re-pointed by identity."""

    shards_parameters = True  # whether optimizers step shards of parameters (DTensors)

    def __init__(
        self, device: torch.device, precision: Precision, layout: ParallelismConfig | None = None
    ) -> None:
        super().__init__(device, precision)
        # A filter that is there is not added again.
        logging.getLogger(_REDISTRIBUTE_LOG).addFilter(_is_about_layout)
        if not dist.is_initialized():
            group.start_alone(kind_of(device))
        world = dist.get_world_size()
        self.layout: ParallelismConfig = layout or mesh.all_sharded(world)
        self.mesh: dist.DeviceMesh | None = mesh.build_mesh(self.layout, world, device.type)
        self.tensor_group: dist.ProcessGroup | None = mesh.group_of(self.mesh, "tp")
        # The ranks that have the same values and gradients of what is not sharded.
        self.replicas: dist.ProcessGroup | None = self.tensor_group
        self._data_shard = mesh.data_shard(self.layout, dist.get_rank())
        sizes = self.layout.sizes
        self._gradient_ranks: int = self.layout.data_parallel_size * sizes["cp"] * sizes["sp"]
        self.replacements: Replacements = Replacements()
        if precision.scaler is not None:
            precision.scaler = AgreeingScaler(precision.scaler, device)
        self.sequence: ContextParallel | None = ContextParallel.of_layout(self.layout, self.mesh)
        if self.layout.data_parallel_size != world:
            self.data_group: dist.ProcessGroup | None = mesh.group_of(self.mesh, "dp")

    @property
    def data_shard(self) -> tuple[int, int]:
        """One shard for each data-parallel coordinate of the mesh."""
        return self._data_shard

    @property
    def gradient_ranks(self) -> int:
        """The ranks with other data or other tokens."""
        return self._gradient_ranks

    def sync_rng_state(self) -> None:
        """Dropout on activations that all tensor-parallel ranks have must drop the same elements on all of them."""
        if self.tensor_group is not None:
            rng.sync_rng_state(self.tensor_group, self.device)

    def as_prepared(self, module: nn.Module) -> ShardedModel:
        """A prepared model without FSDP2 units."""
        return ShardedModel(module, self.precision, self.device, self.sequence)

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Lay out each model and re-point the optimizers. Models for evaluation are only placed."""
        if bundle.evaluation:
            return super().prepare(bundle)
        prepared_models = []
        for model in bundle.models:
            places = ParameterPlaces(model)
            prepared = self.prepare_model(model)
            self.replacements.add(places.replaced())
            require_state_dict(prepared.module)
            prepared_models.append(prepared)
            self.prepared.add([prepared])
        for optimizer in bundle.earlier:
            if self.replacements.repoint(optimizer):
                reshard_before_step(optimizer, units_of(prepared_models))
        for optimizer in bundle.optimizers:
            self.replacements.repoint(optimizer)
        check_trained(bundle, prepared_models, self.prepared)
        return prepared_models

    def lay_out_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step of shards that of a single process, without stale unsharded parameters."""
        if not self.shards_parameters:
            share_step(optimizer, self.replicas)
        else:
            lay_out_step(optimizer, self.replicas)
            reshard_before_step(optimizer, units_of(self.prepared))

    def join(
        self, joinables: Sequence[object], loaders: Sequence[object], even_batches: bool | None
    ) -> contextlib.AbstractContextManager[None]:
        """No effect but a warning: all ranks gather units together, batch by batch."""
        if self.data_shard[1] > 1:
            logger.warning(
                f"join_uneven_inputs has no effect under {self.name}: all processes have the same "
                "number of batches. Accelerator(exact=True) counts each sample once"
            )
        return super().join(joinables, loaders, even_batches)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The backward, in which split attention may be recomputed, and the reductions that are left."""
        split = contextlib.nullcontext() if self.sequence is None else self.sequence.recomputing()
        tensor = self.layout.tp_handler
        sharded = (
            loss_parallel()
            if tensor is not None and tensor.loss_parallel
            else contextlib.nullcontext()
        )
        if isinstance(loss, DTensor):
            units = units_of(self.prepared)
            shards = {sharded_parameter(shard).device_mesh for shard in shards_of(units)}  # type: ignore[attr-defined]
            if loss.device_mesh in shards:
                raise _mixed_loss()
        try:
            with split, sharded:
                super().backward(loss, **kwargs)
        except RuntimeError as error:
            if isinstance(loss, DTensor) and "mixed torch.Tensor and DTensor" in str(error):
                raise _mixed_loss() from error
            raise
        for prepared in self.prepared:
            gradients.finish(prepared.reducers)

    def window_gradients(self, models: Sequence[nn.Module]) -> list[torch.Tensor]:
        """Also those that wait for a reduction, of models that this backward has not reached."""
        if len(models) == 1:
            return super().window_gradients(models)
        gradients: list[torch.Tensor] = []
        for prepared in self.prepared:
            window = prepared.accumulated_gradients()
            if prepared.module in models and isinstance(window, AccumulatedGradients):
                trained = set(map(id, prepared.trained_parameters()))
                gradients += window.of_parameters(trained)
        return gradients

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, for DTensors of any mesh."""
        return gradients.clip_grad_norm(parameters, max_norm, norm_type)

    def accumulated_norm(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """As the base class, with the gradients that FSDP2 keeps beside the shards."""
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        requested = {id(parameter) for parameter in parameters}
        accumulated: list[torch.Tensor] = []
        for prepared in self.prepared:
            window = prepared.accumulated_gradients()
            if isinstance(window, AccumulatedGradients):
                accumulated += window.of_parameters(requested)
        return torch.nn.utils.get_total_norm(accumulated, norm_type)

    def cast_parameters(self, model: nn.Module, units: Iterable[nn.Module] | None = None) -> None:
        """Cast the parameters if the precision does, and make FSDP2 use the new ones.

        `units` are the modules that contain the FSDP2 units; None for the model itself.
        """
        if not self.precision.cast_parameters(model):
            return
        for shard in shards_of(units or [model]):
            if unsharded_parameter(shard) is not None:
                raise PrepareError(
                    f"MasterWeightsKwargs: {class_name(model)} was sharded before prepare and has "
                    "already run, so its parameters can no longer be cast. Prepare it before its "
                    "first forward pass"
                )
            read_again(shard)


def _mixed_loss() -> PrepareError:
    # torch takes a plain scalar beside a DTensor for one that is the same on all ranks.
    return PrepareError(
        "the loss is a DTensor: it adds terms of sharded parameters to a plain tensor, which differs on each rank. "
        "Gather the parameters: sum(p.full_tensor().square().sum() for p in model.parameters())"
    )


def units_of(models: Iterable[PreparedModel]) -> list[nn.Module]:
    """The modules that contain the FSDP2 units of these models."""
    units: list[nn.Module] = []
    for model in models:
        if isinstance(model, ShardedModel):
            units += model.units()
    return units


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard every FSDP2 unit inside these modules."""
    for module in modules:
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
