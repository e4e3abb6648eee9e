# SPDX-License-Identifier: Apache-2.0
"""How a model is cut into stages, based on the data flow of its forward, and how to correct a bad cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from .. import materialize
from .dataflow import END, DataFlow, observe
from .split import StageSplit, Unit, computing_units, cut_model, encoder_of, is_inside, last_units, measure
from .stage import StagedModel

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class CutError(PrepareError):
    """Stages cannot run the observed forward. The caller adds the remedy."""


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut, and which stages need which tensors.

    Fields:
        cut: the stages.
        carried: modules whose output is sent to all later stages -> the number of their last unit.
        readers: plain name of a parameter or buffer -> the numbers of the units that use it without owning it; None
            where the forward was not observed.
        idle: units that the forward did not call.
    """

    cut: StageSplit
    carried: dict[str, int]
    readers: dict[str, set[int]] | None = None
    idle: frozenset[str] = frozenset()

    def locations(self, model: nn.Module) -> dict[int, set[int]]:
        """Map the id of each parameter, and of each buffer that is read, to the units on whose stages it is needed.

        A parameter outside of all units is needed where it is used; on all stages where that is not known.
        """
        bounds, readers = self.cut.bounds, self.readers or {}
        named = {id(tensor): name for name, tensor in materialize.named_tensors(model)}
        locations: dict[int, set[int]] = {}
        for number, name in enumerate(self.cut.units):
            for parameter in model.get_submodule(name).parameters():
                found = readers.get(named[id(parameter)])
                units = locations.setdefault(id(parameter), set(found or ()))
                # A unit that is not called does not use its own parameters.
                if name not in self.idle or not found:
                    units.add(number)
        for parameter in model.parameters():
            if id(parameter) not in locations:
                unobserved = set(bounds[:-1]) if self.readers is None else {0}
                locations[id(parameter)] = set(readers.get(named[id(parameter)]) or unobserved)
        for buffer in model.buffers():
            if found := readers.get(named[id(buffer)]):
                locations[id(buffer)] = set(found)
        return locations

    def stages_of(self, units: set[int]) -> set[int]:
        """The stages of units, by their numbers."""
        return {self.cut.stage_of(unit) for unit in units}


def plan_stages(model: nn.Module, options: PipelineParallelConfig, stages: int, device: torch.device) -> StagePlan:
    """Decide how a model is cut into `stages`, on all ranks together. All ranks call it.

    Rank 0 runs the forward on example inputs, or on the ones that transformers makes for its models, to observe the
    order in which units compute and what they use of each other.

    Raises:
        PrepareError: for options that do not fit the model.
    """
    units = computing_units(model)
    names = [unit.name for unit in units]
    inputs = options.example_inputs or {}
    flow: DataFlow | None = None
    if options.example_inputs is not None:
        flow = _on_rank_0(model, lambda: observe(model, names, (), inputs), device)
    elif _is_transformers_model(model):
        flow = _on_rank_0(model, lambda: _observe_dummies(model, names), device)

    def seconds(units: list[Unit]) -> list[float]:
        return _on_rank_0(model, lambda: measure(model, units, inputs), device)

    try:
        return cut_along(model, options, stages, units, flow, seconds if options.balance == "time" else None)
    except CutError as error:
        assert flow is not None
        raise PrepareError(f"{error} {remedy(model, options, stages, units, flow, observed=True)}") from error


def _is_transformers_model(model: nn.Module) -> bool:
    return all(hasattr(model, name) for name in ("dummy_inputs", "config", "main_input_name"))


def _observe_dummies(model: Any, names: list[str]) -> DataFlow | None:
    """The forward of a transformers model on dummy inputs; None where it does not take them."""
    try:
        weight = next(model.parameters())
        given = {name: value.to(weight.device) for name, value in model.dummy_inputs.items()}
        tokens = given.get("input_ids", torch.ones(2, 4, dtype=torch.long, device=weight.device))
        config, kind = model.config, model.main_input_name
        if kind == "pixel_values":
            given = {kind: weight.new_zeros(2, config.num_channels, config.image_size, config.image_size)}
        elif kind == "input_features":
            frames = 2 * config.max_source_positions
            given = {kind: weight.new_zeros(len(tokens), config.num_mel_bins, frames)}
        if config.is_encoder_decoder:
            given.setdefault("decoder_input_ids", tokens)
        flow = observe(model, names, (), given, fake_only=True)
    except Exception as error:
        logger.debug("%s does not run on its dummy inputs: %s", type(model).__name__, error)
        return None
    return flow if flow.called else None


