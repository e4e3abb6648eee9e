# SPDX-License-Identifier: Apache-2.0
"""The strategy of a single process, which works as it is; every other layout overrides what differs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import PrepareError
from ..precision.base import Precision
from . import memory
from .gradients import gradients_of, multiply


@dataclass
class Bundle:
    """What one call of `prepare` lays out together: models, and the raw optimizers that hold their parameters.

    `place[i]` says whether model i is to be moved to the device; `evaluation` that no gradients will be taken.
    """

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    place: list[bool] = field(default_factory=list)
    evaluation: bool = False


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind that a rank sends in an optimizer step: how many, and their bytes (`unit`: of what).

    `about`: how bytes are shared out to messages is another library's to decide.
    """

    what: str
    messages: int
    sent: float
    unit: str = ""
    about: bool = False


def _check_storage(model: torch.nn.Module, layout: str) -> None:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if (empty := next((name for name, tensor in tensors if tensor.is_meta), None)) is not None:
        raise PrepareError(
            f"{empty} of {type(model).__name__} is on the meta device and has no values, and a run as {layout} does "
            "not make any. Build the model on a real device, load its weights (load_checkpoint_and_dispatch), or call "
            "model.to_empty(device=...) and initialise it; an fsdp_plugin of version 2 fills such models by itself"
        )


class Strategy:
    """How models live on the processes of a run."""

    name = "single process"
    # Whether no process holds a whole model: its state is then written and read in parts.
    is_sharded = False
    # Whether a process holds parts of models only: taking a whole state is then everybody's work.
    holds_parts = False
    # Whether a loss is divided by the steps of its window before `backward`; an engine may do that by itself.
    divides_loss = True

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
        self.transforms: tuple[Any, ...] = ()
        # What has to happen when an optimizer has stepped.
        self.after_step: tuple[Callable[[], None], ...] = ()

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which part of the data this process reads, of how many."""
        return 0, 1

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that read the other parts of the data and are like this one otherwise; None for all ranks."""
        return None

    @property
    def parts_group(self) -> dist.ProcessGroup | None:
        """The ranks that had different parts of the same samples in the last forward; None where they had the same."""
        return None

    @property
    def gradient_ranks(self) -> int:
        """Over how many ranks gradients, and counts of items, are averaged."""
        return self.data_shard[1]

    def prepare_together(self, objects: list[Any], split_batches: bool = False) -> list[Any]:
        """The objects of one `prepare`, those replaced that can only be made together; each is prepared after this."""
        return objects

    def draw_alike(self) -> None:
        """Ranks that hold the same activations are given the same random streams; by default none share any."""

    def prepare(self, bundle: Bundle) -> Bundle:
        """Template: place, lower, wrap, transform each model. The optimizers' parameters stay the same objects."""
        for position, model in enumerate(bundle.models):
            if bundle.place[position]:
                _check_storage(model, self.name)
                model = model.to(self.device)
            model = self.precision.wrap_forward(model)
            model = self.transformed(model, before=True)
            if not bundle.evaluation:
                model = self.wrap_model(model)
            model = self.transformed(model)
            bundle.models[position] = model
        return bundle

    def transformed(self, model: torch.nn.Module, before: bool = False) -> torch.nn.Module:
        """The model after the transforms that come `before` it is laid out, or after."""
        for transform in self.transforms:
            if getattr(transform, "before_layout", False) is before:
                model = transform.apply(model)
        return model

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        self.precision.lower(model)
        return model

    def settle(self, model: torch.nn.Module) -> None:
        """Have a prepared model hold its own parameters, as between two steps, where a forward shows others."""

    def others_in_place(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """A block in which other tensors may stand where a prepared model has its own parameters."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.precision.backward(loss, **kwargs)

    def backward_items(
        self,
        loss: torch.Tensor,
        factor: Callable[[], torch.Tensor] | None = None,
        models: Iterable[torch.nn.Module] = (),
        **kwargs: Any,
    ) -> None:
        """Backward of a loss that is weighed by its items, not divided by the steps of its window.

        Where the window ends, the gradients of `models` are then multiplied by `factor()`, which waits for all ranks.
        """
        self.backward(loss, **kwargs)
        if factor is not None:
            # Asked for only now: during the backward a sharded model shows other parameters.
            parameters = {id(p): p for model in models for p in model.parameters()}.values()
            multiply(gradients_of(parameters), factor())

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backwards accumulate without communicating."""
        return contextlib.nullcontext()

    def join(
        self, joinables: list[Any], loaders: list[Any], even_batches: bool | None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in which the processes may run out of batches at different times."""
        return contextlib.nullcontext()

    def context_parallel(
        self, buffers: list[torch.Tensor], seq_dims: list[int], no_restore: set[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """A block in which `buffers` hold this rank's part of their sequences; whole where no sequence is split."""
        return contextlib.nullcontext()

    def split_loader(self, loader: Any) -> Any:
        """The loader of a batch of sequences, each rank's part of them; as it is where no sequence is split."""
        return loader

    def traffic(self, model: torch.nn.Module, backwards: int) -> list[Traffic] | None:
        """What a prepared model sends in an optimizer step of so many backwards; None where that is not known."""
        return None

    def held(self, models: Sequence[torch.nn.Module], windows: bool) -> dict[str, int]:
        """Bytes that this rank holds for prepared models, by the kinds of `memory`, without the optimizers' state.

        `windows`: gradients accumulate over several backwards and are averaged in the last one alone.
        """
        return memory.of_models(models, self.precision)

    def masters(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """The fp32 weights that are stepped in the place of a prepared model's."""
        return self.precision.masters(model)

    def dtypes(self, model: torch.nn.Module) -> tuple[str, str]:
        """What a prepared model computes in, and what its gradients are averaged in."""
        return self.precision.computes_in, "the parameters' dtype"

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

    def state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The full state of a prepared model, under the names of the plain model."""
        return self.unwrap(model).state_dict()

    def save_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The full state that a checkpoint holds."""
        return self.state_dict(model)

    def plain(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """A module whose `state_dict()` has the plain model's names and shapes; None where the unwrapped one has."""
        return None

    def plain_groups(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[dict[str, list[int]]] | None:
        """{plain name: shape} of the parameters in each group; None where the optimizer's own have these shapes."""
        return None

    def open_gradients(self, model: torch.nn.Module) -> Any | None:
        """What a window has accumulated so far on this process, with `state_dict` and `load_state_dict`.

        None where the gradients are whole, in `.grad` of the unwrapped model's parameters, or where `holds_parts` and
        they cannot be had.
        """
        return None

    def rank_state(self, models: list[torch.nn.Module]) -> dict[str, Any]:
        """What this process has for itself beside the states of its prepared models: plain data for a checkpoint."""
        return {}

    def load_rank_state(self, models: list[torch.nn.Module], state: dict[str, Any]) -> None:
        """Take what `rank_state` gave on this process of a run of the same layout."""

    def trained_by(self, optimizer: Any, models: list[torch.nn.Module]) -> torch.nn.Module | None:
        """The prepared model of an optimizer that does not hold its parameters; None where it does."""
        return None

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def release(self) -> None:
        """Give up what the prepared models hold beside themselves."""
