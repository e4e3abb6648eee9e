# SPDX-License-Identifier: Apache-2.0
"""What usually causes a difference, from the facts of the comparison."""

from __future__ import annotations

from typing import Any

import torch

from .comparison import Comparison, Difference, Step, factor_of, norm

# By how much a factor may differ from one that it is compared with.
_TOLERANCE = 1e-2


def causes(comparison: Comparison, info: dict[str, Any]) -> list[str]:
    """The likely causes of the first difference, most likely first.

    Args:
        comparison: of the layout's run with the reference.
        info: what the layout's run has noted.
    """
    first = comparison.differences[0]
    number = first.step - 1
    expected, actual = comparison.reference[number], comparison.layout[number]
    name = f"{first.kind}/{first.name}"
    if name not in actual:
        return ["the layout does not train this tensor, or does not save it"]
    facts = _Facts(comparison, first, expected, actual, info)
    explain = {
        "batch": facts.of_batch,
        "output": facts.of_output,
        "loss": facts.of_loss,
        "gradient": facts.of_gradient,
        "options": facts.of_options,
        "parameter": facts.of_parameter,
        "buffer": facts.of_buffer,
        "state": facts.of_state,
    }
    return explain[first.kind]()


class _Facts:
    """The first difference and the steps that it is in."""

    def __init__(
        self,
        comparison: Comparison,
        first: Difference,
        expected: Step,
        actual: Step,
        info: dict[str, Any],
    ) -> None:
        self.comparison = comparison
        self.first = first
        self.name = f"{first.kind}/{first.name}"
        self.expected = expected[self.name]
        self.actual = actual[self.name]
        self.processes = int(info.get("processes", 1))
        self.shards = int(info.get("shards", 1))
        self.same_kind = [
            d for d in comparison.differences if d.step == first.step and d.kind == first.kind
        ]
        self.total = sum(name.startswith(f"{first.kind}/") for name in expected)

    def of_batch(self) -> list[str]:
        rows, reference = self.actual.flatten().sort()[0], self.expected.flatten().sort()[0]
        if self.actual.shape == self.expected.shape and torch.equal(rows, reference):
            return ["the same samples in another order: a sampler that orders them by the rank"]
        return [
            "the processes read other samples: random numbers of the data set or of collate_fn, which each process "
            "draws for itself, or a seed that is not set"
        ]

    def of_output(self) -> list[str]:
        difference = self.actual.double() - self.expected.double()
        factor = factor_of(self.actual, self.expected)
        if factor is not None and abs(factor - 1) > _TOLERANCE:
            return [
                f"all of it is multiplied by {factor:.4g}: a sum over ranks in place of a mean, or the reverse"
            ]
        rows = (
            difference.reshape(-1, difference.shape[-1])
            if difference.ndim > 1
            else difference[None]
        )
        spread = float((rows - rows[:1]).abs().max())
        if len(rows) > 1 and spread <= 1e-3 * float(rows.abs().max()):
            return [
                f"the same vector is added to each row: a bias that each of {self.processes} ranks adds"
            ]
        differing = rows.abs().amax(dim=-1) > 0
        if not bool(differing.all()):
            part = f"{int(differing.sum())} of {len(differing)} rows"
            return [
                f"{part} differ: a mask or the end of a sequence that is dropped, or samples that are combined"
            ]
        return ["what this module combines is split over ranks: samples, a sequence, or features"]

    def of_loss(self) -> list[str]:
        return [
            "the loss is no mean over equally many items on each rank: give backward their number, "
            "accelerator.backward(loss, num_items=n)",
            "the loss is computed from samples of several ranks, which none of them has all of",
        ]

    def of_gradient(self) -> list[str]:
        factor = factor_of(self.actual, self.expected)
        few = len(self.same_kind) < self.total
        if factor is not None and abs(factor - 1) > _TOLERANCE:
            text = f"the gradient is multiplied by {factor:.4g}"
            if few:
                return [
                    f"{text}, and others are not: it is reduced more than once, or not by all ranks"
                ]
            return [
                f"{text}, as all are: a sum in place of a mean over {self.processes} ranks, or a loss divided twice"
            ]
        if not norm(self.actual):
            return ["the gradient is zero: the layout loses it"]
        if few:
            return [
                "a part of the gradient is missing: it is not reduced over the ranks that share the parameter"
            ]
        return [
            "the ranks compute a mean over unequal parts, or gradients are not averaged",
            "a backward of another order of losses",
        ]

    def of_options(self) -> list[str]:
        return [
            f"{float(self.expected):.6g} on one process, {float(self.actual):.6g} in the layout: the script "
            "multiplies it by the number of processes, or a schedule makes another number of steps"
        ]

    def of_parameter(self) -> list[str]:
        step = self.first.step
        before = {}
        if step > 1:
            before = self.comparison.reference[step - 2]
        if self.name in before:
            start = before[self.name].double()
            factor = factor_of(self.actual.double() - start, self.expected.double() - start)
            if factor is not None and abs(factor - 1) > _TOLERANCE:
                return [
                    f"the step is multiplied by {factor:.4g}, with equal gradients: the optimizer computes a norm of "
                    "the part that a rank has, or another learning rate"
                ]
        return [
            "the gradients are equal: the optimizer combines elements of a tensor, or of several, of which a rank "
            "has a part"
        ]

    def of_buffer(self) -> list[str]:
        return ["the buffer is not synchronized, or is written once for each part of a batch"]

    def of_state(self) -> list[str]:
        return ["the optimizer's state was lost, or is not that of the whole tensor"]
