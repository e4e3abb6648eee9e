# SPDX-License-Identifier: Apache-2.0
"""Where a model is cut: its units in the order in which they compute, balanced over stages or cut at given names."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...core import devices
from ...core.errors import PrepareError


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
        return next(stage for stage in range(self.stages) if unit < self.bounds[stage + 1])

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
        nested: look for lists inside of the entries of lists, too.
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
        path = f"{name}.{child_name}" if name else child_name
        if in_list and isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            # A list is not called; its entries are.
            yield from _units(child, path, no_split, nested, outer or name)
        elif (
            (nested or not in_list)
            and type(child).__name__ not in no_split
            and any(isinstance(inner, _CONTAINERS) for inner in child.modules())
        ):
            yield from _units(child, path, no_split, nested)
        else:
            yield Unit(path, module_bytes(child), outer or (name if in_list else None))


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
        split_points: names of the units at which stages 2, 3, ... begin. None: a stage begins at an entry of the
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
        bounds = _named_bounds(model, names, list(split_points), stages)
    else:
        if cost is None:
            costs = [float(unit.size) for unit in units]
        else:
            costs = cost(units)
        bounds = _balanced_bounds(model, units, costs, stages, blocks)
    return StageSplit(tuple(names), tuple(bounds), min(max(blocks[-1] + 1, bounds[-2]), len(units)))


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
    found = {
        name: [number for number, unit in enumerate(units) if is_inside(unit, name)]
        for name in carried
    }
    strange = [name for name, numbers in found.items() if not numbers]
    if strange:
        raise PrepareError(
            f"carried names {', '.join(strange)}, which contains none of the units of {type(model).__name__}: "
            f"{_listed(units)}"
        )
    return {name: numbers[-1] for name, numbers in found.items()}


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
    return [place for place, unit in enumerate(units) if unit.blocks in lists]


def _named_bounds(
    model: nn.Module, names: Sequence[str], points: Sequence[str], stages: int
) -> list[int]:
    check_names(model, points)
    if len(points) != stages - 1:
        raise PrepareError(
            f"{len(points)} split_points make {len(points) + 1} stages; {stages} are requested"
        )
    inner = [point for point in points if point not in names]
    if inner:
        raise PrepareError(
            f"split_points names {', '.join(inner)}, where {type(model).__name__} cannot be cut: its units are "
            f"{_listed(names)}"
        )
    places = [names.index(point) for point in points]
    bounds = [0, *places, len(names)]
    if any(here >= there for here, there in itertools.pairwise(bounds)):
        raise PrepareError(
            f"split_points {', '.join(points)} are not in the order of the model, or leave a stage empty"
        )
    return bounds


def check_names(model: nn.Module, points: Sequence[str]) -> None:
    """Raises PrepareError for a split point that is no module of the model."""
    known = dict(model.named_modules())
    unknown = [name for name in points if name not in known]
    if unknown:
        raise PrepareError(
            f"split_points name no module of {type(model).__name__}: {', '.join(unknown)}"
        )


def _balanced_bounds(
    model: nn.Module,
    units: Sequence[Unit],
    costs: Sequence[float],
    stages: int,
    blocks: Sequence[int],
) -> list[int]:
    if len(blocks) < stages:
        raise PrepareError(
            f"{type(model).__name__} has {len(blocks)} blocks ({_listed([units[place].name for place in blocks])}) "
            f"and {stages} stages are requested: lower pp_size or stages_per_rank, or name split_points"
        )
    # Units before the blocks belong to the first block, and units after a block to that block.
    begins = [0, *blocks[1:], len(units)]
    grouped = [sum(costs[begin:end]) for begin, end in itertools.pairwise(begins)]
    return [0, *(blocks[place] for place in balance(grouped, stages)), len(units)]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Where stages 2, 3, ... begin such that the costliest stage costs least; each stage has at least one entry.

    Of equally good cuts it takes the one with lighter early stages, which keep more micro-batches at a time.
    """
    total = len(costs)
    best = [[float("inf")] * (total + 1) for _ in range(stages + 1)]
    begin = [[0] * (total + 1) for _ in range(stages + 1)]
    best[0][0] = 0
    # best[s][end]: the costliest stage when costs[:end] fill s stages.
    for stage in range(1, stages + 1):
        for end in range(stage, total + 1):
            load = 0.0
            for start in range(end - 1, stage - 2, -1):
                load += costs[start]
                largest = max(best[stage - 1][start], load)
                if largest < best[stage][end]:
                    best[stage][end], begin[stage][end] = largest, start
    cuts, end = [], total
    for stage in range(stages, 1, -1):
        end = begin[stage][end]
        cuts.append(end)
    return cuts[::-1]


def measure(
    model: nn.Module, units: Sequence[Unit], inputs: Mapping[str, object], rounds: int = 3
) -> list[float]:
    """Seconds that each unit's forward takes, the least of several rounds, on the model's device."""
    modules = [model.get_submodule(unit.name) for unit in units]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise PrepareError(
            "balance='time' runs the model, which has no weights yet: use balance='parameters'"
        )
    spent = [float("inf")] * len(modules)
    now = [0.0] * len(modules)

    def clock(place: int, sign: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            devices.synchronize(device)
            now[place] += sign * time.perf_counter()

        return hook

    handles = []
    for place, module in enumerate(modules):
        handles.append(module.register_forward_pre_hook(clock(place, -1)))
        handles.append(module.register_forward_hook(clock(place, 1)))
    try:
        with torch.no_grad(), torch.random.fork_rng():
            for _ in range(rounds):
                now[:] = [0.0] * len(modules)
                model(**inputs)
                spent = [min(pair) for pair in zip(spent, now, strict=True)]
    finally:
        for handle in handles:
            handle.remove()
    return spent
