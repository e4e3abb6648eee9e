# SPDX-License-Identifier: Apache-2.0
"""What a rank sends, keeps in memory and computes in for its prepared models."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.tensor_files import dtype_name
from ...optimizer import plain_optimizer
from ...precision.fp8 import Float8Precision
from ...torch_internals.fsdp2 import (
    group_parameters,
    module_parameter,
    shard_groups,
    sharded_parameter,
    shards_of,
    unsharded_parameter,
)
from ..adopted.sharing import parameters_of
from ..adopted.strategy import AdoptedModel
from ..ddp.model import ReplicatedModel, replica_of
from ..deepspeed.engine import engine_bytes, engine_master_weights
from ..deepspeed.state import EngineModel, UntrainedModel
from ..gradients import buckets, local
from ..matrices import shared_step_of
from ..pipeline.model import PipelinedModel
from ..pipeline.p2p import TensorSpec, specs_in
from ..pipeline.runner import BatchShapes, Runner
from ..prepared import PreparedModel
from ..sharded import ShardedModel, units_of
from ..tensor.layers import ColumnLinear, RowEmbedding, RowLinear
from . import figures
from .figures import CommunicationVolume, VolumeCounter, local_bytes

_OWN = "the parameters' dtype"


def memory_usage(
    models: Sequence[PreparedModel], optimizers: Sequence[torch.optim.Optimizer], windows: bool
) -> dict[str, int]:
    """Bytes on this rank: of parameters, buffers, gradients as large as they get, master weights, optimizer state.

    `windows`: gradients accumulate over several backwards and are averaged in the last one only.
    """
    used = Counter[str]()
    seen: set[int] = set()
    for model in models:
        used.update(_model_memory(model, windows, seen))
    used[figures.BUFFERS] = figures.of_buffers([model.module for model in models])
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    for optimizer in optimizers:
        shared = shared_step_of(plain_optimizer(optimizer))
        if shared is not None:
            states.append([matrix.state for matrix in shared.matrices()])
    used[figures.STATE] = figures.local_bytes(figures.tensors_in(states))
    return {kind: used[kind] for kind in figures.KINDS}


def _model_memory(model: PreparedModel, windows: bool, seen: set[int]) -> dict[str, int]:
    """As `memory_usage`, without buffers and the optimizer's state. `seen`: ids of counted tensors, extended."""
    if isinstance(model, EngineModel):
        return engine_bytes(model.module)
    # In a step, units show other parameters than they keep.
    units = units_of([model])
    shards = {
        id(unsharded_parameter(shard)): sharded_parameter(shard) for shard in shards_of(units)
    }
    present = [shards.get(id(parameter), parameter) for parameter in model.module.parameters()]
    parameters = list(figures.unseen(present, seen))
    gradients = figures.local_bytes(p for p in parameters if p.requires_grad)
    if windows and shards:
        gradients = shard_gradients(model.inner, units)
    used = {
        figures.PARAMETERS: figures.local_bytes(parameters),
        figures.GRADIENTS: gradients,
        figures.MASTER_WEIGHTS: figures.local_bytes(figures.unseen(master_weights(model), seen)),
    }
    replica = replica_of(model.module)
    if replica is not None and not replica.gradient_as_bucket_view:
        used[figures.BUCKETS] = gradients
    return used


def master_weights(model: PreparedModel) -> Iterable[torch.Tensor]:
    """The fp32 weights that the optimizer steps instead of lower-precision parameters."""
    if isinstance(model, EngineModel):
        return engine_master_weights(model.module)
    return model.precision.master_weights(model.module)


def dtypes(model: PreparedModel) -> tuple[str, str]:
    """(dtype of the computation, dtype in which gradients are averaged) of a model, as text."""
    if isinstance(model, EngineModel):
        computes = torch.float32
        for parameter in model.module.parameters():
            computes = parameter.dtype
            break
        return dtype_name(computes), dtype_name(model.module.communication_data_type)
    policy = shard_dtypes(model.module)
    if policy is None:
        return model.precision.computes_in, _OWN
    compute, reduction = policy
    reduces_in = _OWN if reduction is None else dtype_name(reduction)
    # Only the precision knows which layers compute in float8. Where units cast nothing, autocast may.
    is_float8 = isinstance(model.precision, Float8Precision)
    if is_float8 or compute not in (torch.float16, torch.bfloat16):
        return model.precision.computes_in, reduces_in
    return dtype_name(compute), reduces_in


