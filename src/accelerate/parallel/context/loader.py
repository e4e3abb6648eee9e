# SPDX-License-Identifier: Apache-2.0
"""A loader whose batches of whole sequences come split over the sequence-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.errors import ConfigurationError
from ...data_loader.prepare import skip_first_batches
from .region import ContextParallel


class SequenceLoader:
    """Gives this rank's rows of each batch of `loader`; anything else is asked of the loader itself.

    Each batch is a mapping with `input_ids` (batch, sequence). It comes back as a dict whose (batch, sequence) tensors
    hold this rank's rows, with `position_ids`, and with `shift_labels` in the place of `labels`. Attention of models
    that are called while the loader is iterated over is to the whole sequence; inputs that are whole are left alone.
    """

    def __init__(self, loader: Any, parallel: ContextParallel) -> None:
        self.loader = loader
        self.parallel = parallel

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.parallel.feed():
            for batch in self.loader:
                if not isinstance(batch, Mapping):
                    raise ConfigurationError(
                        f"a batch of sequences to split is a mapping with input_ids, not a {type(batch).__name__}: "
                        "use maybe_context_parallel for it"
                    )
                yield self.parallel.split_batch(batch)

    def without_first(self, num_batches: int) -> SequenceLoader:
        """The same without its first batches, for `skip_first_batches`."""
        return SequenceLoader(skip_first_batches(self.loader, num_batches), self.parallel)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
