# SPDX-License-Identifier: Apache-2.0
"""Pipelined inference: a model cut into one stage a process, through which the parts of a batch flow.

It runs as pipelines do in training, without a tracer: `parallel.pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .core import trees
from .core.errors import PrepareError
from .parallel.pipeline.batch import Stage
from .parallel.pipeline.flow import observe
from .parallel.pipeline.inputs import Divider, keep_to_tensors
from .parallel.pipeline.order import conflict
from .parallel.pipeline.p2p import P2PChannel
from .parallel.pipeline.run import Runner
from .parallel.pipeline.split import (
    StageSplit,
    Unit,
    balance,
    check_names,
    find_units,
    is_inside,
    last_units,
    module_bytes,
)
from .parallel.pipeline.stage import StagedModel
from .state import PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """`model`, its forward run by all processes: each has one stage, a batch flows through in `num_chunks` parts.

    Args:
        split_points: names of the modules at which the second and each later stage begins, one fewer than processes;
            "auto" balances the stages by the bytes of their parameters.
        no_split_module_classes: classes of modules that "auto" keeps whole.
        example_args, example_kwargs: inputs of the forward. It runs once on their shapes (on their values, where it
            looks at them) to see in which order modules compute and what they use of each other.
        num_chunks: parts of a batch; None: as many as processes.
        gather_output: every process gets the output; otherwise the last one does, the others get None.

    Every process calls it, and later the model, with the same inputs, of any batch size. The modules of its stage go
    to the process's device, the others stay where they are. On one process the model is handed back as it is.
    Raises PrepareError for split points that do not fit, and for an output that holds more than tensors.
    """
    state = PartialState()
    model.eval()
    chunks = num_chunks or state.num_processes
    if chunks < 1:
        raise PrepareError(f"num_chunks={num_chunks} must be at least 1")
    if not state.use_distributed:
        return model
    example = (example_args, dict(example_kwargs or {}))
    if trees.first_leaf(example) is None:
        raise PrepareError("prepare_pippy needs example_args or example_kwargs: a batch of tensors")
    keep_to_tensors(model)
    points, cut, carried, reads = _cut(
        model, split_points, no_split_module_classes or (), example, state.num_processes
    )
    staged = StagedModel(model, cut.units, state.device, carried=carried, bounds=cut.bounds)
    start, stop = cut.bounds[state.process_index : state.process_index + 2]
    modules = [model.get_submodule(name) for name in cut.units]
    _own_to_device(model, [*modules[:start], *modules[stop:]], reads, state.device)
    stages = {state.process_index: Stage(state.process_index, modules[start:stop])}
    group = dist.group.WORLD
    assert group is not None
    wire, divider = P2PChannel(group, state.device), Divider(model.forward, (), chunks)
    runner = Runner(staged, cut, stages, range(state.num_processes), wire, divider)
    whole = model.forward

    # The user's module keeps its class, configuration and names; only what runs is another.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if staged.part is not None:
            return whole(*args, **kwargs)
        with torch.no_grad():
            args, kwargs = trees.send_to_device((args, kwargs), state.device)
            return runner.forward(runner.open(args, kwargs), everywhere=gather_output)

    model.forward = MethodType(forward, model)
    model.hf_split_points = points  # type: ignore[assignment]
    return model


def _cut(
    model: nn.Module,
    asked: str | Sequence[str],
    whole: Sequence[str],
    example: tuple[tuple[Any, ...], dict[str, Any]],
    stages: int,
) -> tuple[list[str], StageSplit, dict[str, int], set[str]]:
    """The split points, the cut, the units whose output travels on beside, and tensors used outside of their unit."""
    points = [] if asked == "auto" else [asked] if isinstance(asked, str) else list(asked)
    check_names(model, points)
    # What has no parameters computes on each stage.
    units = [unit for unit in _refined(model, find_units(model, whole, nested=not points), points) if unit.size]
    flow = observe(model, [unit.name for unit in units], *example)
    order = tuple(flow.called)
    if asked == "auto":
        points = _balanced(units, order, stages)
    elif len(points) != stages - 1:
        raise PrepareError(f"{len(points)} split points make {len(points) + 1} stages; there are {stages} processes")
    begins = [next((at for at, name in enumerate(order) if is_inside(name, point)), None) for point in points]
    if strange := [point for point, begin in zip(points, begins, strict=True) if begin is None]:
        raise PrepareError(
            f"split_points names {', '.join(strange)}, where {type(model).__name__} computes nothing with parameters: "
            f"it can be cut at {', '.join(order)}"
        )
    bounds = tuple(begin for begin in (0, *begins, len(order)) if begin is not None)
    if sorted(set(bounds)) != list(bounds):
        raise PrepareError(
            f"split_points {', '.join(points)} are not in the order in which {type(model).__name__} computes, or "
            "leave a stage empty"
        )
    carried = flow.carried(order, [*bounds[1:-1], len(order)])
    cut = StageSplit(order, bounds, len(order))
    if problem := conflict(cut, flow.calls):
        raise PrepareError(f"{type(model).__name__} cannot be cut at {', '.join(points)}: {problem}")
    return points, cut, last_units(model, order, carried), set(flow.reads)


def _refined(model: nn.Module, units: Sequence[Unit], points: Sequence[str]) -> list[Unit]:
    """The units, those that a split point lies in the middle of in parts."""
    found = []
    for unit in units:
        if any(point != unit.name and is_inside(point, unit.name) for point in points):
            children = model.get_submodule(unit.name).named_children()
            parts = [Unit(f"{unit.name}.{name}", module_bytes(child)) for name, child in children]
            found += _refined(model, parts, points)
        else:
            found.append(unit)
    return found


def _balanced(units: Sequence[Unit], order: Sequence[str], stages: int) -> list[str]:
    if len(order) < stages:
        raise PrepareError(
            f"the model has {len(order)} parts to cut between and there are {stages} processes: name split_points, or "
            "start fewer processes"
        )
    sizes = {unit.name: unit.size for unit in units}
    return [order[place] for place in balance([sizes[name] for name in order], stages)]


def _own_to_device(model: nn.Module, absent: Sequence[nn.Module], reads: set[str], device: torch.device) -> None:
    """Parameters and buffers of all modules but the absent ones go to the device, in place; and those in `reads`."""
    foreign = {id(module) for unit in absent for module in unit.modules()}
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and (id(module) not in foreign or path + name in reads):
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module) not in foreign or path + name in reads):
                module._buffers[name] = buffer.to(device)