def _on_rank_0(model: nn.Module, find: Callable[[], T], device: torch.device) -> T:
    """What `find()` returns on rank 0, on all ranks."""
    found: list[T] = []
    error: Exception | None = None
    reason = ""
    if dist.get_rank() == 0:
        try:
            found = [find()]
        except Exception as caught:
            # The others wait for a message.
            error, reason = caught, f"{type(caught).__name__}: {caught}"
    found, reason = materialize.from_first((found, reason), device)
    if reason:
        raise PrepareError(f"could not run {type(model).__name__} with example_inputs: {reason}") from error
    return found[0]


def cut_along(
    model: nn.Module,
    options: PipelineParallelConfig,
    stages: int,
    units: Sequence[Unit],
    flow: DataFlow | None,
    cost: Callable[[list[Unit]], list[float]] | None = None,
) -> StagePlan:
    """Cut a model of these units along its data flow; None where that was not observed.

    Raises:
        PrepareError: for options that do not fit the model.
        CutError: where stages cannot run the observed forward.
    """
    carried = list(encoder_of(model) if options.carried is None else options.carried)
    order = flow.order([unit.name for unit in units]) if flow is not None else ()
    cut = cut_model(model, stages, options.split_points, options.placement, cost, carried, order, units)
    if flow is None:
        return StagePlan(cut, _last_units(model, options, cut, carried))
    if uncalled := [cut.units[place - 1] for place in cut.bounds[1:-1] if cut.units[place - 1] not in flow.calls]:
        raise PrepareError(
            f"{type(model).__name__} cannot be cut behind {', '.join(uncalled)}: its forward does not call it "
            "(by `module(...)`; other calls cannot be intercepted). Name split_points behind modules that it calls: "
            f"{', '.join(flow.called[:12])}"
        )
    if problem := order_conflict(cut, flow.calls):
        raise CutError(f"{type(model).__name__} cannot be cut so: {problem}.")
    if not options.placement and options.carried is None:
        used_later = flow.carried(cut.units, [*cut.bounds[1:-1], cut.tail])
        used_later = [name for name in used_later if not any(is_inside(name, module) for module in carried)]
        if drawn := [name for name in used_later if name in flow.random]:
            raise PrepareError(
                f"several stages apply a random operation (dropout) to the output of {', '.join(drawn)} in "
                f"{type(model).__name__}, and would draw other numbers: name the module that does both in `carried`"
            )
        carried += used_later
    readers = _readers(model, cut, flow)
    idle = frozenset(unit.name for unit in units) - set(flow.called)
    return StagePlan(cut, _last_units(model, options, cut, carried), readers, idle)


def order_conflict(cut: StageSplit, calls: Sequence[str]) -> str | None:
    """Why stages cannot run a forward that calls its units in this order; None where they can.

    The rules are those of `StagedModel`: a segment begins after the unit before it, and ends with its last unit.
    """
    places = {name: place for place, name in enumerate(cut.units)}
    order = [places[name] for name in calls if name in places]
    segments = [*zip(cut.bounds[:-2], cut.bounds[1:-1], strict=True), (cut.bounds[-2], cut.tail), (cut.tail, None)]
    for start, stop in segments:
        if start == stop:
            continue
        started = start == 0
        for place in order:
            if place < start:
                if started:
                    return f"{cut.units[place]} computes behind {cut.units[start - 1]}, on a later stage than its own"
                started = place == start - 1
            elif stop is not None and place >= stop:
                return f"{cut.units[place]} computes before {cut.units[stop - 1]}, on an earlier stage than its own"
            elif stop is not None and place == stop - 1:
                break
        else:
            if stop is not None:
                return f"{cut.units[stop - 1]}, behind which the model is cut, is not called"
            if not started:
                return f"{cut.units[start - 1]}, behind which the model is cut, is not called"
    return None


