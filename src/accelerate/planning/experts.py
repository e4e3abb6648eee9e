# SPDX-License-Identifier: Apache-2.0
"""A traced model whose experts are on different ranks: sharded by transformers, as when it loads one.

How many tokens an expert has depends on values, which a trace lacks: it is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..core.errors import PrepareError
from ..parallel.adopted import sharing
from ..torch_internals import tracing

# The busiest rank's experts are assumed to have up to so many times the tokens of a mean rank.
UNEVEN = 1.5
_NAME = "accelerate_plan"


@dataclass
class Routing:
    """How tokens are distributed: the experts of a rank have `load` times the tokens of a mean rank."""

    load: float = 1.0


def has_experts(model: nn.Module) -> bool:
    """Whether transformers has a plan for the experts of a model."""
    return bool(getattr(model, "ep_plan", None))


def shard_as_loaded(model: nn.Module, sizes: Mapping[str, int], routing: Routing) -> nn.Module:
    """Shard a model on fake tensors as `from_pretrained(distributed_config=DistributedConfig(**sizes))` does.

    Args:
        model: on fake tensors.
        sizes: of `DistributedConfig`, for the number of processes of the fake group.
        routing: is read at each forward.

    Returns:
        The model, in place.

    Raises:
        PrepareError: the installed transformers does not shard experts.
    """
    try:
        from transformers.distributed import DistributedConfig, utils
        from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface
    except ImportError as error:
        raise PrepareError(
            f"the installed transformers does not shard experts as planned here: {error}"
        ) from error

    class TracedExchange(AllToAllEP):  # type: ignore[misc]
        """The exchange of tokens in training, whose sizes are values."""

        def _dispatch_tokens(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            tokens, experts_per_token = top_k_index.shape
            tokens_of_rank = -(-tokens // self.tp_mesh.size())
            rows = tokens_of_rank * experts_per_token
            ranks = self.ep_mesh.size()
            sent = [rows // ranks] * ranks
            for rank in range(rows % ranks):
                sent[rank] += 1
            received = [round(count * routing.load) for count in sent]
            with mock.patch.object(tracing.FakeTensor, "tolist", lambda _: [sent, received]):
                return super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(_NAME, TracedExchange)
    config = DistributedConfig(**sizes, ep_implementation=_NAME)
    dense = (config.pp_size, config.dp_replicate_size, config.fsdp_size, config.tp_size)
    experts = (config.pp_size, config.dp_replicate_size, config.efsdp_size, config.ep_size)
    with tracing.with_values():
        meshes = utils.TransformersDeviceMesh(
            init_device_mesh("cpu", dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
            init_device_mesh("cpu", experts, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")),
        )
    of_transformers: Any = type(model)
    sharded: nn.Module = of_transformers.maybe_distribute_model(model, config, meshes)
    return sharded


def describe_all_ranks(first: sharing.Description) -> list[sharing.Description]:
    """What each rank would describe, without messages: it shares parameters as the first rank does."""
    return [_description_of(rank, first) for rank in range(dist.get_world_size())]


def _description_of(rank: int, first: sharing.Description) -> sharing.Description:
    def groups_of_rank(groups: tuple[sharing.Ranks, ...]) -> tuple[sharing.Ranks, ...]:
        return tuple(_group_of(rank, ranks) for ranks in groups)

    sharings = []
    for name, shared in first.sharings:
        averaged = groups_of_rank(shared.averaged)
        split = groups_of_rank(shared.split)
        sharings.append((name, shared._replace(averaged=averaged, split=split)))
    return replace(first, sharings=tuple(sharings), same_batch=groups_of_rank(first.same_batch))


def _group_of(rank: int, first: sharing.Ranks) -> sharing.Ranks:
    """The group of a rank in a mesh dimension, of which `first` is the group of rank 0."""
    if len(first) == 1:
        return (rank,)
    step = first[1] - first[0]
    start = rank - rank // step % len(first) * step
    return tuple(start + step * number for number in range(len(first)))
