# SPDX-License-Identifier: Apache-2.0
"""torch_xla's own device feed around a prepared loader. Imported only where torch_xla is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..collectives.rng import synchronize_rng_states

if TYPE_CHECKING:

    class MpDeviceLoader:
        """The class of torch_xla, which has no annotations."""

        def __init__(self, loader: Any, device: torch.device) -> None: ...
        def __iter__(self) -> Iterator[Any]: ...

else:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader


class MpDeviceLoaderWrapper(MpDeviceLoader):
    """A device loader of torch_xla around a prepared loader: a thread copies batches to the device.

    Args:
        dataloader: the prepared loader. Its attributes are attributes of this loader too.
        device: the XLA device.
    """

    def __init__(self, dataloader: Any, device: torch.device) -> None:
        super().__init__(dataloader, device)
        self._rng_types = dataloader.rng_types
        # Generators are synchronized in `__iter__`, before the thread starts.
        dataloader.rng_types = None
        self.device = device
        self.dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        if self._rng_types:
            synchronize_rng_states(self._rng_types, self.dataloader.synchronized_generator)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.dataloader.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples in a step over all shards."""
        return int(self.dataloader.total_batch_size)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset of all shards."""
        return int(self.dataloader.total_dataset_length)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the prepared loader."""
        return self.dataloader.batch_sampler

    def __getattr__(self, name: str) -> Any:
        if name in ("dataloader", "_loader"):
            raise AttributeError(name)
        return getattr(self.dataloader, name)
