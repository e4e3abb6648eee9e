# SPDX-License-Identifier: Apache-2.0
"""The strategy of a single process. Every other layout derives from it and overrides what differs."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..core.errors import PrepareError
from ..core.modules import move_module
from ..core.objects import NullContext
from ..precision.base import Precision
from .document_attention import DocumentAttention
from .gradients import clip_values, gradients_of, local, multiply
from .matrices import has_views, share_step
from .prepared import PreparedModel

if TYPE_CHECKING:
    from .context.region import ContextParallel


@dataclass
class Bundle:
    """The models that one call of `prepare` lays out together, and the optimizers of their parameters.

    Fields:
        models: the models, as their user built them.
        optimizers: the plain optimizers, without `prepare`'s wrappers.
        place: for each model, whether it is moved to the device.
        evaluation: no gradients will be taken.
        earlier: plain optimizers that were prepared before. They may have parameters of these models.
    """

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    place: list[bool] = field(default_factory=list)
    evaluation: bool = False
    earlier: list[torch.optim.Optimizer] = field(default_factory=list)


class PreparedModels:
    """The prepared models that are still in use, in the order of preparation, which is the same on all ranks.

    References are weak: the caller of `prepare` owns the models.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[PreparedModel]] = []

    def __iter__(self) -> Iterator[PreparedModel]:
        for reference in self._references:
            prepared = reference()
            if prepared is not None:
                yield prepared

    def add(self, models: Iterable[PreparedModel]) -> None:
        """Add models. A model that is gone is dropped."""
        self._references = [weakref.ref(prepared) for prepared in (*self, *models)]

    def clear(self) -> None:
        """Forget all models."""
        self._references.clear()


