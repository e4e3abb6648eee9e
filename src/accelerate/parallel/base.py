# SPDX-License-Identifier: Apache-2.0
"""The strategy of a single process, which works as it is; every other layout overrides what differs."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import PrepareError
from ..precision.base import Precision
from .gradients import gradients_of, multiply
from .prepared import PreparedModel


@dataclass
class Bundle:
    """What one call of `prepare` lays out together: models, and the plain optimizers that hold their parameters.

    `place[i]` says whether model i is moved to the device; `evaluation` that no gradients will be taken.
    """

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    place: list[bool] = field(default_factory=list)
    evaluation: bool = False


def _check_storage(model: torch.nn.Module, layout: str) -> None:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if (empty := next((name for name, tensor in tensors if tensor.is_meta), None)) is not None:
        raise PrepareError(
            f"{empty} of {type(model).__name__} is on the meta device and has no values, and a run as {layout} does "
            "not make any. Build the model on a real device, load its weights (load_checkpoint_and_dispatch), or call "
            "model.to_empty(device=...) and initialise it; an fsdp_plugin of version 2 fills such models by itself"
        )


class Strategy:
    """How models live on the processes of a run. What concerns one model is in the `PreparedModel` it makes."""

    name = "single process"
    # Whether a loss is divided by the steps of its accumulation window before `backward`; an engine may do that.
    divides_loss = True

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
        # Applied to each model that trains; those with `before_layout` come before it is laid out.
        self.transforms: tuple[Any, ...] = ()
        # Called when an optimizer has stepped.
        self.after_step: tuple[Callable[[], None], ...] = ()
        self._prepared: list[weakref.ref[PreparedModel]] = []

    @property
    def prepared(self) -> list[PreparedModel]:
        """The prepared models that are still in use, in the order of preparation, which is the same on all ranks."""
        found = (reference() for reference in self._prepared)
        return [prepared for prepared in found if prepared is not None]

    def remember(self, models: Iterable[PreparedModel]) -> None:
        """Add models to `prepared`. They are held weakly: whoever called `prepare` holds them."""
        self._prepared = [weakref.ref(prepared) for prepared in [*self.prepared, *models]]

    # -- data

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which shard of the data this process reads, of how many."""
        return 0, 1

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that read the other shards of the data and are like this one otherwise; None for all ranks."""
        return None

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks that had other parts of the same samples in the last forward; None where they had the same."""
        return None

    @property
    def gradient_ranks(self) -> int:
        """Over how many ranks gradients, and counts of items, are averaged."""
        return self.data_shard[1]

    def split_loader(self, loader: Any) -> Any:
        """A loader whose batches hold this rank's part of each sequence; as it is where no sequence is split."""
        return loader

    def context_parallel(
        self, buffers: list[torch.Tensor], seq_dims: list[int], no_restore: set[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """A block in which `buffers` hold this rank's part of their sequences; complete where no sequence is split."""
        return contextlib.nullcontext()

    def join(
        self, joinables: list[Any], loaders: list[Any], even_batches: bool | None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in which the processes may run out of batches at different times."""
        return contextlib.nullcontext()

    # -- prepare

    def prepare_together(self, objects: list[Any], split_batches: bool = False) -> list[Any]:
        """The objects of one `prepare`, those replaced that can only be made together; each is prepared after this."""
        return objects

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Lay out each model of the bundle. The optimizers' parameters stay the same objects.

        The order: move to the device, wrap the forward for the precision, transforms that come before the layout, the
        layout itself, the other transforms (compilation is the last).
        """
        found = []
        for model, place in zip(bundle.models, bundle.place, strict=True):
            if place:
                _check_storage(model, self.name)
                model = model.to(self.device)
            model = self.precision.wrap_forward(model)
            model = self.transformed(model, before=True)
            prepared = self.as_prepared(model) if bundle.evaluation else self.lay_out(model)
            prepared.module = self.transformed(prepared.module)
            found.append(prepared)
        self.remember(found)
        return found

    def transformed(self, model: torch.nn.Module, before: bool = False) -> torch.nn.Module:
        """The model after the transforms that come `before` it is laid out, or after."""
        for transform in self.transforms:
            if getattr(transform, "before_layout", False) is before:
                model = transform.apply(model)
        return model

    def lay_out(self, model: torch.nn.Module) -> PreparedModel:
        """Lay out one model for training."""
        return self.as_prepared(self.wrap_model(model))

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it trains; the one method that a strategy without state of its own needs."""
        self.precision.cast_parameters(model)
        return model

    def as_prepared(self, module: torch.nn.Module) -> PreparedModel:
        """A view of a module that was laid out before, or that is not laid out at all."""
        return PreparedModel(module, self.precision)

    def sync_rng_state(self) -> None:
        """Give ranks that hold the same activations the same random streams; by default none share any."""

    # -- the step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.precision.backward(loss, **kwargs)

    def backward_items(
        self,
        loss: torch.Tensor,
        factor: Callable[[], torch.Tensor] | None = None,
        models: Iterable[torch.nn.Module] = (),
        **kwargs: Any,
    ) -> None:
        """Backward of a loss that is weighted by its items, not divided by the steps of its window.

        Where the window ends, the gradients of `models` are then multiplied by `factor()`, which waits for all ranks.
        """
        self.backward(loss, **kwargs)
        if factor is not None:
            # Read only now: during the backward a sharded model has other parameters.
            parameters = {id(p): p for model in models for p in model.parameters()}.values()
            multiply(gradients_of(parameters), factor())

    def reduce_items(self, count: torch.Tensor) -> Any:
        """Sum `count` in place over the ranks that average gradients; the handle to wait on, or None."""
        return None

    def global_loss(self, loss: Any) -> Any:
        """The mean over the ranks that read different data of a loss that each has for its own; None stays None."""
        if loss is None or self.data_shard[1] == 1:
            return loss
        mean = torch.as_tensor(loss, device=self.device).detach().clone()
        dist.all_reduce(mean, group=self.data_group)
        mean /= self.data_shard[1]
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def release(self) -> None:
        """Free what the prepared models keep outside of themselves."""
        for prepared in self.prepared:
            prepared.release()
        self._prepared.clear()
