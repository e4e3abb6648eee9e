# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward writes (a counter, the vectors of a spectral norm).

A forward of the complete batch would write them once. Each micro-batch starts from the values before the batch, on
copies, and the batch keeps what the last one has written. That is right where every micro-batch writes the same, which
the first ones show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ...core.errors import PrepareError
from ...core.modules import direct_buffers

# (module, name) where a buffer is registered.
Place = tuple[nn.Module, str]
# By name.
Buffers = dict[str, torch.Tensor]


class StageBuffers:
    """The buffers of one rank's model.

    Fields:
        places: name of each buffer -> where it is registered.
        written: stage -> names of the buffers that its units write.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, list[Place]] = {}
        self.written: dict[int, set[str]] = {}
        self._results: Buffers = {}
        names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for name, buffer in direct_buffers(module).items():
                full_name = ".".join(filter(None, (prefix, name)))
                first_name = names.setdefault(id(buffer), full_name)
                self.places.setdefault(first_name, []).append((module, name))

    def present(self, names: Iterable[str]) -> Buffers:
        """Buffers as they are now."""
        buffers = {}
        for name in names:
            module, attribute = self.places[name][0]
            buffers[name] = getattr(module, attribute)
        return buffers

    def changed(self, before: Buffers, now: Buffers) -> Buffers:
        """Those buffers that have other values now than before."""
        return {name: value for name, value in now.items() if not _equal(value, before[name])}

    def _replace(self, values: Buffers) -> None:
        for name, value in values.items():
            for module, attribute in self.places[name]:
                setattr(module, attribute, value)

    @contextlib.contextmanager
    def copied(self, names: Iterable[str]) -> Iterator[Buffers]:
        """A block that writes copies of these buffers, which it yields when it ends."""
        originals = self.present(names)
        self._replace({name: original.clone() for name, original in originals.items()})
        results: Buffers = {}
        try:
            yield results
            results.update(self.present(originals))
        finally:
            self._replace(originals)

    @contextlib.contextmanager
    def micro_batch(self, stage: int) -> Iterator[None]:
        """A block in which a micro-batch writes copies of a stage's buffers, whose values `commit` keeps."""
        with self.copied(self.written.get(stage, ())) as results:
            yield
        self._results.update(results)

    def commit(self) -> None:
        """Keep what the micro-batches of a batch have written."""
        with torch.no_grad():
            for name, buffer in self.present(self._results).items():
                buffer.copy_(self._results[name])
        self._results = {}

    def add_written(self, stage: int, results: Sequence[Buffers]) -> None:
        """Take note of what several micro-batches have written.

        Raises:
            PrepareError: their values differ.
        """
        before = self.present(self.places)
        for name in self.places:
            values = [result[name] for result in results]
            if all(_equal(value, before[name]) for value in values):
                continue
            if not all(_equal(value, values[0]) for value in values):
                module, attribute = self.places[name][0]
                raise PrepareError(
                    f"the forward of {name.rpartition('.')[0] or 'the model'} "
                    f"({type(module).__name__}) writes values that depend on the samples to its "
                    f"buffer {attribute!r}, but a pipeline computes a batch in parts: set "
                    "num_microbatches=1, or freeze it"
                )
            self.written.setdefault(stage, set()).add(name)


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor.nan_to_num(), other.nan_to_num())
