# SPDX-License-Identifier: Apache-2.0
"""The report of `explain()`: requested and actual settings, layout, parameters, modules, messages, figures."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel

from ...core.modules import class_name
from ...core.objects import size_of
from ...core.tensor_files import dtype_name
from ...state import PartialState
from ...torch_internals.checkpoint_wrapper import is_recomputed
from ...torch_internals.compiled import is_compiled_in_place, is_compiled_module
from ...torch_internals.fsdp2 import shard_groups
from ..base import Strategy
from ..prepared import PreparedModel
from . import figures
from .figures import CommunicationVolume
from .models import communication_volume, dtypes, master_weights, memory_usage

if TYPE_CHECKING:
    from rich.text import Text

_OFTEN_NONE = (figures.BUFFERS, figures.MASTER_WEIGHTS)
_ENDED = "the process group has ended"


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Fields:
        name: what the line is about.
        got: the actual value.
        requested: where the value was requested.
    """

    name: str
    got: str
    requested: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """The sections of an explanation; `str()` of it is what `explain` prints."""

    sections: dict[str, list[Row]] = field(default_factory=dict)

    def __repr__(self) -> str:
        # `explain` has printed the report: an interactive session that shows its result does not repeat it.
        return f"<Report of {', '.join(self.sections)}>"

    def __rich__(self) -> Text:
        """The same text for a terminal, with styles."""
        from rich.text import Text

        text = Text()
        for line in str(self).splitlines():
            head, note, requested = line.partition("   (requested: ")
            if line.startswith(" "):
                text.append(head)
            else:
                text.append(head, style="bold")
            text.append(note + requested, style="dim")
            text.append("\n")
        text.rstrip()
        return text

    def to_html(self) -> str:
        """The report as a table, for notebooks."""
        rows = []
        for title, lines in self.sections.items():
            rows.append(
                f'<tr><th colspan="3" style="text-align:left">{html.escape(title)}</th></tr>'
            )
            for row in lines:
                requested = row.requested
                if requested:
                    requested = f"requested: {requested}"
                columns = [html.escape(text) for text in (row.name, row.got, requested)]
                rows.append(f"<tr><td>{'</td><td>'.join(columns)}</td></tr>")
        return f"<table>{''.join(rows)}</table>"

    def __str__(self) -> str:
        lines: list[str] = []
        for title, rows in self.sections.items():
            width = max((len(row.name) for row in rows), default=0)
            lines.append(title)
            for row in rows:
                line = f"  {row.name:<{width}}  {row.got}"
                if row.requested:
                    line += f"   (requested: {row.requested})"
                lines.append(line)
        return "\n".join(lines)

    def find(self, section: str, name: str) -> str:
        """The actual value of one line. Raises KeyError if there is no such line."""
        lines = {row.name: row.got for row in reversed(self.sections.get(section, []))}
        if name in lines:
            return lines[name]
        names = list(reversed(lines)) or list(self.sections)
        raise KeyError(
            f"the report does not have a line {name!r} in {section!r}; the lines are: "
            f"{', '.join(names)}"
        )


def explain(
    requested: Iterable[Row],
    strategy: Strategy,
    models: Sequence[PreparedModel],
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    usage: Sequence[dict[str, int]] | None = None,
    sync_each_batch: bool = False,
    has_stepped: bool = False,
) -> Report:
    """The report of a run.

    Args:
        requested: the lines of the user's settings.
        strategy: lays out the models.
        models: the prepared models.
        optimizers: the plain optimizers.
        steps: the backwards of an accumulation window.
        usage: what `memory_usage` gave on each rank; None: on this one only.
        sync_each_batch: gradients are averaged in each backward.
        has_stepped: the optimizers have made a step, so that the size of their state is known.
    """
    sections = {"run": [*requested, *_layout(strategy)]}
    for number, prepared in enumerate(models):
        model = prepared.module
        inner = prepared.inner
        # FSDP1 stays around the model, FSDP2 changes its class.
        if type(inner).__name__ == "FullyShardedDataParallel":
            kind = class_name(inner.module)
        else:
            kind = class_name(inner)
        title = f"model: {kind}"
        if len(models) > 1:
            title = f"model {number}: {kind}"
        sections[title] = [*_modules(model), *_parameters(inner), *_dtypes(prepared)]
        sent = _volume(strategy, prepared, steps, sync_each_batch)
        sections[f"messages of {title}, for this rank in one optimizer step"] = sent
    if usage is None:
        windows = steps > 1 and not sync_each_batch
        used = {"this rank": memory_usage(models, optimizers, windows)}
    else:
        used = {f"rank {rank}": of_rank for rank, of_rank in enumerate(usage)}
    sections["memory"] = [Row(name, _memory(kinds, has_stepped)) for name, kinds in used.items()]
    return Report(sections)


def _memory(used: dict[str, int], has_stepped: bool) -> str:
    sizes = dict(used)
    buckets = sizes.pop(figures.BUCKETS)
    shown = [name for name, size in sizes.items() if size or name not in _OFTEN_NONE]
    text = ", ".join(f"{name} {size_of(sizes[name])}" for name in shown)
    text += f": {size_of(sum(sizes.values()))}"
    if buckets:
        text += f", and buckets of messages {size_of(buckets)}"
    if not sizes[figures.STATE] and not has_stepped:
        text += " (before the first step)"
    return text


