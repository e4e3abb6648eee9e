# SPDX-License-Identifier: Apache-2.0
"""What would make a model fit that is called in another order than it was cut for: proposals that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from .flow import Flow
from .order import StagePlan, conflict, decide
from .split import StageSplit, Unit, encoder_of, is_inside


def remedy(
    model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit], flow: Flow, seen: bool
) -> str:
    """A sentence that names options with which this forward fits; `seen`: prepare knew the order of its calls.

    Every proposal was decided on as prepare would.
    """
    if not seen:
        named = _fitting_names(model, options, stages, units, flow)
        if named is not None:
            given = ", ".join(f"{name}={value}" for name, value in named.items())
            return f"This fits: PipelineParallelConfig({given})."
    free = replace(options, placement={}, carried=None)
    without = [f"`{name}`" for name in ("placement", "carried") if getattr(options, name)]
    left_out = f" without {' and '.join(without)}" if without else ""
    if not seen and _fits(model, free, stages, units, flow):
        return (
            f"This fits: PipelineParallelConfig(example_inputs={{...}}){left_out}, keyword arguments of the forward "
            "as in this call. The order in which modules compute, and what they use of each other, is then seen."
        )
    if seen and without and _fits(model, free, stages, units, flow):
        return f"This fits: the same options{left_out}, as the order in which modules compute is seen."
    points = _fitting_points(model, free, stages, units, flow)
    if points is not None:
        example = "" if seen else "example_inputs={...}, "
        return f"This fits: PipelineParallelConfig({example}split_points={points}){left_out}."
    return (
        f"No cut into {stages} stages was found that fits the order in which modules are called (what is called again "
        "later has to be on one stage with all that lies between): use fewer stages."
    )


def _fits(
    model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit], flow: Flow | None
) -> bool:
    try:
        decide(model, options, stages, units, flow)
    except PrepareError:
        return False
    return True


def _fitting_names(
    model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit], flow: Flow
) -> dict[str, Any] | None:
    """`placement` and `carried` with which the model is cut rightly though nothing was seen; None: there are none."""
    names = [unit.name for unit in units]
    called = {name: place for place, name in enumerate(flow.called)}
    blocks = [unit.name for unit in units if unit.blocks is not None and unit.name in called]
    if not blocks or flow.reads:
        return None
    first, last = min(called[name] for name in blocks), max(called[name] for name in blocks)
    placement = dict(options.placement)
    for name in flow.called:
        if called[name] < first and names.index(name) > names.index(blocks[0]):
            placement[name] = "first"
        elif called[name] > last and names.index(name) < names.index(blocks[-1]):
            placement[name] = "last"
    found = _tried(model, replace(options, placement=placement), stages, units)
    if found is None:
        return None
    missing = _missing(found, flow)
    carried = [*(encoder_of(model) if options.carried is None else options.carried), *missing]
    if missing:
        found = _tried(model, replace(options, placement=placement, carried=carried), stages, units)
    if found is None or _missing(found, flow) or flow.random & set(missing) or conflict(found.cut, flow.calls):
        return None
    changed = {"placement": placement} if placement != options.placement else {}
    return {**changed, **({"carried": carried} if missing else {})} or None


def _tried(model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit]) -> StagePlan | None:
    try:
        return decide(model, options, stages, units, None)
    except PrepareError:
        return None


def _missing(found: StagePlan, flow: Flow) -> list[str]:
    """Units whose output later stages use and do not get."""
    cut = found.cut
    needed = flow.carried(cut.units, [*cut.bounds[1:-1], cut.tail])
    return [name for name in needed if not any(is_inside(name, module) for module in found.carried)]


def _fitting_points(
    model: nn.Module, options: PipelineParallelConfig, stages: int, units: Sequence[Unit], flow: Flow
) -> list[str] | None:
    """`split_points` that fit the order of calls, near those that balance the stages; None where there are none."""
    order = flow.order([unit.name for unit in units])
    fits = [
        place
        for place in range(1, len(order))
        if not conflict(StageSplit(tuple(order), (0, place, len(order)), place), flow.calls)
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
    return points if _fits(model, replace(options, split_points=points), stages, units, flow) else None
