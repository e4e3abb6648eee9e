# SPDX-License-Identifier: Apache-2.0
"""What FSDP2, tensor parallelism and pipelines share: strategies whose processes have shards of a model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..collectives import rng
from ..core.devices import kind_of
from ..core.errors import PrepareError
from ..logging import MultiProcessAdapter, get_logger
from ..parallelism_config import ParallelismConfig
from ..precision.base import Precision
from ..precision.fp8 import Float8Precision
from ..runtime import group, mesh
from . import gradients, norms
from .accumulated import AccumulatedGradients
from .base import Bundle, Strategy
from .context.region import ContextParallel
from .dtensor_losses import plain_gradients
from .fsdp import state as fsdp_state
from .fsdp.copies import support_mixed_lists
from .fsdp.units import reshard, shard_groups, shards_of
from .gradients import AgreeingScaler, GradientReducer
from .local_step import step_locally
from .optimizer_scope import Scope, find_scope, is_elementwise
from .prepared import Change, CommunicationVolume, PreparedModel
from .pretrained import require_state_dict
from .remap import ParameterPlaces, Replacements, check_trains
from .report import communication
from .unsharded_step import step_unsharded

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
        return self.uncompiled

    def units(self) -> Iterable[nn.Module]:
        """The modules that contain the FSDP2 units."""
        return [self.inner]

    # -- the step

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in this context leave to a later one what they do not reduce themselves."""
        return gradients.deferred(self.reducers)

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """Those of the module, and the shards."""
        return itertools.chain(self.module.parameters(), (shard.sharded_param for shard in shards_of(self.units())))

    def reshard(self) -> None:
        """Reshard all FSDP2 units."""
        reshard(self.units())

    @contextlib.contextmanager
    def swappable(self) -> Iterator[None]:
        """FSDP2 ignores replaced parameters in this context."""
        self.reshard()
        shards = shards_of(self.units())
        # torch 2.13 reads the modules' parameters again after each `load_state_dict`, and at the first all-gather.
        for shard in shards:
            vars(shard)["reset_sharded_param"] = lambda: None
        try:
            yield
        finally:
            for shard in shards:
                del vars(shard)["reset_sharded_param"]

    def kept_parameters(self) -> list[torch.Tensor]:
        """The shards, where a unit is unsharded now."""
        kept = {
            id(getattr(shard, "_unsharded_param", shard)): shard.sharded_param for shard in shards_of(self.units())
        }
        return [kept.get(id(parameter), parameter) for parameter in self.module.parameters()]

    # -- a traced step

    def _named_blocks(self) -> list[nn.Module]:
        """The modules of FSDP2's units inside of another; if there is none, the ones that the model names."""
        from .fsdp import traced

        return traced.inner_units(self.inner) or super()._named_blocks()

    def traceable_changes(self) -> dict[Change, str]:
        """Also those of FSDP2's units."""
        from .fsdp import traced

        return {**super().traceable_changes(), **traced.changes(self.inner)}

    def traced_copy(self, change: Change) -> nn.Module:
        """A copy whose units FSDP2 shards over the same ranks, and whose DTensors have local tensors of this size."""
        from .fsdp import traced

        return traced.fake_sharded_copy(self.inner, change, self.blocks() if change.checkpointing else ())

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Attention sends what it sent in the last batch with split sequences."""
        return contextlib.nullcontext() if self.sequence is None else self.sequence.tracing()

    def traced_input(self, given: torch.Tensor) -> torch.Tensor:
        """The rows of a split sequence that this rank computes."""
        return given if self.sequence is None else self.sequence.traced_input(given)

    def switch_reduction(self, copied: nn.Module, on: bool) -> None:
        """Of all units."""
        for module in copied.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(on, recurse=False)

    def offloads(self) -> bool:
        """By the policy of FSDP2's units."""
        from .fsdp import traced

        return traced.offloads(self.inner)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The full state under the user's names: on the host of rank 0, empty on the other ranks."""
        # torch 2.13 cannot detach a DTensor in inference mode.
        with torch.inference_mode(False):
            return fsdp_state.full_model_state(self.inner)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which only rank 0 needs to have; every rank calls it."""
        fsdp_state.load_full_model_state(self.inner, state, self.device, strict)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        return fsdp_state.full_optimizer_state(self.inner, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, object]) -> None:
        """Load the optimizer state of a single process, which only rank 0 needs to have; every rank calls it."""
        fsdp_state.load_full_optimizer_state(self.inner, optimizer, state)

    def accumulated_gradients(self) -> AccumulatedGradients | None:
        """The gradients of an unfinished window, sharded and unsharded."""
        self.reshard()
        return AccumulatedGradients(self.inner)

    # -- the report

    def communication_volume(self, backwards: int) -> list[CommunicationVolume] | None:
        """Messages of FSDP2, tensor parallelism and split attention."""
        attention = [] if self.sequence is None else self.sequence.communication_volume(backwards)
        model = self.module
        return [
            *communication.shard_volume(model, backwards),
            *communication.tensor_parallel_volume(model, backwards),
            *attention,
            *(volume for reducer in self.reducers for volume in reducer.communication_volume()),
        ]

    def dtypes(self) -> tuple[str, str]:
        """The dtypes of FSDP2's policy, or else those of the precision."""
        compute, reduction = communication.shard_dtypes(self.module) or super().dtypes()
        # Only the precision knows which layers compute in float8.
        return (self.precision.computes_in if isinstance(self.precision, Float8Precision) else compute), reduction


