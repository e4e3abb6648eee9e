# SPDX-License-Identifier: Apache-2.0
"""What was asked for and what became of it: the layout, every kind of parameter and module, messages, memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..precision.base import Precision
from .base import Strategy, Traffic
from .traffic import shard_groups

_OFTEN_NONE = ("buffers", "masters")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Row:
    """One line: what it is about, what was asked for (and where), what is the case."""

    name: str
    got: str
    asked: str = ""


@dataclass(frozen=True)
class Report:
    """The sections of an explanation; `str()` of it is what `explain` prints."""

    sections: dict[str, list[Row]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines: list[str] = []
        for title, rows in self.sections.items():
            width = max((len(row.name) for row in rows), default=0)
            lines.append(title)
            for row in rows:
                asked = f"   (asked: {row.asked})" if row.asked else ""
                lines.append(f"  {row.name:<{width}}  {row.got}{asked}")
        return "\n".join(lines)

    def find(self, section: str, name: str) -> str:
        """What is the case for one line. Raises KeyError where there is none."""
        rows = self.sections.get(section, ())
        for row in rows:
            if row.name == name:
                return row.got
        known = ", ".join(row.name for row in rows) if rows else ", ".join(self.sections)
        raise KeyError(f"the report has no line {name!r} in {section!r}; there are: {known}")


def explain(
    asked: Iterable[Row],
    strategy: Strategy,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    memory: Sequence[dict[str, int]] | None = None,
    sync_each_batch: bool = False,
) -> Report:
    """The report of a run. `asked` are the lines of what the user wanted; `steps` the backwards of a window.

    `sync_each_batch`: gradients are averaged in each of these. `memory` is what `held_bytes` gave on each rank;
    None: on this one only.
    """
    sections = {"run": [*asked, *_layout(strategy)]}
    for number, model in enumerate(models):
        inner = strategy.unwrap(model)
        # FSDP1 stays around the model, FSDP2 changes its class.
        plain = inner.module if type(inner).__name__ == "FullyShardedDataParallel" else inner
        kind = type(plain).__name__.removeprefix("FSDP")
        title = f"model {number}: {kind}" if len(models) > 1 else f"model: {kind}"
        sections[title] = [*_modules(model), *_parameters(inner), *_dtypes(strategy, model)]
        sent = _traffic(strategy, model, steps, sync_each_batch)
        sections[f"messages of {title}, of this rank in an optimizer step"] = sent
    held = [held_bytes(models, optimizers, strategy.precision)] if memory is None else memory
    place = ["this rank"] if memory is None else [f"rank {rank}" for rank in range(len(held))]
    sections["memory"] = [Row(name, _memory(found)) for name, found in zip(place, held, strict=True)]
    return Report(sections)


def held_bytes(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], precision: Precision
) -> dict[str, int]:
    """Bytes that this rank holds: of parameters, buffers, gradients as large as they get, masters, optimizer state."""
    parameters = {id(p): p for model in models for p in model.parameters()}.values()
    buffers = {id(b): b for model in models for b in model.buffers()}.values()
    state = [
        value
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": _bytes(parameters),
        "buffers": _bytes(buffers),
        "gradients": _bytes(p for p in parameters if p.requires_grad),
        "masters": _bytes({id(m): m for model in models for m in precision.masters(model)}.values()),
        "optimizer state": _bytes(state),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_local(tensor).numel() * tensor.dtype.itemsize for tensor in tensors)


def _memory(found: dict[str, int]) -> str:
    text = ", ".join(f"{name} {size_of(count)}" for name, count in found.items() if count or name not in _OFTEN_NONE)
    return f"{text}: {size_of(sum(found.values()))}" + ("" if found["optimizer state"] else " (before the first step)")


def size_of(count: float) -> str:
    """A number of bytes in words: `1.50 MiB`."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.2f} {_UNITS[power]}"


def _layout(strategy: Strategy) -> list[Row]:
    index, count = strategy.data_shard
    rows = [Row("strategy", strategy.name), Row("data", f"part {index} of {count}")]
    mesh = getattr(strategy, "mesh", None)
    if mesh is not None:
        sizes = zip(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate() or (), strict=False)
        rows.append(Row("mesh", " x ".join(f"{name}={size} (here {at})" for name, size, at in sizes)))
    return rows


def _pattern(name: str) -> str:
    """A name without its numbers: equal layers become one line."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _grouped(named: Iterable[tuple[str, str]]) -> list[Row]:
    counts = Counter((_pattern(name), text) for name, text in named)
    return [Row(name or "(whole)", text + (f"   x {n}" if n > 1 else "")) for (name, text), n in counts.items()]


def _modules(model: nn.Module) -> list[Row]:
    """What modules were turned into: wrapped, sharded, compiled, converted."""
    return _grouped(
        (name, ", ".join(marks)) for name, module in model.named_modules() if (marks := list(_marks(module, model)))
    )


def _marks(module: nn.Module, root: nn.Module) -> Iterable[str]:
    kind = type(module).__name__
    if isinstance(module, DistributedDataParallel):
        yield "DistributedDataParallel"
    if isinstance(module, FSDPModule):
        resharded = any(again for module_, _, again in shard_groups(root) if module_ is module)
        yield "FSDP2 unit" + (", resharded after forward" if resharded else ", kept whole after forward")
    elif kind == "FullyShardedDataParallel":
        yield "FSDP1 unit"
    if kind == "OptimizedModule" or module._compiled_call_impl is not None:
        yield "compiled"
    if kind == "CheckpointWrapper":
        yield "recomputed in the backward"
    if "Float8" in kind or type(module).__module__.startswith("transformer_engine"):
        yield f"fp8 ({kind})"


def _parameters(model: nn.Module) -> list[Row]:
    def text(parameter: nn.Parameter) -> str:
        shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
        frozen = "" if parameter.requires_grad else ", frozen"
        if not isinstance(parameter, DTensor):
            return f"{dtype} {shape}{frozen}"
        names = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
        places = ", ".join(f"{name}: {placement}" for name, placement in zip(names, parameter.placements, strict=True))
        return f"{dtype} {shape}, here {tuple(parameter._local_tensor.shape)} by {places}{frozen}"

    return _grouped((name, text(parameter)) for name, parameter in model.named_parameters())


def _dtypes(strategy: Strategy, model: nn.Module) -> list[Row]:
    masters = strategy.precision.masters(model)
    compute, reduction = strategy.dtypes(model)
    return [
        Row("parameters", _counted(model.parameters())),
        *([Row("masters of parameters", _counted(masters))] if masters else []),
        Row("computes in", compute),
        Row("gradients are averaged in", reduction),
    ]


def _counted(tensors: Iterable[torch.Tensor]) -> str:
    """How many numbers there are of each dtype."""
    kept = Counter[str]()
    for tensor in tensors:
        kept[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return ", ".join(f"{count:,} in {name}" for name, count in kept.items())


def _traffic(strategy: Strategy, model: nn.Module, steps: int, sync_each_batch: bool) -> list[Row]:
    times = steps if sync_each_batch else 1
    found: list[Traffic] | None = strategy.traffic(model, steps // times)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [Row("none", "one process")]
    if found is None:
        return [Row("not counted", f"{strategy.name} decides what it sends")]
    if not found:
        return [Row("none", "this layout sends nothing for it")]
    return [
        Row(one.what, f"{'about ' * one.about}{times * one.messages} messages, {size_of(times * one.sent)}{one.unit}")
        for one in found
    ]
