# SPDX-License-Identifier: Apache-2.0
"""Pipelined inference: a model split into one stage per process. Each batch is processed in micro-batches.

It runs as pipelines do in training, without a tracer: `parallel.pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core import trees
from ..core.errors import PrepareError
from ..core.modules import class_names, replace_data
from ..parallel.pipeline.microbatch import Args, BatchSplitter, Kwargs, disable_caches
from ..parallel.pipeline.observe import observe
from ..parallel.pipeline.p2p import P2PChannel
from ..parallel.pipeline.runner import Runner
from ..parallel.pipeline.split import (
    StagePlan,
    StageSplit,
    Unit,
    balance,
    find_units,
    is_inside,
    last_units,
    module_bytes,
    named_bounds,
    order_conflict,
)
from ..parallel.pipeline.stage import StagedModel
from ..state import PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Return `model` with a forward that all processes run together: each process runs one stage, on micro-batches.

    Every process must call this function, and later the model, with the same inputs. The batch size may vary. The
    modules of a stage are moved to the device of its process. On one process the model is returned unchanged.

    Args:
        model: the model, which is set to evaluation mode.
        split_points: the names of the modules at which the second and each later stage begins, one fewer than
            processes. "auto" balances the stages by the bytes of their parameters.
        no_split_module_classes: classes of modules that "auto" does not split.
        example_args: positional inputs of the forward. It runs once on their shapes (on their values, if it reads
            them) to find the order in which modules compute and the tensors that they share.
        example_kwargs: keyword inputs of the forward, used in the same way.
        num_chunks: the number of micro-batches. By default the number of processes.
        gather_output: whether every process gets the output. Otherwise only the last process gets it, and the others
            get None.

    Returns:
        The model. Parts of its output that are not tensors or plain values, such as a cache, are None.

    Raises:
        PrepareError: the split points do not fit.

    Example:
        model = prepare_pippy(model, example_args=(inputs,))
        with torch.no_grad():
            outputs = model(inputs)  # on the last process
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
        raise PrepareError(
            "prepare_pippy needs a batch of tensors as example_args or example_kwargs"
        )
    disable_caches(model)
    unsplit = class_names(model, "no_split_module_classes", no_split_module_classes)
    points, plan = _cut(model, split_points, unsplit, example, state.num_processes)
    splitter = BatchSplitter(model.forward, (), chunks)
    rank = state.process_index
    shared = set()
    for name, parameter in model.named_parameters():
        if name in plan.reads:
            shared.add(id(parameter))
    staged = StagedModel(model, plan.cut, [rank], state.device, plan.carried, shared)
    staged.watch()
    for tensor in (*model.parameters(), *model.buffers()):
        moved = tensor.detach().to(state.device)
        replace_data(tensor, moved)
    group = dist.group.WORLD
    assert group is not None
    channel = P2PChannel(group, state.device)
    runner = Runner(
        staged,
        ranks=range(state.num_processes),
        channel=channel,
        splitter=splitter,
        gather=True,
    )

    # The user's module keeps its class, configuration and names; only what runs is another.
    def forward(args: Args, kwargs: Kwargs) -> object:
        with torch.no_grad():
            args, kwargs = trees.send_to_device((args, kwargs), state.device)
            batch = runner.new_batch(args, kwargs)
            runner.find_shapes(batch)
            return runner.forward(batch, on_all_ranks=gather_output)

    staged.replace_forward(forward)
    model.hf_split_points = points  # type: ignore[assignment]
    return model


def _cut(
    model: nn.Module,
    requested: str | Sequence[str],
    no_split: Sequence[str],
    example: tuple[tuple[Any, ...], dict[str, Any]],
    stages: int,
) -> tuple[list[str], StagePlan]:
    """The split points, and the stages."""
    if requested == "auto":
        points = []
    elif isinstance(requested, str):
        points = [requested]
    else:
        points = list(requested)
    found_units = find_units(model, no_split, nested=not points)
    # What has no parameters computes on each stage.
    refined = _refined(model, found_units, points)
    units = [unit for unit in refined if unit.size]
    seen = observe(model, [unit.name for unit in units], *example)
    order = tuple(dict.fromkeys(seen.calls))
    if requested == "auto":
        points = _balanced(units, order, stages)
    bounds = named_bounds(model, order, points, stages)
    carried = seen.used_across(order, bounds[1:])
    cut = StageSplit(order, tuple(bounds), len(order))
    problem = order_conflict(cut, seen.calls)
    if problem:
        raise PrepareError(
            f"{type(model).__name__} cannot be cut at {', '.join(points)}: {problem}"
        )
    plan = StagePlan(cut, last_units(model, order, carried), frozenset(seen.reads))
    return points, plan


def _refined(model: nn.Module, units: Sequence[Unit], points: Sequence[str]) -> list[Unit]:
    """The units, with a unit that contains a split point replaced by its children."""
    refined = []
    for unit in units:
        others = [point for point in points if point != unit.name]
        if not any(is_inside(point, unit.name) for point in others):
            refined.append(unit)
            continue
        children = []
        for name, child in model.get_submodule(unit.name).named_children():
            children.append(Unit(f"{unit.name}.{name}", module_bytes(child)))
        refined += _refined(model, children, points)
    return refined


def _balanced(units: Sequence[Unit], order: Sequence[str], stages: int) -> list[str]:
    if len(order) < stages:
        raise PrepareError(
            f"the model has {len(order)} units to split among {stages} processes: set "
            "split_points, or start fewer processes"
        )
    sizes = {unit.name: unit.size for unit in units}
    begins = balance([sizes[name] for name in order], stages)
    return [order[index] for index in begins]
