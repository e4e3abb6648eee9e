# SPDX-License-Identifier: Apache-2.0
"""What follows from the order in which a model's units compute: how it is cut, what travels, who uses which tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from .. import materialize
from .flow import END, Flow
from .split import StageSplit, Unit, cut_model, encoder_of, is_inside, last_units


class MisfitError(PrepareError):
    """Stages cannot run the forward that was seen. The caller adds what would fit."""


@dataclass(frozen=True)
class StagePlan:
    """The cut; modules whose output travels on, with the number of their last unit; and who uses which tensor.

    `readers`: plain name of a parameter or buffer -> the numbers of the units that use it without owning it; None
    where the forward was not seen. `idle`: units that the forward did not call.
    """

    cut: StageSplit
    carried: dict[str, int]
    readers: dict[str, set[int]] | None = None
    idle: frozenset[str] = frozenset()

    def holders(self, model: nn.Module) -> dict[int, set[int]]:
        """id of a parameter, or of a buffer that is read -> numbers of units, on whose stages it is.

        A parameter outside of all units is on the stages that use it; on all of them where that is not known.
        """
        bounds, readers = self.cut.bounds, self.readers or {}
        named = {id(tensor): name for name, tensor in materialize.named_tensors(model)}
        holders: dict[int, set[int]] = {}
        for number, name in enumerate(self.cut.units):
            for parameter in model.get_submodule(name).parameters():
                found = readers.get(named[id(parameter)])
                held = holders.setdefault(id(parameter), set(found or ()))
                # A unit that is not called does not use its own parameters.
                if name not in self.idle or not found:
                    held.add(number)
        for parameter in model.parameters():
            if id(parameter) not in holders:
                unseen = set(bounds[:-1]) if self.readers is None else {0}
                holders[id(parameter)] = set(readers.get(named[id(parameter)]) or unseen)
        for buffer in model.buffers():
            if found := readers.get(named[id(buffer)]):
                holders[id(buffer)] = set(found)
        return holders

    def stages_of(self, units: set[int]) -> set[int]:
        """The stages of some units, by their numbers."""
        return {self.cut.stage_of(unit) for unit in units}


def decide(
    model: nn.Module,
    options: PipelineParallelConfig,
    stages: int,
    units: Sequence[Unit],
    flow: Flow | None,
    cost: Callable[[list[Unit]], list[float]] | None = None,
) -> StagePlan:
    """How a model of these units is cut into stages. Raises PrepareError (MisfitError) for what cannot be run so."""
    carried = list(encoder_of(model) if options.carried is None else options.carried)
    order = flow.order([unit.name for unit in units]) if flow is not None else ()
    cut = cut_model(model, stages, options.split_points, options.placement, cost, carried, order, units)
    if flow is None:
        return StagePlan(cut, _carried(model, options, cut, carried))
    if uncalled := [cut.units[place - 1] for place in cut.bounds[1:-1] if cut.units[place - 1] not in flow.calls]:
        raise PrepareError(
            f"{type(model).__name__} cannot be cut behind {', '.join(uncalled)}: its forward does not call it "
            "(by `module(...)`, which alone can be seen). Name split_points behind modules that it calls: "
            f"{', '.join(flow.called[:12])}"
        )
    if problem := conflict(cut, flow.calls):
        raise MisfitError(f"{type(model).__name__} cannot be cut so: {problem}.")
    if not options.placement and options.carried is None:
        seen = flow.carried(cut.units, [*cut.bounds[1:-1], cut.tail])
        seen = [name for name in seen if not any(is_inside(name, module) for module in carried)]
        if drawn := [name for name in seen if name in flow.random]:
            raise PrepareError(
                f"several stages use what {type(model).__name__} makes of the output of {', '.join(drawn)} with "
                "random numbers (dropout), and would draw other ones: name the module that does both in `carried`"
            )
        carried += seen
    readers = _readers(model, cut, flow)
    idle = frozenset(unit.name for unit in units) - set(flow.called)
    return StagePlan(cut, _carried(model, options, cut, carried), readers, idle)


def conflict(cut: StageSplit, calls: Sequence[str]) -> str | None:
    """Why stages cannot run a forward that calls its units in this order; None where they can.

    The rules are those of `StagedModel`: a part begins behind the unit before it, and ends with its last unit.
    """
    places = {name: place for place, name in enumerate(cut.units)}
    order = [places[name] for name in calls if name in places]
    parts = [*zip(cut.bounds[:-2], cut.bounds[1:-1], strict=True), (cut.bounds[-2], cut.tail), (cut.tail, None)]
    for start, stop in parts:
        if start == stop:
            continue
        passed = start == 0
        for place in order:
            if place < start:
                if passed:
                    return f"{cut.units[place]} computes behind {cut.units[start - 1]}, on a later stage than its own"
                passed = place == start - 1
            elif stop is not None and place >= stop:
                return f"{cut.units[place]} computes before {cut.units[stop - 1]}, on an earlier stage than its own"
            elif stop is not None and place == stop - 1:
                break
        else:
            if stop is not None:
                return f"{cut.units[stop - 1]}, behind which the model is cut, is not called"
            if not passed:
                return f"{cut.units[start - 1]}, behind which the model is cut, is not called"
    return None


def _carried(model: nn.Module, options: PipelineParallelConfig, cut: StageSplit, carried: list[str]) -> dict[str, int]:
    if carried and options.schedule in ("zero_bubble", "zbv"):
        raise PrepareError(
            f"schedule={options.schedule!r} computes the gradients of inputs and of weights apart, which torch cannot "
            f"do where several outputs pass between stages ({', '.join(carried)} beside the blocks): use '1f1b' or "
            "'interleaved'"
        )
    return last_units(model, cut.units, carried)


def _readers(model: nn.Module, cut: StageSplit, flow: Flow) -> dict[str, set[int]]:
    """Tensor -> the units that use it without owning it. Raises PrepareError for a tensor that would go apart."""
    places = {name: place for place, name in enumerate(cut.units)} | {END: len(cut.units) - 1}
    readers = {name: {places[unit] for unit in units} for name, units in flow.reads.items()}
    for name in sorted(flow.written & set(readers)):
        owners = {place for place, unit in enumerate(cut.units) if is_inside(name, unit)}
        stages = {cut.stage_of(place) for place in readers[name] | owners}
        if len(stages) > 1:
            raise PrepareError(
                f"a module of {type(model).__name__} changes {name} in its forward, and stages "
                f"{', '.join(map(str, sorted(stages)))} use it: each would have its own. Change it outside of the "
                "forward, or name split_points with which one stage uses it."
            )
    return readers
