# SPDX-License-Identifier: Apache-2.0
"""How a model is cut into stages, based on one observed forward where there are example inputs for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from .. import materialize
from .observe import Observation, observe
from .p2p import P2PChannel
from .split import (
    StageSplit,
    Unit,
    computing_units,
    cut_model,
    encoder_of,
    is_inside,
    last_units,
    measure,
)

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut, and which stages need which parameters.

    Fields:
        cut: the stages.
        carried: modules whose output is sent to all later stages -> the number of their last unit.
        reads: plain names of parameters that are used outside of their unit.
    """

    cut: StageSplit
    carried: dict[str, int]
    reads: frozenset[str] = frozenset()

    def locations(self, model: nn.Module) -> dict[int, set[int]]:
        """Map the id of each parameter to the stages that have it.

        These are the stages of the units that contain it. A parameter that is used outside of its unit, and one
        outside of all units, is on every stage.
        """
        everywhere, locations = set(range(self.cut.stages)), dict[int, set[int]]()
        named = {id(parameter): name for name, parameter in materialize.named_parameters(model)}
        for number, unit in enumerate(self.cut.units):
            for parameter in model.get_submodule(unit).parameters():
                locations.setdefault(id(parameter), set()).add(self.cut.stage_of(number))
        for key, name in named.items():
            if key not in locations or name in self.reads:
                locations[key] = everywhere
        return locations


def plan_stages(
    model: nn.Module,
    options: PipelineParallelConfig,
    stages: int,
    channel: P2PChannel,
    observed: Observation | None = None,
) -> StagePlan:
    """Decide how a model is cut into `stages`, on all ranks together. All ranks call it.

    Rank 0 runs the forward on example inputs, or on the ones that transformers makes for its models, to observe the
    order in which units compute and what they use of each other, unless it is `observed` already.

    Raises:
        PrepareError: for options that do not fit the model.
    """
    units = computing_units(model)
    names = [unit.name for unit in units]
    inputs = options.example_inputs or {}
    seen = observed
    if seen is None and options.example_inputs is not None:
        seen = _on_rank_0(model, lambda: observe(model, names, (), inputs), channel)
    elif seen is None and _has_dummies(model):
        seen = _on_rank_0(model, lambda: observe_dummies(model, names), channel)

    def seconds(units: list[Unit]) -> list[float]:
        return _on_rank_0(model, lambda: measure(model, units, inputs), channel)

    return cut_along(
        model, options, stages, units, seen, seconds if options.balance == "time" else None
    )


def _has_dummies(model: nn.Module) -> bool:
    return all(hasattr(model, name) for name in ("dummy_inputs", "config", "main_input_name"))


def observe_dummies(model: Any, names: list[str]) -> Observation | None:
    """The forward of a transformers model on dummy inputs; None where it does not take them."""
    try:
        weight = next(model.parameters())
        # Without a mask, whose values transformers reads.
        inputs = {
            k: v.to(weight.device) for k, v in model.dummy_inputs.items() if k != "attention_mask"
        }
        tokens = inputs.get("input_ids", torch.ones(2, 4, dtype=torch.long, device=weight.device))
        config, kind = model.config, model.main_input_name
        if kind == "pixel_values":
            inputs = {
                kind: weight.new_zeros(2, config.num_channels, config.image_size, config.image_size)
            }
        elif kind == "input_features":
            frames = 2 * config.max_source_positions
            inputs = {kind: weight.new_zeros(len(tokens), config.num_mel_bins, frames)}
        if config.is_encoder_decoder:
            inputs.setdefault("decoder_input_ids", tokens)
        seen = observe(model, names, (), inputs)
    except Exception as error:
        logger.debug("%s does not run on its dummy inputs: %s", type(model).__name__, error)
        return None
    if seen.calls:
        return seen
    return None


def _on_rank_0(model: nn.Module, find: Callable[[], T], channel: P2PChannel) -> T:
    """What `find()` returns on rank 0, on all ranks."""
    results: list[T] = []
    cause: Exception | None = None
    reason = ""
    if dist.get_rank() == 0:
        try:
            results = [find()]
        except Exception as error:
            # The others wait for a message.
            cause, reason = error, f"{type(error).__name__}: {error}"
    results, reason = channel.from_first((results, reason))
    if reason:
        raise PrepareError(
            f"could not run {type(model).__name__} with example_inputs: {reason}"
        ) from cause
    return results[0]


def cut_along(
    model: nn.Module,
    options: PipelineParallelConfig,
    stages: int,
    units: Sequence[Unit],
    seen: Observation | None,
    cost: Callable[[list[Unit]], list[float]] | None = None,
) -> StagePlan:
    """Cut a model of these units along an observed forward; None where it was not observed.

    Raises:
        PrepareError: for options that do not fit the model, or where stages cannot run the observed forward.
    """
    carried = list(encoder_of(model) if options.carried is None else options.carried)
    order = seen.order([unit.name for unit in units]) if seen is not None else ()
    cut = cut_model(model, stages, options.split_points, cost, carried, order, units)
    if seen is not None:
        problem = order_conflict(cut, seen.calls)
        if problem:
            raise PrepareError(
                f"{type(model).__name__} cannot be cut so: {problem}. A module that is called again later must be on "
                "one stage with everything in between: name other `split_points`, or use fewer stages"
            )
        if options.carried is None:
            used_later = [
                name
                for name in seen.used_across(cut.units, [*cut.bounds[1:-1], cut.tail])
                if not any(is_inside(name, module) for module in carried)
            ]
            drawn = [name for name in used_later if name in seen.random]
            if drawn:
                raise PrepareError(
                    f"several stages apply a random operation (dropout) to the output of {', '.join(drawn)} in "
                    f"{type(model).__name__}, and would draw other numbers: name the module that does both in "
                    "`carried`"
                )
            carried += used_later
    if carried and options.schedule_row.splits_backward:
        raise PrepareError(
            f"schedule={options.schedule!r} computes the gradients of inputs and of weights separately, which torch "
            f"cannot do where several outputs pass between stages ({', '.join(carried)} in addition to the blocks): "
            "use '1f1b' or 'interleaved'"
        )
    reads = frozenset() if seen is None else frozenset(seen.reads)
    return StagePlan(cut, last_units(model, cut.units, carried), reads)


def order_conflict(cut: StageSplit, calls: Sequence[str]) -> str | None:
    """Why stages cannot run a forward that calls its units in this order; None where they can.

    The rules are those of `StagedModel`: a segment begins after the unit before it, and ends with its last unit.
    """
    numbers = {name: number for number, name in enumerate(cut.units)}
    order = [numbers[name] for name in calls if name in numbers]
    segments = [
        *zip(cut.bounds[:-2], cut.bounds[1:-1], strict=True),
        (cut.bounds[-2], cut.tail),
        (cut.tail, None),
    ]
    for start, stop in segments:
        if start == stop:
            continue
        started = start == 0
        for number in order:
            if number < start:
                if started:
                    return f"{cut.units[number]} computes behind {cut.units[start - 1]}, on a later stage than its own"
                started = number == start - 1
            elif stop is not None and number >= stop:
                return f"{cut.units[number]} computes before {cut.units[stop - 1]}, on an earlier stage than its own"
            elif stop is not None and number == stop - 1:
                break
        else:
            if stop is not None:
                missing = stop - 1
            elif started:
                missing = None
            else:
                missing = start - 1
            if missing is not None:
                return (
                    f"its forward does not call {cut.units[missing]}, behind which it is cut (by `module(...)`; other "
                    "calls are not seen)"
                )
    return None