def _last_units(
    model: nn.Module, options: PipelineParallelConfig, cut: StageSplit, carried: list[str]
) -> dict[str, int]:
    if carried and options.schedule_row.splits_backward:
        raise PrepareError(
            f"schedule={options.schedule!r} computes the gradients of inputs and of weights separately, which torch "
            f"cannot do where several outputs pass between stages ({', '.join(carried)} in addition to the blocks): "
            "use '1f1b' or 'interleaved'"
        )
    return last_units(model, cut.units, carried)


def _readers(model: nn.Module, cut: StageSplit, flow: DataFlow) -> dict[str, set[int]]:
    """Tensor -> the units that use it without owning it.

    Raises:
        PrepareError: for a tensor whose copies on several stages would diverge.
    """
    places = {name: place for place, name in enumerate(cut.units)} | {END: len(cut.units) - 1}
    readers = {name: {places[unit] for unit in units} for name, units in flow.reads.items()}
    for name in sorted(flow.written & set(readers)):
        owners = {place for place, unit in enumerate(cut.units) if is_inside(name, unit)}
        stages = {cut.stage_of(place) for place in readers[name] | owners}
        if len(stages) > 1:
            raise PrepareError(
                f"a module of {type(model).__name__} changes {name} in its forward, and stages "
                f"{', '.join(map(str, sorted(stages)))} use it: their copies would diverge. Change it outside of the "
                "forward, or name split_points with which one stage uses it."
            )
    return readers


# -- what to change


def call_remedy(
    staged: StagedModel, options: PipelineParallelConfig, stages: int, units: Sequence[Unit]
) -> Callable[[tuple[object, ...], dict[str, object]], str]:
    """A staged model's `remedy`. `units` are those of the model before it was cut."""

    def find(args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        try:
            with staged.observed() as forward:
                names = [unit.name for unit in units]
                flow = observe(staged.model, names, args, kwargs, fake_only=True, forward=forward)
        except Exception as error:
            logger.debug("the forward does not run on fake tensors: %s", error)
            return (
                "Give `example_inputs`, keyword arguments of the forward: prepare then runs it once and observes the "
                "order in which modules compute and what they use of each other. (It could not be tried on this call.)"
            )
        return remedy(staged.model, options, stages, units, flow, observed=False)

    return find


def remedy(
    model: nn.Module,
    options: PipelineParallelConfig,
    stages: int,
    units: Sequence[Unit],
    flow: DataFlow,
    observed: bool,
) -> str:
    """A sentence that proposes options with which this forward fits; each proposal was tried.

    `observed`: prepare knew the data flow.
    """
    free = replace(options, placement={}, carried=None)
    without = [f"`{name}`" for name in ("placement", "carried") if getattr(options, name)]
    left_out = f" without {' and '.join(without)}" if without else ""
    example = "" if observed else "example_inputs={...}"
    if (without or not observed) and _try(model, free, stages, units, flow):
        return (
            f"This fits: PipelineParallelConfig({example}){left_out}. `example_inputs` are keyword arguments of the "
            "forward: prepare observes the order in which modules compute, and what they use of each other."
        )
    points = _fitting_points(model, free, stages, units, flow)
    if points is not None:
        given = ", ".join([*([example] if example else []), f"split_points={points}"])
        return f"This fits: PipelineParallelConfig({given}){left_out}."
    return (
        f"No cut into {stages} stages was found that fits the order in which modules are called (a module that is "
        "called again later must be on one stage with everything in between): use fewer stages."
    )


def _try(
    model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit], flow: DataFlow | None
) -> StagePlan | None:
    try:
        return cut_along(model, options, stages, units, flow)
    except PrepareError:
        return None


def _fitting_points(
    model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit], flow: DataFlow
) -> list[str] | None:
    """`split_points` that fit the order of calls, near equal numbers of units; None where there are none."""
    order = flow.order([unit.name for unit in units])
    fits = [
        place
        for place in range(1, len(order))
        if not order_conflict(StageSplit(tuple(order), (0, place, len(order)), place), flow.calls)
    ]
    chosen: list[int] = []
    for number in range(stages - 1):
        left = stages - 2 - number
        usable = [place for place in fits if not chosen or place > chosen[-1]]
        usable = usable[: len(usable) - left]
        if not usable:
            return None
        wanted = len(order) * (number + 1) // stages
        chosen.append(min(usable, key=lambda place: abs(place - wanted)))
    points = [order[place] for place in chosen]
    return points if _try(model, replace(options, split_points=points), stages, units, flow) else None