def _layout(strategy: Strategy) -> list[Row]:
    data = _ENDED
    if not _has_ended():
        data = "shard {} of {}".format(*strategy.data_shard)
    rows = [Row("strategy", strategy.name), Row("data", data)]
    for transform in strategy.transforms:
        describe = getattr(transform, "describe", None)
        if callable(describe):
            in_snake_case = re.sub(r"(?<!^)(?=[A-Z])", "_", type(transform).__name__).lower()
            rows.append(Row(in_snake_case, describe()))
    mesh = getattr(strategy, "mesh", None)
    if mesh is not None:
        axes = zip(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate() or (), strict=False)
        sizes = [f"{name}={size} (here {coordinate})" for name, size, coordinate in axes]
        rows.append(Row("mesh", " x ".join(sizes)))
    return rows


def _has_ended() -> bool:
    """Whether the processes of the run do not communicate any more, as after `end_training`."""
    return PartialState().use_distributed and not dist.is_initialized()


def _grouped(named: Iterable[tuple[str, str]]) -> list[Row]:
    counts = Counter[tuple[str, str]]()
    for name, text in named:
        # With its numbers replaced by *, equal layers become one line.
        counts[re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name), text] += 1
    rows = []
    for (name, text), count in counts.items():
        if count > 1:
            text += f"   x {count}"
        rows.append(Row(name or "(model)", text))
    return rows


def _modules(model: nn.Module) -> list[Row]:
    """How modules were changed: wrapped, sharded, compiled, converted."""
    marks = ((name, ", ".join(_marks(module, model))) for name, module in model.named_modules())
    return _grouped((name, text) for name, text in marks if text)


def _marks(module: nn.Module, root: nn.Module) -> Iterable[str]:
    kind = type(module).__name__
    if isinstance(module, DistributedDataParallel):
        yield "DistributedDataParallel"
    if isinstance(module, FSDPModule):
        yield f"FSDP2 unit, {_after_forward(module, root)}"
    elif kind == "FullyShardedDataParallel":
        yield "FSDP1 unit"
    elif kind == "DeepSpeedEngine":
        yield f"DeepSpeed engine, ZeRO stage {int(module.zero_optimization_stage())}"  # type: ignore[operator]
    if is_compiled_module(module) or is_compiled_in_place(module):
        yield "compiled"
    if is_recomputed(module):
        yield "recomputed in the backward pass"
    if "Float8" in kind or type(module).__module__.startswith("transformer_engine"):
        yield f"fp8 ({kind})"


def _after_forward(unit: FSDPModule, root: nn.Module) -> str:
    for inner, group, is_resharded in shard_groups(root):
        after = group.post_forward_mesh_info
        if inner is unit and is_resharded and after is not None:
            if after.shard_mesh_size == group.mesh_info.shard_mesh_size:  # type: ignore[attr-defined]
                return "resharded after forward"
            return f"resharded after forward to groups of {after.shard_mesh_size}"
    return "kept unsharded after forward"


def _parameters(model: nn.Module) -> list[Row]:
    def text(parameter: nn.Parameter) -> str:
        shape = tuple(parameter.shape)
        dtype = dtype_name(parameter.dtype)
        frozen = "" if parameter.requires_grad else ", frozen"
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None:
            shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
            kept = "unsharded" if parameter.numel() else "sharded"
            return f"{dtype} {shape}, {kept}, here {shard.numel()} elements by ZeRO 3{frozen}"
        if not isinstance(parameter, DTensor):
            return f"{dtype} {shape}{frozen}"
        names = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
        places = ", ".join(
            f"{name}: {_words(at)}" for name, at in zip(names, parameter.placements, strict=True)
        )
        return f"{dtype} {shape}, here {tuple(parameter.to_local().shape)} by {places}{frozen}"

    return _grouped((name, text(parameter)) for name, parameter in model.named_parameters())


def _words(placement: Placement) -> str:
    """A placement as `Shard(0)`, `Replicate` or `Partial(sum)`. Its own text is an abbreviation."""
    of = getattr(placement, "dim", getattr(placement, "reduce_op", None))
    return type(placement).__name__.lstrip("_") + ("" if of is None else f"({of})")


def _dtypes(prepared: PreparedModel) -> list[Row]:
    compute, reduction = dtypes(prepared)
    rows = [Row("parameters", _counted(prepared.module.parameters()))]
    master = _counted(master_weights(prepared))
    if master:
        rows.append(Row("master weights", master))
    return [*rows, Row("computes in", compute), Row("gradients are averaged in", reduction)]


def _counted(tensors: Iterable[torch.Tensor]) -> str:
    """The number of elements of each dtype."""
    counts = Counter[str]()
    for tensor in tensors:
        counts[dtype_name(tensor.dtype)] += getattr(tensor, "ds_numel", tensor.numel())
    return ", ".join(f"{count:,} in {name}" for name, count in counts.items())


def _volume(
    strategy: Strategy, prepared: PreparedModel, steps: int, sync_each_batch: bool
) -> list[Row]:
    if _has_ended():
        return [Row("none", _ENDED)]
    times = 1
    if sync_each_batch:
        times = steps
    volumes = communication_volume(prepared, steps // times)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [Row("none", "one process")]
    if volumes is None:
        return [Row("not counted", f"{strategy.name} decides what it sends")]
    if not volumes:
        return [Row("none", "this layout does not send anything for it")]

    def amount(volume: CommunicationVolume) -> str:
        size = f"{size_of(times * volume.sent)}{volume.unit}"
        if volume.messages is None:
            return f"{'at most ' * volume.about}{size}"
        return f"{'about ' * volume.about}{times * volume.messages} messages, {size}"

    return [Row(volume.what, amount(volume)) for volume in volumes]