class ShardedStrategy(Strategy):
    """Parameters become DTensors on one mesh; optimizers made before that are re-pointed by identity."""

    def __init__(self, device: torch.device, precision: Precision, layout: ParallelismConfig | None = None) -> None:
        super().__init__(device, precision)
        # A filter that is there is not added again.
        logging.getLogger(_REDISTRIBUTE_LOG).addFilter(_is_about_layout)
        support_mixed_lists()
        if not dist.is_initialized():
            group.start_alone(kind_of(device))
        world = dist.get_world_size()
        self.layout: ParallelismConfig = layout or mesh.all_sharded(world)
        self.mesh: dist.DeviceMesh | None = mesh.build_mesh(self.layout, world, device.type)
        self.replacements: Replacements = Replacements()
        if precision.scaler is not None:
            precision.scaler = AgreeingScaler(precision.scaler, device)
        self.sequence: ContextParallel | None = ContextParallel.of_layout(self.layout, self.mesh)
        if self.layout.data_parallel_size != world:
            self.data_group: dist.ProcessGroup | None = mesh.group_of(self.mesh, "dp")

    @property
    def data_shard(self) -> tuple[int, int]:
        """One shard for each data-parallel coordinate of the mesh."""
        return mesh.data_shard(self.layout, dist.get_rank())

    @property
    def gradient_ranks(self) -> int:
        """The ranks with other data or other tokens."""
        sizes = self.layout.sizes
        return self.layout.data_parallel_size * sizes["cp"] * sizes["sp"]

    def sync_rng_state(self) -> None:
        """Dropout on activations that all tensor-parallel ranks have must drop the same elements on all of them."""
        ranks = mesh.group_of(self.mesh, "tp")
        if ranks is not None:
            rng.sync_rng_state(ranks, self.device)

    def as_prepared(self, module: nn.Module) -> ShardedModel:
        """A prepared model without FSDP2 units."""
        return ShardedModel(module, self.precision, self.device, self.sequence)

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Lay out each model and re-point the optimizers. Models for evaluation are only placed."""
        for model in bundle.models if self.sequence is not None else ():
            self.sequence.check(model)  # type: ignore[union-attr]
        found = super().prepare(bundle) if bundle.evaluation else self._prepare_training(bundle)
        for prepared in found if self.sequence is not None else ():
            self.sequence.watch(prepared.module)  # type: ignore[union-attr]
        return found

    def _prepare_training(self, bundle: Bundle) -> list[PreparedModel]:
        found = []
        for model in bundle.models:
            places = ParameterPlaces(model)
            prepared = self.compose(model)
            self.replacements.add(places.replaced())
            require_state_dict(prepared.module)
            found.append(prepared)
        for optimizer in bundle.optimizers:
            self.replacements.repoint(optimizer)
            check_trains(optimizer, {id(p) for prepared in found for p in prepared.module.parameters()})
            lay_out_step(optimizer)
        self.prepared.add(found)
        kept = [
            weakref.ref(module)
            for prepared in self.prepared
            for module, _, is_resharded in shard_groups(prepared.inner)
            if not is_resharded
        ]
        for optimizer in bundle.optimizers if kept else ():
            optimizer.register_step_pre_hook(functools.partial(_reshard_before_step, kept))
        return found

    def join(
        self, joinables: Sequence[object], loaders: Sequence[object], even_batches: bool | None
    ) -> contextlib.AbstractContextManager[None]:
        """No effect but a warning: all ranks gather units together, batch by batch."""
        if self.data_shard[1] > 1:
            logger.warning(
                f"join_uneven_inputs has no effect under {self.name}: all processes have equally many batches. "
                "Accelerator(exact=True) counts each sample once"
            )
        return super().join(joinables, loaders, even_batches)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The backward, in which split attention may be recomputed, and the reductions that are left."""
        split = contextlib.nullcontext() if self.sequence is None else self.sequence.recomputing()
        with split, plain_gradients(loss, self.gradient_group, self.gradient_ranks):
            super().backward(loss, **kwargs)
        for prepared in self.prepared:
            gradients.finish(prepared.reducers)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, for DTensors of any mesh."""
        return norms.clip_grad_norm(parameters, max_norm, norm_type)

    def cast_parameters(self, model: nn.Module, units: Iterable[nn.Module] | None = None) -> None:
        """Cast the parameters if the precision does, and make FSDP2 use the new ones.

        `units` are the modules that contain the FSDP2 units; None for the model itself.
        """
        if not self.precision.cast_parameters(model):
            return
        for shard in shards_of(units or [model]):
            if hasattr(shard, "_unsharded_param"):
                raise PrepareError(
                    f"MasterWeightsKwargs: {type(model).__name__} was sharded by hand and has run: its parameters "
                    "cannot be cast any more. Prepare it before its first forward"
                )
            shard.reset_sharded_param()


def _reshard_before_step(kept: Sequence[weakref.ref[FSDPModule]], *_: object) -> None:
    """Reshard units that stay unsharded after a forward: one between the backward and the step leaves stale values."""
    for reference in kept:
        if (module := reference()) is not None:
            module.reshard()


def lay_out_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the step of an optimizer of DTensors equal to that of a single process."""
    if is_elementwise(optimizer):
        step_locally(optimizer)
    elif find_scope(optimizer) is not Scope.ELEMENT:
        # Any other may support DTensors itself, as torchao's do.
        step_unsharded(optimizer)
