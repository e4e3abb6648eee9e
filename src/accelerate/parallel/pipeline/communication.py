# SPDX-License-Identifier: Apache-2.0
"""What a rank of a pipeline sends in an optimizer step, told from what its first batch has shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...core import trees
from ..prepared import CommunicationVolume
from .batch import Known
from .run import Runner
from .stage import Spec, is_spec


def stage_volume(runner: Runner, backwards: int) -> list[CommunicationVolume]:
    """Messages between stages, and of the output. Bytes are those of the shapes that were trained on last."""
    known = next((found for key, found in reversed(runner.known.items()) if key[1] and key[2]), None)
    parts = runner.divider.parts * backwards
    if known is None:
        hops = sum(number < runner.last for number in runner.stages) + sum(number > 0 for number in runner.stages)
        return [CommunicationVolume("tensors between stages", hops * parts, 0, " (unknown before the first batch)")]
    forward = _specs(known, runner, outlets=True)
    back = [spec for spec in _specs(known, runner, outlets=False) if spec.requires_grad]
    found = [
        CommunicationVolume("activations to the next stage", len(forward) * parts, _bytes(forward) * parts),
        CommunicationVolume("gradients to the former stage", len(back) * parts, _bytes(back) * parts),
    ]
    if runner.wire.rank == runner.source:
        output = list(trees.leaves(known.output, is_spec))
        found.append(CommunicationVolume("output to all stages", len(output) * backwards, _bytes(output) * backwards))
    return [one for one in found if one.messages]


def _specs(known: Known, runner: Runner, outlets: bool) -> list[Spec]:
    """What one micro-batch, the largest, sends to other ranks: forward, or (of what came in) backward."""
    boundaries = known.outlets if outlets else known.inlets
    rows = max((rows for _, rows in boundaries), default=0)
    found = []
    for (stage, count), boundary in boundaries.items():
        other = stage + 1 if outlets else stage - 1
        if count == rows and runner.ranks[other] != runner.wire.rank:
            found += boundary.specs
    return found


def _bytes(specs: Iterable[Spec]) -> int:
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)


def gradient_volume(
    whole: Sequence[torch.Tensor], tied: Sequence[torch.Tensor], copies: bool
) -> list[CommunicationVolume]:
    """What gradients send once a step: averages over copies of a stage, sums of what several stages hold."""
    found = []
    if copies and whole:
        found.append(CommunicationVolume("all-reduce of gradients between copies", 1, sum(p.nbytes for p in whole)))
    if tied:
        found.append(CommunicationVolume("sums of tied gradients", len(tied), sum(p.nbytes for p in tied)))
    return found
