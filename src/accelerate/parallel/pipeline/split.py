# SPDX-License-Identifier: Apache-2.0
"""How a model is cut into stages: its units in the order in which they compute, balanced or cut at given names.

Where there are example inputs, one observed forward shows the order and what units use of each other.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core import devices
from ...core.errors import PrepareError
from .. import materialize
from .observe import Observation, hooked, observe
from .p2p import P2PChannel

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """A module that is not divided between stages: its name, its bytes, and the list of blocks that it is in."""

    name: str
    size: int
    blocks: str | None = None


@dataclass(frozen=True)
class StageSplit:
    """Units in the order in which they compute; stage s has units[bounds[s]:bounds[s + 1]].

    The tail, units[tail:], is what follows the last block on the last stage.
    """

    units: tuple[str, ...]
    bounds: tuple[int, ...]
    tail: int

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.bounds) - 1

    def stage_of(self, unit: int) -> int:
        """Return the stage of a unit."""
        return bisect.bisect_right(self.bounds, unit) - 1

    def units_of(self, stages: Iterable[int]) -> list[int]:
        """Return the numbers of the units of some stages."""
        units: list[int] = []
        for stage in sorted(stages):
            units += range(self.bounds[stage], self.bounds[stage + 1])
        return units


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module, no_split: Sequence[str] = (), nested: bool = False) -> list[Unit]:
    """Units in the order of the model: entries of its lists of blocks, and modules outside of the lists.

    A module that is registered under several names is one unit, under the first of them.

    Args:
        model: the model.
        no_split: names of classes that become one unit each.
        nested: look for lists inside the entries of lists, too.
    """
    units: dict[nn.Module, Unit] = {}
    for unit in _units(model, "", frozenset(no_split), nested):
        units.setdefault(model.get_submodule(unit.name), unit)
    return list(units.values())


def _units(
    module: nn.Module, name: str, no_split: frozenset[str], nested: bool, outer: str | None = None
) -> Iterator[Unit]:
    """`outer`: the list of blocks that a list in a list belongs to."""
    in_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".removeprefix(".")
        if in_list and isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            # A list is not called; its entries are.
            yield from _units(child, path, no_split, nested, outer or name)
            continue
        may_be_split = (nested or not in_list) and type(child).__name__ not in no_split
        if may_be_split and any(isinstance(inner, _CONTAINERS) for inner in child.modules()):
            yield from _units(child, path, no_split, nested)
        elif in_list:
            yield Unit(path, module_bytes(child), outer or name)
        else:
            yield Unit(path, module_bytes(child), outer)


def module_bytes(module: nn.Module) -> int:
    """Return the size of a module's parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def cut_model(
    model: nn.Module,
    stages: int,
    split_points: Sequence[str] | None = None,
    cost: Callable[[list[Unit]], list[float]] | None = None,
    carried: Sequence[str] = (),
    order: Sequence[str] = (),
    units: Sequence[Unit] | None = None,
) -> StageSplit:
    """Cut a model into stages.

    Args:
        model: the model.
        stages: how many, on all ranks together.
        split_points: names of the modules at which stages 2, 3, ... begin. None: a stage begins at an entry of the
            largest list of blocks, or of a list in a carried module, such that the costliest stage costs least.
        cost: of units; None: their bytes.
        carried: names of modules whose output is sent to all later stages.
        order: the units in the order in which they compute; empty where that is not known.
        units: those of the model before it was cut; None: they are found.

    Raises:
        PrepareError: for names that do not fit, and for fewer blocks than stages.
    """
    units = computing_units(model) if units is None else list(units)
    if order:
        units.sort(key=lambda unit: order.index(unit.name))
    names = [unit.name for unit in units]
    blocks = _blocks(units, carried)
    if split_points is not None:
        bounds = named_bounds(model, names, split_points, stages)
    else:
        costs = [float(unit.size) for unit in units]
        if cost is not None:
            costs = cost(units)
        bounds = _balanced_bounds(model, units, costs, stages, blocks)
    tail = max(blocks[-1] + 1, bounds[-2])
    return StageSplit(tuple(names), tuple(bounds), tail)


def computing_units(model: nn.Module) -> list[Unit]:
    """The units with parameters. Modules without (rotary embeddings, dropout) compute on every stage that calls them.

    Lists of parameters are not called; their entries count as the model's own parameters.
    """
    lists = (nn.ParameterList, nn.ParameterDict)
    return [
        unit
        for unit in find_units(model)
        if unit.size and not isinstance(model.get_submodule(unit.name), lists)
    ]


