# SPDX-License-Identifier: Apache-2.0
"""One call of a pipelined model on its way: the stages it goes through, what passes between them, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core import trees
from .inputs import Inputs
from .stage import Spec, is_spec


class Stage(nn.Module):
    """The units of one stage, as one module: what a layout shards as a whole."""

    def __init__(self, number: int, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.number = number
        self.units = nn.ModuleList(units)

    def forward(self, *received: torch.Tensor, job: Callable[[int, Sequence[torch.Tensor]], Any]) -> Any:
        return job(self.number, received)


@dataclass
class Boundary:
    """What passes from one stage to the next (described), what the units before gave, and a digest of the inputs."""

    output: Any
    seen: dict[int, list[Any]]
    digest: str = ""

    def __post_init__(self) -> None:
        self.specs: list[Spec] = list(trees.leaves(self.output, is_spec))


@dataclass(frozen=True)
class StageFailure:
    """What a stage could not do, told to the others."""

    stage: int
    text: str


@dataclass
class Known:
    """What was learned from the first batch of its shapes: boundaries by (stage, rows), the output described."""

    inlets: dict[tuple[int, int], Boundary] = field(default_factory=dict)
    outlets: dict[tuple[int, int], Boundary] = field(default_factory=dict)
    # What all units before the tail give to a micro-batch of so many rows.
    tail: tuple[int, dict[int, list[Any]]] | None = None
    output: Any = None
    notes: Any = None
    # Which of the output's tensors is the loss.
    place_of_loss: int | None = None


@dataclass
class Saved:
    """The graph of one micro-batch in one stage: what came in, what went out."""

    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class Batch:
    """One call of the model: its inputs, and the graphs that its backward goes through."""

    inputs: Inputs
    known: Known
    key: Any
    grad: bool
    new: bool
    by_parts: bool | None
    saved: dict[int, list[Saved]] = field(default_factory=dict)
    # What stages of one rank hand to each other: (to which stage, micro-batch) -> boundary and tensors, or gradients.
    local: dict[tuple[int, int], Any] = field(default_factory=dict)
    # Of the last stage: what each micro-batch gave; the tail's graph over the whole batch; the output.
    given: list[Any] = field(default_factory=list)
    tail: Saved | None = None
    divided: list[bool] = field(default_factory=list)
    output: Any = None
    failure: StageFailure | None = None
    error: Exception | None = None
    # Of its micro-batches in the loss, where a schedule runs it.
    weights: list[float] = field(default_factory=list)
    # What the last stage found out beside, told to all with the output of a new batch.
    notes: Any = None
    # Whether it was learned from this batch that outputs of its structure may be computed by parts.
    parts_agreed: bool = False
    backward: Callable[[Batch, list[torch.Tensor | None]], None] | None = None
