# SPDX-License-Identifier: Apache-2.0
"""A loader that splits the sequences of its batches over the sequence-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigurationError
from ...data_loader.prepare import skip_first_batches

if TYPE_CHECKING:
    from .region import ContextParallel


class SequenceLoader:
    """Yields this rank's rows of each batch of `loader`. Other attributes are those of the loader.

    Each batch is a mapping with `input_ids` (batch, sequence). It becomes a dict whose (batch, sequence) tensors hold
    this rank's rows, with `position_ids`, and with `shift_labels` instead of `labels`. Models that are called during
    the iteration attend to the full sequence; inputs that are not split are computed as they are.
    """

    def __init__(self, loader: Any, parallel: ContextParallel) -> None:
        self.loader = loader
        self.parallel = parallel

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.parallel.loader_block():
            for batch in self.loader:
                if not isinstance(batch, Mapping):
                    raise ConfigurationError(
                        f"a batch of sequences to split must be a mapping with input_ids, not {type(batch).__name__}: "
                        "use maybe_context_parallel for it"
                    )
                yield self.parallel.split_batch(batch)

    def without_first(self, num_batches: int) -> SequenceLoader:
        """Without the first batches, for `skip_first_batches`."""
        return SequenceLoader(skip_first_batches(self.loader, num_batches), self.parallel)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
