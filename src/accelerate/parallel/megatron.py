# SPDX-License-Identifier: Apache-2.0
"""What the API has for Megatron-LM alone, on this library's own layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def prepare_data_loader(accelerator: Any, dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, prepared for the layout of the run: ranks that share one model replica read the same samples.

    Megatron-LM needed a loader of its own kind for that; here it is what `accelerator.prepare` does with any loader.
    """
    prepared: DataLoader[Any] = accelerator.prepare_data_loader(dataloader)
    return prepared
