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
from ...core.errors import ConfigurationError, PrepareError
from ...core.modules import get_model_tp_size
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import mesh
from .. import materialize
from ..gradients import GradientReducer, all_reduce, refuse_gradient_hooks
from ..prepared import CommunicationVolume
from ..remap import ParameterPlaces
from ..report.memory import local_bytes
from ..sharded import ShardedModel, ShardedStrategy
from . import loss as tensor_loss
from . import plan as tensor_plan
from . import random as tensor_random
from . import styles as tensor_styles


class TensorParallel(ShardedStrategy):
    """Every rank computes its shard of each split layer, on the same data. With FSDP2, that strategy splits."""

    name = "tensor parallel"

    def __init__(self, device: torch.device, precision: Precision, parallelism: ParallelismConfig) -> None:
        super().__init__(device, precision, parallelism)
        if self.mesh is None or list(self.mesh.mesh_dim_names or ()) != ["tp"]:
            raise ConfigurationError(
                f"{mesh.describe(parallelism)}: tensor parallelism alone uses every rank for tp; dp sizes "
                "need FSDP2, and for it an fsdp_plugin"
            )

    def lay_out(self, model: nn.Module) -> ShardedModel:
        """Split the layers of the model over the ranks."""
        refuse_gradient_hooks(model, self.name)
        ranks = self.mesh["tp"]  # type: ignore[index]

        def split(equal: bool) -> None:
            if equal:
                tensors = (tensor for _, tensor in materialize.named_tensors(model))
                materialize.make_equal(tensors, self.device, None)
            split_model(model, ranks, self.layout.tp_handler)

        materialize.lay_out(model, self.device, split)
        self.cast_parameters(model)
        prepared = self.as_prepared(model)
        prepared.reducers.append(PartialSums(model.parameters()))
        return prepared


class PartialSums(GradientReducer):
    """Partial gradients of replicated parameters that see some of the tokens, or of the heads, on each rank.

    They accumulate unreduced and are all-reduced once, at the end of a window, in one message.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters: list[DTensor] = [
            parameter
            for parameter in parameters
            if isinstance(parameter, DTensor) and any(place.is_replicate() for place in parameter.placements)
        ]

    def communication_volume(self) -> list[CommunicationVolume]:
        """At most one message with all gradients; which of them are partial is known after a backward."""
        sent = local_bytes(self._parameters)
        return [CommunicationVolume("all-reduce of partial gradients", None, sent, about=True)] if sent else []

    @torch.no_grad()
    def finish(self) -> None:
        """All-reduce what the window has accumulated."""
        meshes: dict[DeviceMesh, list[tuple[DTensor, torch.Tensor]]] = {}
        for parameter in self._parameters:
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not any(place.is_partial() for place in gradient.placements):
                continue
            if gradient.device_mesh.ndim > 1:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
            else:
                meshes.setdefault(gradient.device_mesh, []).append((parameter, gradient.to_local()))
        for ranks, listed in meshes.items():
            all_reduce([total for _, total in listed], ranks.get_group(), average=False)
            for parameter, total in listed:
                parameter.grad = DTensor.from_local(total, ranks, parameter.placements, run_check=False)


def split_model(model: nn.Module, ranks: DeviceMesh, options: TorchTensorParallelConfig | None = None) -> bool:
    """Split the layers of a model in place over `ranks`, which have equal weights.

    Without a plan in `options`, the model's own (`_tp_plan`) is used; without that, one is inferred.

    Returns:
        False where it was split before.

    Raises:
        PrepareError: before anything is split, for a plan or a size that does not fit the model.
    """
    options = options or TorchTensorParallelConfig()
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if get_model_tp_size(model) == ranks.size():
            # transformers has split it while it was loaded, and leaves random numbers to us.
            tensor_random.separate_streams(model, tensor_plan.known_styles(model), ranks, options.random_modules)
        return False
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module).__module__.startswith("transformer_engine"):
            raise PrepareError(
                f"tp_size={ranks.size()}: {name} is a layer of Transformer Engine, which cannot be split. Compute in "
                "fp8 with torchao (AORecipeKwargs), whose layers can, or leave tp_size at 1"
            )
    styles = _styles(model, options, ranks.size())
    heads = tensor_plan.check_plan(model, styles, ranks.size())
    places = ParameterPlaces(model)
    for name, style in styles.items():
        # Weights are equal: every rank cuts out its shard without a message.
        style.src_data_rank = None
        parallelize_module(modules[name], ranks, style, src_data_rank=None)
    for module, shares in heads:
        for key, share in shares.items():
            setattr(module, key, share)
    _retie(places)
    tensor_random.separate_streams(model, styles, ranks, options.random_modules)
    model.register_forward_pre_hook(_refuse_transforms)
    if options.loss_parallel:
        tensor_loss.split_losses_while_alive(model)
        model.register_forward_hook(lambda module, args, output: tensor_styles.plain_losses(output))
    return True


def _refuse_transforms(*_: object) -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise PrepareError(
            "a tensor-parallel model was called inside of a transform of torch.func (vmap, grad, jvp, ...), which "
            "does not know its collectives. torch.autograd.grad(..., create_graph=True) works; or use DDP or FSDP2"
        )


def _styles(model: nn.Module, options: TorchTensorParallelConfig, size: int) -> tensor_plan.Styles:
    """Module name -> how it is split, by the user's plan, the model's own, or an inferred one."""
    if options.plan is not None:
        styles = tensor_plan.match_plan(model, options.plan)
    elif own := getattr(model, "_tp_plan", None):
        # A family of models shares a plan, which may name modules that this one does not have.
        styles = tensor_plan.match_plan(model, own, strict=False)
        if not styles:
            raise PrepareError(
                f"no rule of the model's own tensor-parallel plan fits a module of {type(model).__name__}: its "
                "modules have other names, as where a library has wrapped the model or its layers. "
                f"{tensor_plan.GIVE_A_PLAN}. For LoRA of peft: base_layer and lora_B.default 'colwise' in a layer "
                "split by columns, base_layer and lora_A.default 'rowwise' in one split by rows"
            )
    else:
        styles = tensor_plan.match_plan(model, tensor_plan.infer_plan(model, size))
    if options.loss_parallel:
        tensor_plan.split_losses(model, styles)
    if options.sequence_parallel:
        styles = tensor_plan.along_sequence(model, styles)
    return styles


def _retie(places: ParameterPlaces) -> None:
    """Tie the replacements of tied parameters."""
    for owners in places.shared():
        present = [module._parameters[name] for module, name in owners]
        layouts = [getattr(parameter, "placements", None) for parameter in present]
        if any(layout != layouts[0] for layout in layouts):
            names = ", ".join(sorted({f"{type(module).__name__}.{name}" for module, name in owners}))
            raise PrepareError(
                f"the tensor-parallel plan splits a tied parameter ({names}) in two ways. Give both ends one layout "
                "(embedding_rowwise and colwise_gather_output), or neither."
            )
        for module, name in owners:
            module._parameters[name] = present[0]
