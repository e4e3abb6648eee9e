# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: linear layers split over ranks by a plan, the model's own, a user's or an inferred one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...config.parallel import TorchTensorParallelConfig
from ...core.errors import PrepareError
from ...core.modules import get_model_tp_size
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from .. import materialize
from ..gradients import GradientReducer, all_reduce
from ..report.figures import CommunicationVolume, local_bytes
from ..sharded import ShardedModel, ShardedStrategy
from ..sharded_optimizer import ParameterPlaces
from . import plan as tensor_plan
from . import requirements
from .between import Region, look_first, regions_of


class TensorParallel(ShardedStrategy):
    """Every rank computes its shard of each split layer, on the same data. With FSDP2, that strategy splits."""

    name = "tensor parallel"

    def __init__(
        self, device: torch.device, precision: Precision, parallelism: ParallelismConfig
    ) -> None:
        super().__init__(device, precision, parallelism)

    def prepare_model(self, model: nn.Module, evaluation: bool = False) -> ShardedModel:
        """Everything that is done to one model, in its order."""
        model = self.precision.wrap_forward(model)
        model = self.apply_transforms(model, before_layout=True)
        reducers: list[GradientReducer] = []
        regions: list[Region] = []
        if not evaluation:
            weights = materialize.Weights(model, self.device)
            # Ranks cut their shards out of equal weights.
            weights.make_all_equal(model)
            regions = split_model(model, self.mesh["tp"], self.layout.tp_handler)  # type: ignore[index]
            weights.fill(model)
            self.cast_parameters(model)
            reducers.append(PartialSums(model.parameters()))
        self.precision.after_layout(model)
        # Compilation is the last of these.
        model = self.apply_transforms(model, before_layout=False)
        look_first(model, regions)
        prepared = self.as_prepared(model)
        prepared.reducers = reducers
        return prepared


class PartialSums(GradientReducer):
    """Partial gradients of replicated parameters that see some of the tokens, or of the heads, on each rank.

    They accumulate unreduced and are all-reduced once, at the end of a window, in one message.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.replicated: list[DTensor] = [
            parameter
            for parameter in parameters
            if isinstance(parameter, DTensor)
            and any(placement.is_replicate() for placement in parameter.placements)
        ]

    def communication_volume(self) -> list[CommunicationVolume]:
        """At most one message with all gradients; which of them are partial is known after a backward."""
        sent = local_bytes(self.replicated)
        if sent:
            return [CommunicationVolume("all-reduce of partial gradients", None, sent, about=True)]
        return []

    @torch.no_grad()
    def finish(self) -> None:
        """All-reduce what the window has accumulated."""
        meshes: dict[DeviceMesh, list[tuple[DTensor, torch.Tensor]]] = {}
        for parameter in self.replicated:
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not any(
                p.is_partial() for p in gradient.placements
            ):
                continue
            if gradient.device_mesh.ndim > 1:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
            else:
                meshes.setdefault(gradient.device_mesh, []).append((parameter, gradient.to_local()))
        for ranks, partial in meshes.items():
            all_reduce([total for _, total in partial], ranks.get_group(), average=False)
            for parameter, total in partial:
                parameter.grad = DTensor.from_local(
                    total, ranks, parameter.placements, run_check=False
                )


def split_model(
    model: nn.Module, ranks: DeviceMesh, options: TorchTensorParallelConfig | None = None
) -> list[Region]:
    """Split the layers of a model in place over `ranks`, which have equal weights.

    Without a plan in `options`, the model's own (`_tp_plan`) is used; without that, one is inferred.

    Returns:
        What lies between the split layers; nothing where the model was split before.

    Raises:
        PrepareError: before anything is split, for a plan or a size that does not fit the model.
    """
    options = options or TorchTensorParallelConfig()
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if is_sharded and get_model_tp_size(model) == ranks.size():
        # transformers has split it while it was loaded.
        return []
    requirements.check_plain(model)
    styles, loss = tensor_plan.styles_of(model, options, ranks.size())
    split = requirements.Split(dict(model.named_modules()), styles, ranks.size())
    requirements.check(split)
    places = ParameterPlaces(model)
    layers: dict[nn.Module, nn.Module] = {}
    for name, style in styles.items():
        # Weights are equal: every rank cuts out its shard without a message.
        style.src_data_rank = None
        layers[split.modules[name]] = parallelize_module(
            split.modules[name], ranks, style, src_data_rank=None
        )
    for _, module, key, count in split.heads():
        setattr(module, key, count // ranks.size())
    for module in split.modules.values():
        for key, child in list(module.named_children()):
            if layers.get(child, child) is not child:
                setattr(module, key, layers[child])
    _retie(places)
    regions = regions_of(split, dict(model.named_modules()), ranks)
    for region in regions:
        region.watch()
    if loss is not None:
        loss.wrap_forward(model)
    return regions


def _retie(places: ParameterPlaces) -> None:
    """Tie the replacements of tied parameters."""
    for owners in places.shared():
        parameters = [getattr(module, name) for module, name in owners]
        layouts = [getattr(parameter, "placements", None) for parameter in parameters]
        if any(layout != layouts[0] for layout in layouts):
            names = ", ".join(
                sorted({f"{type(module).__name__}.{name}" for module, name in owners})
            )
            raise PrepareError(
                f"the tensor-parallel plan splits a tied parameter ({names}) in two ways. Use the "
                "same layout at both ends (embedding_rowwise and colwise_gather_output), or "
                "split neither."
            )
        for module, name in owners:
            setattr(module, name, parameters[0])
