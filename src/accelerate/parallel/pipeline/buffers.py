# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward writes (a counter, the vectors of a spectral norm).

A forward of the complete batch would write them once. Each micro-batch starts from the values before the batch, on
copies, and the batch keeps what the last one has written. That is right where every micro-batch writes the same, which
the first ones show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...core.errors import PrepareError

# (module, name) where a buffer is registered.
Place = tuple[nn.Module, str]


class StageBuffers:
    """The buffers of one rank's model.

    Fields:
        places: name of each buffer -> where it is registered.
        written: stage -> names of the buffers that its units write.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, list[Place]] = {}
        self.written: dict[int, set[str]] = {}
        self._results: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                full_name = ".".join(filter(None, (prefix, name)))
                first_name = names.setdefault(id(buffer), full_name)
                self.places.setdefault(first_name, []).append((module, name))

    def present(self, name: str) -> torch.Tensor:
        """A buffer as it is now."""
        module, attribute = self.places[name][0]
        buffer: torch.Tensor = getattr(module, attribute)
        return buffer

    def outside(self, units: Sequence[str]) -> dict[str, torch.Tensor]:
        """The buffers that no unit has."""
        prefixes = tuple(f"{unit}." for unit in units)
        return {name: self.present(name) for name in self.places if not name.startswith(prefixes)}

    def changed(self, before: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of the buffers that have other values than before."""
        return [name for name, value in before.items() if not _equal(value, self.present(name))]

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Register other tensors."""
        for name, value in values.items():
            for module, attribute in self.places[name]:
                setattr(module, attribute, value)

    @contextlib.contextmanager
    def copied(self, stage: int) -> Iterator[None]:
        """A block in which a micro-batch writes copies of a stage's buffers, whose values `commit` keeps."""
        originals = {name: self.present(name) for name in self.written.get(stage, ())}
        self.replace({name: original.clone() for name, original in originals.items()})
        try:
            yield
            self._results.update((name, self.present(name)) for name in originals)
        finally:
            self.replace(originals)

    def commit(self) -> None:
        """Keep what the micro-batches of a batch have written."""
        with torch.no_grad():
            for name, value in self._results.items():
                self.present(name).copy_(value)
        self._results = {}

    @contextlib.contextmanager
    def observed(self, results: list[dict[str, torch.Tensor]]) -> Iterator[None]:
        """A block that changes no buffer. What it has written is appended to `results`."""
        originals = {name: self.present(name) for name in self.places}
        copies = {name: original.clone() for name, original in originals.items()}
        self.replace(copies)
        try:
            yield
            now = {name: self.present(name) for name in originals}
            results.append(
                {name: value for name, value in now.items() if not _equal(value, originals[name])}
            )
        finally:
            self.replace(originals)

    def add_written(self, stage: int, results: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take note of what several micro-batches have written.

        Raises:
            PrepareError: their values differ.
        """
        first = results[0]
        for other in results[1:]:
            for name in sorted(first.keys() | other.keys()):
                if name not in first or name not in other or not _equal(first[name], other[name]):
                    module, attribute = self.places[name][0]
                    raise PrepareError(
                        f"the forward of {name.rpartition('.')[0] or 'the model'} ({type(module).__name__}) writes to "
                        f"its buffer {attribute!r} what depends on the samples, and a pipeline computes a batch in "
                        "parts: set num_microbatches=1, or freeze it"
                    )
        self.written.setdefault(stage, set()).update(first)


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor.nan_to_num(), other.nan_to_num())