def communication_volume(model: PreparedModel, backwards: int) -> list[CommunicationVolume] | None:
    """What this rank sends in an optimizer step of so many backwards; None if that is not known."""
    if isinstance(model, UntrainedModel):
        return []
    if isinstance(model, ReplicatedModel):
        return _replica_volume(model)
    if isinstance(model, PipelinedModel):
        return _pipeline_volume(model, backwards)
    if not isinstance(model, ShardedModel):
        return None
    if isinstance(model, AdoptedModel):
        model.reshard()
        if any(sharing.split for _, _, sharing in parameters_of(model.inner)):
            # Layers of the model send messages as well.
            return None
    volumes = shard_volume(model.module, backwards)
    volumes += tensor_parallel_volume(model.module, backwards)
    if model.sequence is not None:
        volumes += model.sequence.communication_volume(backwards)
    for reducer in model.reducers:
        volumes += reducer.communication_volume()
    return volumes


def _replica_volume(model: ReplicatedModel) -> list[CommunicationVolume]:
    """The gradients, in about as many messages as DDP has buckets."""
    replica = replica_of(model.module)
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if replica is None or not trained:
        return []
    sent = sum(
        parameter.numel() * (model.element_size or parameter.dtype.itemsize)
        for parameter in trained
    )
    count = max(1, -(-sent // replica.bucket_bytes_cap))
    return [CommunicationVolume("all-reduce of gradients", count, sent, about=True)]


def _pipeline_volume(model: PipelinedModel, backwards: int) -> list[CommunicationVolume]:
    stages = model.stages
    # The parameters of a stage stay gathered until its gradients are reduced: once a step.
    volumes = _stage_volume(stages.runner, backwards)
    for stage in stages.modules.values():
        volumes += shard_volume(stage, 1)
    volumes += tensor_parallel_volume(model.inner, backwards)
    unsharded = [local(parameter) for parameter in stages.unsharded]
    if stages.replica_group is not None and unsharded:
        size = sum(parameter.nbytes for parameter in unsharded)
        count = len(buckets(unsharded))
        volumes.append(CommunicationVolume("all-reduce of gradients between replicas", count, size))
    tied = [local(parameter) for parameter in stages.tied.parameters()]
    if tied:
        size = sum(parameter.nbytes for parameter in tied)
        volumes.append(CommunicationVolume("sums of tied gradients", len(tied), size))
    return volumes


def _stage_volume(runner: Runner, backwards: int) -> list[CommunicationVolume]:
    """Messages between stages, and of the output. Bytes are those of the batch shapes that were trained on last."""
    trained = (
        shapes for key, shapes in reversed(runner.shapes.items()) if key.training and key.grad
    )
    shapes = next(trained, None)
    count = runner.splitter.num_microbatches * backwards
    if shapes is None:
        sends_forward = sum(number < runner.last for number in runner.stages)
        sends_back = sum(number > 0 for number in runner.stages)
        messages = (sends_forward + sends_back) * count
        unit = " (unknown before the first batch)"
        return [CommunicationVolume("tensors between stages", messages, 0, unit)]
    forward = _sent_specs(shapes, runner, forward=True)
    back = [spec for spec in _sent_specs(shapes, runner, forward=False) if spec.requires_grad]
    volumes = [
        CommunicationVolume(
            "activations to the next stage", len(forward) * count, _bytes(forward) * count
        ),
        CommunicationVolume(
            "gradients to the former stage", len(back) * count, _bytes(back) * count
        ),
    ]
    if runner.channel.rank == runner.source:
        output = specs_in(shapes.output)
        count = len(output) * backwards
        volumes.append(
            CommunicationVolume("output to all stages", count, _bytes(output) * backwards)
        )
    return [volume for volume in volumes if volume.messages]


def _sent_specs(shapes: BatchShapes, runner: Runner, forward: bool) -> list[TensorSpec]:
    """What the largest micro-batch sends to other ranks: stage outputs forward, gradients of stage inputs back."""
    sent = []
    largest = max((size for _, size in shapes.specs), default=0)
    for (sender, size), specs in shapes.specs.items():
        if forward:
            source, target = (sender, sender + 1)
        else:
            source, target = (sender + 1, sender)
        is_sent = source in runner.stages and runner.ranks[target] != runner.channel.rank
        if size == largest and is_sent:
            sent += specs
    return sent


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


# --- from the layout of parameters ---------------------------------------------------------------------------------


def shard_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of FSDP2 in a window of so many backwards, with the bytes of unsharded units.

    Each unit is gathered for each forward, and again for the backward if it was resharded in between; its gradients
    are scattered once. A unit without trainable parameters is gathered for a backward only if one passes through it:
    the number is then an upper bound.
    """
    counter = VolumeCounter()
    gather = "all-gather of parameters"
    is_bound = False
    for _, group, resharded in shard_groups(model):
        times: int = backwards * (1 + resharded)
        ranks: int = group.mesh_info.shard_mesh_size  # type: ignore[attr-defined]
        parameters = group_parameters(group)
        dtype = group.mp_policy.param_dtype
        size = sum(_unsharded_bytes(parameter, dtype, ranks) for parameter in parameters)
        counter.add(gather, times * size, times)
        trained = [p for p in parameters if sharded_parameter(p).requires_grad]
        if not trained:
            is_bound = is_bound or resharded
            continue
        dtype = group.mp_policy.reduce_dtype or dtype
        size = sum(_unsharded_bytes(p, dtype, ranks) for p in trained)
        counter.add("reduce-scatter of gradients", size)
        if group.mesh_info.replicate_mesh_dim is not None:
            counter.add("all-reduce of gradients between replicas", size // ranks)
    if is_bound:
        return counter.volumes(about=gather)
    return counter.volumes()


def shard_gradients(model: nn.Module, roots: Iterable[nn.Module]) -> int:
    """Bytes of the gradients of FSDP2's units in `roots` before they are scattered, and of all others in `model`."""
    unsharded = 0
    inside: set[int] = set()
    for _, group, _ in itertools.chain.from_iterable(map(shard_groups, roots)):
        ranks: int = group.mesh_info.shard_mesh_size  # type: ignore[attr-defined]
        dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
        for shard in group_parameters(group):
            # In a step, units have other parameters.
            inside.add(id(module_parameter(shard)))
            if sharded_parameter(shard).requires_grad:
                unsharded += _unsharded_bytes(shard, dtype, ranks)
    return unsharded + local_bytes(
        p for p in model.parameters() if p.requires_grad and id(p) not in inside
    )


def shard_dtypes(model: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None] | None:
    """(computes in, gradients are averaged in) of the policy of FSDP2's units; None without units."""
    for _, group, _ in shard_groups(model):
        policy = group.mp_policy
        return policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    return None


def _unsharded_bytes(parameter: Any, dtype: torch.dtype | None, ranks: int) -> int:
    """Bytes of a parameter that `ranks` ranks shard equally, with padding."""
    numel: int = parameter.padded_sharded_param_size.numel() * ranks
    return numel * (dtype or sharded_parameter(parameter).dtype).itemsize


def tensor_parallel_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of tensor parallelism, with the bytes of one token.

    Activations are summed where a split ends, gradients where it begins; layers with the same input share a sum. Along
    the sequence a sum becomes a scatter in one direction, and a gather in the other.
    """
    split = [
        module
        for module in model.modules()
        if isinstance(module, (ColumnLinear, RowLinear, RowEmbedding))
    ]
    along = any(isinstance(module, RowLinear) and module.along_sequence for module in split)
    counter = VolumeCounter(" a token")

    def count(what: str, module: nn.Linear | nn.Embedding, width: int) -> None:
        counter.add(what, backwards * width * module.weight.dtype.itemsize, backwards)

    seen: set[int] = set()
    for module in split:
        if isinstance(module, RowEmbedding):
            count("sums of activations over tp, forward", module, module.embedding_dim)
            continue
        if isinstance(module, RowLinear):
            if along:
                count("scatters of activations over tp, forward", module, module.out_features)
                count("gathers of gradients over tp, backward", module, module.out_features)
            else:
                count("sums of activations over tp, forward", module, module.out_features)
            continue
        if module.gathered:
            count("gathers of outputs over tp, forward", module, module.out_features)
        if id(module.shared) in seen:
            continue
        seen.add(id(module.shared))
        if along and not module.gathered:
            count("gathers of activations over tp, forward", module, module.in_features)
            count("scatters of gradients over tp, backward", module, module.in_features)
        else:
            count("sums of gradients over tp, backward", module, module.in_features)
    return counter.volumes()