def last_units(model: nn.Module, units: Sequence[str], carried: Sequence[str]) -> dict[str, int]:
    """Name of a carried module -> the number of the last unit in it. Raises PrepareError for one without units."""
    last: dict[str, int] = {}
    for name in carried:
        for number, unit in enumerate(units):
            if is_inside(unit, name):
                last[name] = number
        if name not in last:
            raise PrepareError(
                f"carried names {name}, which does not contain any of the units of "
                f"{type(model).__name__}: {_listed(units)}"
            )
    return last


def encoder_of(model: nn.Module) -> list[str]:
    """The name of the encoder of an encoder-decoder model of transformers, if it is one."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return []
    encoder = model.get_encoder()  # type: ignore[operator]
    return [name for name, module in model.named_modules() if module is encoder]


def is_inside(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of one inside it."""
    return f"{name}.".startswith(f"{module}.")


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 12:
        return ", ".join(names)
    return f"{', '.join(names[:8])}, ... {', '.join(names[-3:])}"


def _blocks(units: Sequence[Unit], carried: Sequence[str]) -> list[int]:
    """Indices of the entries of the largest list of blocks, and of lists in carried modules; else of all units."""
    sizes: dict[str, int] = {}
    for unit in units:
        if unit.blocks is not None:
            sizes[unit.blocks] = sizes.get(unit.blocks, 0) + unit.size
    if not sizes:
        return list(range(len(units)))
    lists = {blocks for blocks in sizes if any(is_inside(blocks, name) for name in carried)}
    lists.add(max(sizes, key=lambda name: sizes[name]))
    return [number for number, unit in enumerate(units) if unit.blocks in lists]


def named_bounds(
    model: nn.Module, names: Sequence[str], points: Sequence[str], stages: int
) -> list[int]:
    """The bounds of stages that begin at named modules: units, or modules that contain units.

    Args:
        model: the model.
        names: of the units, in the order in which they compute.
        points: names of the modules at which stages 2, 3, ... begin.
        stages: how many.

    Raises:
        PrepareError: for names that do not fit.
    """
    if len(points) != stages - 1:
        raise PrepareError(
            f"{len(points)} split_points make {len(points) + 1} stages, but {stages} are requested"
        )
    bounds = [0]
    for point in points:
        contained = [number for number, name in enumerate(names) if is_inside(name, point)]
        if not contained:
            raise PrepareError(
                f"split_points names {point}, where {type(model).__name__} cannot be cut: its units are "
                f"{_listed(names)}"
            )
        bounds.append(contained[0])
    bounds.append(len(names))
    if sorted(set(bounds)) != bounds:
        raise PrepareError(
            f"split_points {', '.join(points)} are not in the order in which {type(model).__name__} computes, or "
            "leave a stage empty"
        )
    return bounds


def _balanced_bounds(
    model: nn.Module,
    units: Sequence[Unit],
    costs: Sequence[float],
    stages: int,
    blocks: Sequence[int],
) -> list[int]:
    if len(blocks) < stages:
        raise PrepareError(
            f"{type(model).__name__} has {len(blocks)} blocks "
            f"({_listed([units[number].name for number in blocks])}) but {stages} stages are "
            "requested: lower pp_size or stages_per_rank, or set split_points"
        )
    # Units before the blocks belong to the first block, and units after a block to that block.
    begins = [0, *blocks[1:], len(units)]
    grouped = [sum(costs[begin:end]) for begin, end in itertools.pairwise(begins)]
    return [0, *(blocks[number] for number in balance(grouped, stages)), len(units)]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Where stages 2, 3, ... begin such that the costliest stage costs least; each stage has at least one entry.

    Of equally good cuts it takes the one with the lighter last stages.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        """The costliest stage when costs[:end] fill `count` stages, and where these begin."""
        if count == 1:
            return sums[end], ()
        cuts = []
        for start in range(end - 1, count - 2, -1):
            largest, begins = best(start, count - 1)
            cuts.append((max(largest, sums[end] - sums[start]), (*begins, start)))
        return min(cuts, key=operator.itemgetter(0))

    _, begins = best(len(costs), stages)
    return list(begins)


