# SPDX-License-Identifier: Apache-2.0
"""Base classes of prepared loaders: attributes of the present batch, and the proxy of the torch loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ..core.errors import ConfigurationError
from ..core.observers import NO_LOOP, RunLoop
from ..state import GradientState


class DataLoaderStateMixin:
    """The attributes of the last batch of a loader, and the loader's registration with the gradient state.

    Attributes:
        end_of_dataloader: this batch is the last one.
        remainder: samples in the last global batch if it is smaller than the others, 0 if it is not, -1 if that is
            unknown or the rest is dropped.
        batch_counts: the samples of each shard in this step without repetitions and placeholders, in shard order;
            None if that is unknown.
        batch_weight: with `exact`, the weight of this shard's mean loss in the mean over all shards, which is its
            fraction of the step's samples times the number of shards. 0.0 for a placeholder. 1.0 without `exact`.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    batch_counts: tuple[int, ...] | None = None
    batch_weight: float = 1.0
    # That of the run that has prepared this loader.
    loop: RunLoop = NO_LOOP
    _open_passes = 0

    @property
    def last_step_size(self) -> int | None:
        """Samples in an incomplete last step on all shards, with repetitions; None where that is not known."""
        return None

    def reset(self) -> None:
        """Clear the attributes of the last batch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.batch_counts = None
        self.batch_weight = 1.0

    def begin(self) -> None:
        """Start a pass: this is now the active loader."""
        self.reset()
        self._open_passes += 1
        GradientState()._add_dataloader(self)

    def end(self) -> None:
        """End a pass, complete or not. The loader whose loop encloses this one, if any, is active again."""
        self._open_passes = max(0, self._open_passes - 1)
        state = GradientState()
        state._remove_dataloader(self)
        if self._open_passes:
            # A loop over this loader encloses the loop that ended.
            state._add_dataloader(self)


class DataLoaderAdapter:
    """A proxy of a torch loader (`base_dataloader`) with its attributes, which is an instance of its class.

    Args:
        dataset: the dataset.
        use_stateful_dataloader: build torchdata's `StatefulDataLoader` instead of torch's `DataLoader`.
        batch_sampler: the batch sampler, or None.
        **kwargs: the other arguments of that class.
    """

    base_dataloader: DataLoader[Any]

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        self.base_dataloader = loader_class(use_stateful_dataloader)(dataset, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # While a copy is being made there is no base yet.
        if name == "base_dataloader":
            raise AttributeError(name)
        if name == "total_batch_size":
            raise AttributeError(
                "total_batch_size: the batches of this loader do not have a fixed size"
            )
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance(loader, DataLoader) is true, and so it is for a subclass of it.
        base = self.__dict__.get("base_dataloader")
        if base is None:
            return type(self)
        return type(base)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Does nothing: the state counts what was yielded, not what was prefetched. Part of the API."""


def loader_class(stateful: bool) -> type[DataLoader[Any]]:
    """The loader class to build."""
    if not stateful:
        return DataLoader
    import torchdata.stateful_dataloader

    kind: type[DataLoader[Any]] = torchdata.stateful_dataloader.StatefulDataLoader
    return kind


def check_loader(dataloader: Any, who: str) -> None:
    """Raise ConfigurationError for anything that is not a torch loader."""
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(
            f"{who} takes a torch.utils.data.DataLoader, not a "
            f"{type(dataloader).__module__}.{type(dataloader).__qualname__}. Wrap the dataset in "
            "a DataLoader first."
        )
