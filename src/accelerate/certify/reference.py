# SPDX-License-Identifier: Apache-2.0
"""One process in place of several: its loaders join what all data shards read, and its model draws no dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..core.errors import PrepareError
from ..core.trees import concatenate, map_leaves
from ..data_loader.batch_source import altered
from ..data_loader.loader import DataLoaderShard, PreparedLoader
from ..data_loader.order import Order, capture, restore
from ..data_loader.steps import ReadPlan, ShardStep, StreamPosition
from ..parallel.gradients import local

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# Attributes with the probability of dropout, of modules that call the function.
_PROBABILITIES = (
    "dropout",
    "dropout_p",
    "p_dropout",
    "attention_dropout",
    "attn_dropout",
    "dropout_prob",
)


class JoinedLoader(DataLoaderShard):
    """The loader of the first data shard, which joins the steps of all of them in order.

    Each shard reads with random generators of its own, as the processes of a run do.
    """

    others: list[PreparedLoader]

    @property
    def batch_weight(self) -> float:
        """That of all samples of a step."""
        return 1.0

    @batch_weight.setter
    def batch_weight(self, weight: float) -> None:
        pass

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        super().set_epoch(epoch)
        for other in self.others:
            other.set_epoch(epoch)

    def _open(self, plan: ReadPlan, order: Order, start: StreamPosition) -> Iterator[ShardStep]:
        shards = [super()._open(plan, order, start)]
        for other in self.others:
            other.set_epoch(self.iteration)
            shards.append(other._open(other.plan(), other._new_order(), start))
        return _joined(shards)


def _joined(shards: list[Iterator[ShardStep]]) -> Iterator[ShardStep]:
    states = [capture()] * len(shards)
    while True:
        steps: list[ShardStep | None] = []
        for i, shard in enumerate(shards):
            restore(states[i])
            steps.append(next(shard, None))
            states[i] = capture()
        restore(states[0])
        first = steps[0]
        if first is None:
            return
        parts = []
        for i, step in enumerate(steps):
            # A shard without samples in the last step reads a placeholder, or nothing.
            if step is not None and (step.counts is None or step.counts[i]):
                parts.append(step.data)
        first.data = _concatenated(parts)
        if first.counts is not None:
            first.counts = (sum(first.counts),)
        yield first


def _concatenated(parts: list[Any]) -> Any:
    tensors = [map_leaves(torch.as_tensor, part) for part in parts]
    try:
        return concatenate(tensors)
    except (TypeError, RuntimeError) as error:
        raise PrepareError(
            f"accelerate certify: the batches that {len(parts)} processes read in one step cannot be joined to one "
            f"({error}). Pad them to one length, or compare with a layout as the reference: --reference ddp:2"
        ) from None


def join_shards(
    loader: DataLoader[Any], shards: int, prepare: Callable[..., DataLoader[Any]]
) -> DataLoader[Any]:
    """A prepared loader with all shards of the data.

    Args:
        loader: the user's loader.
        shards: their number.
        prepare: makes the loader of a shard, called as `(loader, shard)`.

    Raises:
        PrepareError: batches are read by one process for all, whose shards are slices of one batch already.
    """
    copies = [loader, *(_independent(loader) for _ in range(shards - 1))]
    states = capture()
    prepared: list[Any] = []
    for index, source in enumerate(copies):
        # Each process draws the seed of its sampler from the same state.
        restore(states)
        prepared.append(prepare(source, index))
    first = prepared[0]
    if not isinstance(first, PreparedLoader) or type(first) is not DataLoaderShard:
        raise PrepareError(
            f"accelerate certify: a {type(first).__name__} cannot be read as one process reads it. Compare with a "
            "layout as the reference: --reference ddp:2"
        )
    joined = JoinedLoader.around(first.base_dataloader, **first.options())
    joined.others = prepared[1:]
    return joined


def _independent(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader with samplers and a generator of its own."""
    memo = {id(loader.dataset): loader.dataset}
    names = [
        name
        for name in ("sampler", "batch_sampler", "generator")
        if getattr(loader, name, None) is not None
    ]
    copies = {name: copy.deepcopy(getattr(loader, name), memo) for name in names}
    return altered(loader, **copies)


def remove_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name in _PROBABILITIES:
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Move each parameter by one unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Replicas are moved alike.
        values = local(parameter.detach())
        if values.is_meta or not values.is_floating_point():
            continue
        ups = torch.randint(0, 2, values.shape, generator=generator).to(values.device, torch.bool)
        limits = torch.where(ups, torch.inf, -torch.inf).to(values.dtype)
        values.copy_(torch.nextafter(values, limits))
