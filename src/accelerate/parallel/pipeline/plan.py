# SPDX-License-Identifier: Apache-2.0
"""Where a model is cut for training and what travels beside: decided alike on all ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from .flow import Flow, observe
from .split import Cut, Unit, computing_units, cut_model, encoder_of, is_inside, last_units, measure


def plan(
    model: nn.Module, options: PipelineParallelConfig, stages: int, device: torch.device
) -> tuple[Cut, dict[str, int]]:
    """The cut, and the modules whose output travels on: name -> the number of its last unit. All ranks call it.

    With example inputs the order in which units compute, and what they use of each other, are seen in a forward on
    the first rank. Raises PrepareError for what does not fit the model.
    """
    carried = list(encoder_of(model) if options.carried is None else options.carried)
    flow: Flow | None = None
    names = [unit.name for unit in computing_units(model)]
    if options.example_inputs is not None:
        flow = _of_first_rank(model, lambda: observe(model, names, (), options.example_inputs or {}), device)

    def seconds(units: list[Unit]) -> list[float]:
        return _of_first_rank(model, lambda: measure(model, units, options.example_inputs or {}), device)

    cost = seconds if options.balance == "time" else None
    order = flow.order(names) if flow is not None else ()
    cut = cut_model(model, stages, options.split_points, options.placement, cost, carried, order)
    if flow is not None and not options.placement and options.carried is None:
        seen = flow.carried(cut.units, [*cut.bounds[1:-1], cut.tail])
        seen = [name for name in seen if not any(is_inside(name, module) for module in carried)]
        if drawn := [name for name in seen if name in flow.random]:
            raise PrepareError(
                f"several stages use what {type(model).__name__} makes of the output of {', '.join(drawn)} with "
                "random numbers (dropout), and would draw other ones: name the module that does both in `carried`"
            )
        carried += seen
    if carried and options.schedule in ("zero_bubble", "zbv"):
        raise PrepareError(
            f"schedule={options.schedule!r} computes the gradients of inputs and of weights apart, which torch cannot "
            f"do where several outputs pass between stages ({', '.join(carried)} beside the blocks): use '1f1b' or "
            "'interleaved'"
        )
    return cut, last_units(model, cut.units, carried)


def _of_first_rank(model: nn.Module, find: Callable[[], Any], device: torch.device) -> Any:
    """What the first rank finds out, on all of them."""
    told: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told = [find()]
        except Exception as caught:
            # The others wait to be told.
            error, told = caught, [f"{type(caught).__name__}: {caught}"]
    dist.broadcast_object_list(told, src=0, device=device)
    if isinstance(told[0], str):
        raise PrepareError(f"could not run {type(model).__name__} with example_inputs: {told[0]}") from error
    return told[0]
