# SPDX-License-Identifier: Apache-2.0
"""torch_xla's own device feed around a prepared loader. Imported only where torch_xla is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

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
        self.dataloader.share_generators(self._rng_types)
        return super().__iter__()

    def __getattr__(self, name: str) -> Any:
        if name in ("dataloader", "_loader"):
            raise AttributeError(name)
        return getattr(self.dataloader, name)
