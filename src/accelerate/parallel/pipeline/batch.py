# SPDX-License-Identifier: Apache-2.0
"""The state of one call of a pipelined model: its inputs, what passes between stages, and the autograd graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .microbatch import MicroBatches
from .p2p import TensorSpec, specs_in

OutputGradients = list[torch.Tensor | None]


class Stage(nn.Module):
    """The units of one stage as one module, which FSDP2 can shard."""

    def __init__(self, number: int, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.number = number
        self.units: nn.ModuleList = nn.ModuleList(units)

    def forward(self, *received: torch.Tensor, job: Callable[[int, Sequence[torch.Tensor]], Any]) -> Any:
        """Call `job` with the number of this stage and the received tensors."""
        return job(self.number, received)


@dataclass
class Boundary:
    """What passes from one stage to the next.

    Fields:
        output: the described output. unit_outputs: those of all units before, by unit, call by call.
        digest: of the inputs, so that the next stage can compare its own.
    """

    output: Any
    unit_outputs: dict[int, list[Any]]
    digest: str = ""

    def __post_init__(self) -> None:
        self.specs: list[TensorSpec] = specs_in(self.output)


class BatchKey(NamedTuple):
    """Equal for batches that are computed alike: the structure of the inputs, and the modes."""

    structure: Hashable
    training: bool
    grad: bool


@dataclass(frozen=True)
class StageFailure:
    """The error of a stage, sent to the others."""

    stage: int
    text: str


@dataclass
class BatchShapes:
    """What the first batch of its shapes has shown.

    Fields:
        stage_inputs, stage_outputs: boundaries by (stage, samples of a micro-batch).
        tail: (samples, described outputs of all units before the tail) of a micro-batch.
        output: the described output of the model. loss_index: which of its tensors is the loss.
        loss_rules: names of the rules by which losses of micro-batches make that of the batch (`losses`).
    """

    stage_inputs: dict[tuple[int, int], Boundary] = field(default_factory=dict)
    stage_outputs: dict[tuple[int, int], Boundary] = field(default_factory=dict)
    tail: tuple[int, dict[int, list[Any]]] | None = None
    output: Any = None
    loss_rules: list[str] | None = None
    loss_index: int | None = None


@dataclass
class SavedGraph:
    """The autograd graph of one micro-batch in one stage: its inputs and outputs."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class Batch:
    """One call of the model.

    Fields:
        key: equal for batches of equal shapes. is_new: the first of its shapes, whose boundaries are sent along.
        splits_tail: whether the tail runs on each micro-batch; None where that is not known yet.
        graphs: by stage, one for each micro-batch.
        local: what stages of one rank pass to each other, by (receiving stage, micro-batch).
        last_outputs: of the last stage, one for each micro-batch. tail: its graph over the complete batch;
            batched: which of the tail's inputs have a batch dimension.
        failure, error: of a stage that failed, and the exception where it was this one.
        loss_weights: of the micro-batches, where a schedule runs the batch.
        loss_rules, tail_matches: what the last stage learned from a new batch, sent with the output.
    """

    inputs: MicroBatches
    shapes: BatchShapes
    key: BatchKey
    grad: bool
    is_new: bool
    splits_tail: bool | None
    graphs: dict[int, list[SavedGraph]] = field(default_factory=dict)
    local: dict[tuple[int, int], Any] = field(default_factory=dict)
    last_outputs: list[Any] = field(default_factory=list)
    tail: SavedGraph | None = None
    batched: list[bool] = field(default_factory=list)
    output: Any = None
    failure: StageFailure | None = None
    error: Exception | None = None
    loss_weights: list[float] = field(default_factory=list)
    loss_rules: list[str] | None = None
    tail_matches: bool = False
    backward: Callable[[Batch, OutputGradients], None] | None = None