def measure(
    model: nn.Module, units: Sequence[Unit], inputs: Mapping[str, object], rounds: int = 3
) -> list[float]:
    """Seconds that each unit's forward takes, the least of several rounds, on the model's device."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise PrepareError(
            "balance='time' runs the model, which does not have weights yet: use "
            "balance='parameters'"
        )
    least = {unit.name: float("inf") for unit in units}
    seconds = dict.fromkeys(least, 0.0)

    def clock(sign: int, name: str, *_: object) -> None:
        devices.synchronize(device)
        seconds[name] += sign * time.perf_counter()

    start, stop = functools.partial(clock, -1), functools.partial(clock, 1)
    with hooked(model, least, start, stop), torch.no_grad(), torch.random.fork_rng():
        for _ in range(rounds):
            seconds.update(dict.fromkeys(least, 0.0))
            model(**inputs)
            for name, duration in seconds.items():
                least[name] = min(least[name], duration)
    return list(least.values())


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
        locations: dict[int, set[int]] = {}
        for number, unit in enumerate(self.cut.units):
            for parameter in model.get_submodule(unit).parameters():
                locations.setdefault(id(parameter), set()).add(self.cut.stage_of(number))
        for name, parameter in materialize.named_parameters(model):
            if id(parameter) not in locations or name in self.reads:
                locations[id(parameter)] = set(range(self.cut.stages))
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
    has_dummies = all(
        hasattr(model, name) for name in ("dummy_inputs", "config", "main_input_name")
    )
    if observed is None and options.example_inputs is not None:
        observed = _on_rank_0(model, lambda: observe(model, names, (), inputs), channel)
    elif observed is None and has_dummies:
        observed = _on_rank_0(model, lambda: observe_dummies(model, names), channel)
    seconds = None
    if options.balance == "time":

        def seconds(units: list[Unit]) -> list[float]:
            return _on_rank_0(model, lambda: measure(model, units, inputs), channel)

    return cut_along(model, options, stages, units, observed, seconds)


def observe_dummies(model: Any, names: list[str]) -> Observation | None:
    """The forward of a transformers model on dummy inputs; None where it does not take them."""
    try:
        weight = next(model.parameters())
        inputs = {name: value.to(weight.device) for name, value in model.dummy_inputs.items()}
        # transformers reads the values of a mask.
        inputs.pop("attention_mask", None)
        tokens = inputs.get("input_ids", torch.ones(2, 4, dtype=torch.long, device=weight.device))
        config, kind = model.config, model.main_input_name
        if kind == "pixel_values":
            size = config.image_size
            inputs = {kind: weight.new_zeros(2, config.num_channels, size, size)}
        elif kind == "input_features":
            frames = 2 * config.max_source_positions
            inputs = {kind: weight.new_zeros(len(tokens), config.num_mel_bins, frames)}
        if config.is_encoder_decoder:
            inputs.setdefault("decoder_input_ids", tokens)
        observed = observe(model, names, (), inputs)
    except Exception as error:
        logger.debug("%s does not run on its dummy inputs: %s", type(model).__name__, error)
        return None
    if not observed.calls:
        return None
    return observed


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
                f"{type(model).__name__} cannot be split this way: {problem}. A module that is "
                "called again later must be on the same stage as everything in between: choose "
                "other `split_points`, or use fewer stages"
            )
        if options.carried is None:
            carried += [
                name
                for name in seen.used_across(cut.units, [*cut.bounds[1:-1], cut.tail])
                if not any(is_inside(name, module) for module in carried)
            ]
    if carried and options.schedule_row.splits_backward:
        raise PrepareError(
            f"schedule={options.schedule!r} computes the gradients of inputs and weights "
            "separately, which torch cannot do if several outputs pass between stages "
            f"({', '.join(carried)} in addition to the blocks): use '1f1b' or 'interleaved'"
        )
    reads = frozenset() if seen is None else frozenset(seen.reads)
    return StagePlan(cut, last_units(model, cut.units, carried), reads)


def order_conflict(cut: StageSplit, calls: Sequence[str]) -> str | None:
    """Why stages cannot run a forward that calls its units in this order; None where they can.

    The rules are those of `StagedModel`: a segment begins after the unit before it, and ends with its last unit.
    """
    numbers = {name: number for number, name in enumerate(cut.units)}
    order = [numbers[name] for name in calls if name in numbers]
    bounds = [*cut.bounds[:-1], cut.tail, len(cut.units) + 1]
    for start, stop in itertools.pairwise(bounds):
        # The tail has no unit that ends it, and the blocks of the last stage may all belong to it.
        is_tail = stop > len(cut.units)
        if start == stop:
            continue
        started = start == 0
        for number in order:
            if number < start and started:
                return f"{cut.units[number]} computes behind {cut.units[start - 1]}, on a later stage than its own"
            if number >= stop:
                return f"{cut.units[number]} computes before {cut.units[stop - 1]}, on an earlier stage than its own"
            if number < start:
                started = number == start - 1
            elif number == stop - 1:
                break
        else:
            required = stop
            if is_tail:
                required = start
            if not (is_tail and started):
                return (
                    f"its forward does not call {cut.units[required - 1]}, behind which it is cut (by `module(...)`; "
                    "other calls are not seen)"
                )
    return None