class Transform(Protocol):
    """What is applied to each model that trains. One with the attribute `before_layout` comes before the layout."""

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with the change."""


def one_shard_each(strategy: object) -> tuple[int, int]:
    """The `data_shard` of a strategy whose processes read one shard of the data each."""
    return dist.get_rank(), dist.get_world_size()


class Strategy:
    """How models are laid out on the processes of a run. State that concerns one model is in its `PreparedModel`.

    Fields:
        name: as `explain` prints it.
        api_method: the method of `Accelerator` that packages replace to lay out models otherwise; None without one.
        api_function: the function that they replace to shard one model, and its module; None without one.
        attention: separates the documents of packed rows.
        divides_loss: whether the caller divides a loss by the steps of its accumulation window before `backward`.
        joins: whether `join` lets processes run out of batches at different times.
        has_replicas: whether each of several processes has a whole model, which it can train without the others.
        views_matrices: whether optimizers that were registered with shapes see their parameters so.
        gradient_group: the ranks that average gradients with each other; None for all.
        data_group: the ranks that read the other shards of the data, at this rank's place in all other dimensions of
            the mesh; None for all.
        sequence: splits sequences over ranks; None if none is split.
        separates_documents: whether a forward of a prepared model computes the documents of packed rows separately.
    """

    name = "single process"
    api_method: str | None = None
    api_function: str | None = None
    divides_loss = True
    joins = False
    has_replicas = False
    views_matrices = True
    gradient_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    sequence: ContextParallel | None = None
    separates_documents = True

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
        self.transforms: tuple[Transform, ...] = ()
        # Called when an optimizer has stepped.
        self.after_step: tuple[Callable[[], None], ...] = ()
        self.prepared: PreparedModels = PreparedModels()
        self.attention: DocumentAttention = DocumentAttention()

    # -- data

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count) of the shard of the data that this process reads."""
        return 0, 1

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks over which gradients, and counts of items, are averaged."""
        return self.data_shard[1]

    def join(
        self, joinables: Sequence[object], loaders: Sequence[object], even_batches: bool | None
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which the processes may run out of batches at different times."""
        return NullContext()

    # -- prepare

    def prepare_together(self, objects: list[object], split_batches: bool = False) -> list[object]:
        """Called first with all objects of one `prepare`: returns them, with replacements for those made together."""
        return objects

    def lay_out_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step of parameters that this layout has replaced that of a single process, and share its work."""
        if self.views_matrices and has_views(optimizer):
            share_step(optimizer)

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Lay out each model of the bundle. The optimizers' parameters stay the same objects."""
        prepared_models = []
        for model, moves in zip(bundle.models, bundle.place, strict=True):
            if moves:
                self._check_storage(model)
                model = move_module(model, self.device)
            prepared_models.append(self.prepare_model(model, bundle.evaluation))
        self.prepared.add(prepared_models)
        return prepared_models

    def _check_storage(self, model: torch.nn.Module) -> None:
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        empty = next((name for name, tensor in tensors if tensor.is_meta), None)
        if empty is not None:
            raise PrepareError(
                f"{empty} of {type(model).__name__} is on the meta device and does not have "
                f"values, and {self.name} does not initialize it. Build the model on a real "
                "device, load its weights (load_checkpoint_and_dispatch), or call "
                "model.to_empty(device=...) and initialize it. An fsdp_plugin of version 2 "
                "initializes such models"
            )

    def prepare_model(self, model: torch.nn.Module, evaluation: bool = False) -> PreparedModel:
        """Everything that is done to one model, in its order. A layout has its own version of this method.

        Args:
            model: the user's model.
            evaluation: no gradients will be taken.
        """
        model = self.precision.wrap_forward(model)
        model = self.apply_transforms(model, before_layout=True)
        if not evaluation:
            self.precision.cast_parameters(model)
        self.precision.after_layout(model)
        # Compilation is the last of these.
        model = self.apply_transforms(model, before_layout=False)
        return self.as_prepared(model)

    def apply_transforms(self, model: torch.nn.Module, before_layout: bool) -> torch.nn.Module:
        """Apply the transforms that come before the layout, or after it."""
        for transform in self.transforms:
            if getattr(transform, "before_layout", False) is before_layout:
                model = transform.apply(model)
        return model

    def as_prepared(self, module: torch.nn.Module) -> PreparedModel:
        """A prepared model of a module that is laid out already, or not at all."""
        return PreparedModel(module, self.precision)

    def sync_rng_state(self) -> None:
        """Give ranks that compute the same activations the same random state; by default no ranks do."""

    # -- the step

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Backward of a loss, with all messages that gradients need."""
        scaler = self.precision.scaler
        if scaler is not None:
            loss = scaler.scale(loss)
        with self.recomputing():
            loss.backward(**kwargs)

    def recomputing(self) -> contextlib.AbstractContextManager[None]:
        """A block for a backward, in which attention that is computed again separates the documents of packed rows."""
        if self.attention.is_used:
            return self.attention.separating()
        return NullContext()

    def backward_items(
        self,
        loss: torch.Tensor,
        factor: Callable[[], torch.Tensor] | None = None,
        models: Iterable[torch.nn.Module] = (),
        **kwargs: object,
    ) -> None:
        """Backward of a loss that is weighted by its items, not divided by the steps of its window.

        Args:
            loss: the weighted loss.
            factor: given at the end of a window; the gradients are then multiplied by its result, which waits for
                all ranks.
            models: the models whose gradients are multiplied.
            kwargs: arguments of `Tensor.backward`.
        """
        self.backward(loss, **kwargs)
        if factor is not None:
            # Read only now: during the backward a sharded model has other parameters.
            multiply(self.window_gradients(list(models)), factor())

    def window_gradients(self, models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        """The gradients of prepared models at the end of an accumulation window, after a backward."""
        parameters: dict[int, torch.nn.Parameter] = {}
        for model in models:
            for parameter in model.parameters():
                parameters[id(parameter)] = parameter
        return gradients_of(parameters.values())

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def accumulated_norm(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The norm of the gradients that this process has in an unfinished window. It sends nothing."""
        shards = [local(gradient) for gradient in gradients_of(parameters)]
        return torch.nn.utils.get_total_norm(shards, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of every gradient to [-clip_value, clip_value]."""
        clip_values(gradients_of(parameters), clip_value)

    def release(self) -> None:
        """Free what other libraries keep for the prepared models."""
        for prepared in self.prepared:
            prepared.release()
        self.prepared.clear()
