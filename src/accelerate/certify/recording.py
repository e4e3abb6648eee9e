# SPDX-License-Identifier: Apache-2.0
"""The observer that records the first optimizer steps of a run for `accelerate certify`, and then ends the run.

Every rank takes part. Rank 0 writes one file for each step: names and full tensors, in the order of the step.
"""

from __future__ import annotations

import atexit
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.modules import class_name
from ..core.observers import RunObserver
from ..core.trees import children, leaves
from ..optimizer import AcceleratedOptimizer, is_optimizer, parameters_of
from ..parallel.gradients import gradients_of
from ..parallel.prepared import PreparedModel, PreparedOptimizer
from ..parallel.sharded import ShardedModel
from ..parallel.unwrap import canonical_name, named_parameters
from ..run.checkpoints import RunCheckpoints
from ..runtime import mesh
from .forward import FirstForward
from .joining import Tensors, different_replica, from_ranks, join, on_all_ranks, plain, rank
from .reference import perturb_gradients, perturb_outputs, remove_dropout
from .settings import Settings

# Bytes of models from which only some elements of each tensor are kept.
LARGE = 1 << 30
# What the file of a step has of it, in this order.
KINDS = ("batch", "output", "loss", "gradient", "options", "parameter", "buffer", "state")
# How `--layouts` names dimensions of a mesh.
_DIMENSIONS = {"dp_replicate": "ddp", "dp_shard": "fsdp"}


class RecordedRun(RunObserver):
    """Records each optimizer step of a run.

    Args:
        settings: what to record.
        run: with the prepared objects and the layout. The reference is weak.
    """

    def __init__(self, settings: Settings, run: RunCheckpoints) -> None:
        self._settings = settings
        self._run = weakref.ref(run)
        self._folder = Path(settings.folder)
        self._forward = FirstForward()
        # Of the present step.
        self._tensors: Tensors = {}
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._batches: list[list[torch.Tensor]] = []
        self._counts: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._steps = 0
        # Of the first rank in each shard of the data.
        self._readers: list[int] = []
        self._info: dict[str, Any] = {}

    # -- the events

    def after_prepare(self, prepared: Any) -> None:
        """Remove the dropout of a model, and watch its first forward."""
        run = self._run()
        if run is None or not isinstance(prepared, PreparedModel):
            return
        if not self._settings.dropout:
            remove_dropout(prepared.module)
        if self._settings.perturb:
            perturb_outputs(prepared.inner, _computed_in(run))
        if self._steps == 0:
            prefix = _prefix(len(run.objects.models), prepared)
            self._forward.watch(prepared, prefix, run.strategy)

    def batch(self, loader: Any, data: Any) -> None:
        """Note what the loop reads. It may change that in place."""
        tensors: list[torch.Tensor] = []
        if getattr(loader, "batch_weight", 1.0):
            tensors += [tensor for tensor in leaves(data) if tensor.ndim]
        # Those of a placeholder, of weight 0, are no samples.
        self._batches.append([tensor.detach().to("cpu", copy=True) for tensor in tensors])

    def before_backward(self, loss: Any) -> None:
        """What is computed from here on is computed again, or is that of another batch."""
        self._forward.stop()

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Note the loss and its weight in the mean over ranks."""
        run = self._run()
        if run is None or not isinstance(loss, torch.Tensor):
            return
        weight = run.accumulation.weight
        if num_items is not None:
            weight = float(num_items)
        self._losses.append((plain(loss.detach()), weight))

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> None:
        """Record gradients and the options of the optimizer."""
        run = self._run()
        if run is None or optimizer not in run.objects.optimizers:
            return
        if closure is None:
            if self._settings.perturb:
                perturb_gradients(gradients_of(parameters_of(optimizer)), _computed_in(run))
            gradients: Tensors = {}
            for prefix, prepared in _models(run):
                if _is_readable(prepared) and prepared.trains_with(optimizer.optimizer):
                    prepared.reshard()
                    for name, parameter in _parameters(prepared):
                        gradient = parameter.grad
                        if gradient is None:
                            gradient = torch.zeros_like(parameter)
                        if gradient.is_sparse:
                            gradient = gradient.to_dense()
                        if parameter.requires_grad:
                            gradients[prefix + name] = gradient
            self._record(run, "gradient", gradients)
        for i, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            prefix = f"options/{_optimizer_prefix(run, optimizer)}group {i}"
            for name, value in _numbers(prefix, options):
                self._tensors[name] = value.to("cpu", copy=True)

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Record what the step has used and changed, and end the run after the last one."""
        run = self._run()
        if run is None or optimizer not in run.objects.optimizers:
            return
        self._record_inputs(run)
        models = [prepared.module for prepared in run.objects.models]
        contexts = [prepared.swappable() for prepared in run.objects.models]
        for prepared in run.objects.models:
            prepared.reshard()
        with run.precision.swap_in_master_weights(models, [optimizer.optimizer], contexts):
            self._record_models(run)
            self._record_state(run, optimizer)
        self._write()
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        counts = [self._counts.get(other, 0) for other in run.objects.optimizers]
        if min(counts) >= self._settings.steps or max(counts) >= 4 * self._settings.steps:
            self._end(run)

    # -- parts of a step

    def _record_inputs(self, run: RunCheckpoints) -> None:
        if not self._readers:
            shards = on_all_ranks(run.strategy.data_shard[0])
            self._readers = [shards.index(shard) for shard in sorted(set(shards))]
        losses = [(float(loss), weight) for loss, weight in self._losses]
        for i, shares in enumerate(zip(*from_ranks(losses), strict=False)):
            mean = torch.tensor(_weighted_mean(shares), dtype=self._losses[i][0].dtype)
            self._tensors[f"loss/{i}"] = mean
        batches, outputs = [], {}
        if rank() in self._readers:
            batches = self._batches
            outputs = self._forward.outputs
        for i, parts in enumerate(_batches(self._of_readers(batches))):
            for j, tensor in enumerate(parts):
                self._tensors[f"batch/{i}.{j}"] = tensor
        if self._steps == 0:
            self._forward.stop()
            readers = self._of_readers(outputs)
            for name in readers[0] if readers else ():
                parts = [tensors[name] for tensors in readers if name in tensors]
                self._tensors[f"output/{name}"] = _joined(parts)
            self._forward.outputs.clear()
        self._batches, self._losses = [], []

    def _of_readers(self, value: Any) -> list[Any]:
        values = from_ranks(value)
        if values:
            return [values[reader] for reader in self._readers]
        return []

    def _record_models(self, run: RunCheckpoints) -> None:
        parameters: Tensors = {}
        buffers: Tensors = {}
        for prefix, prepared in _models(run):
            if _is_readable(prepared):
                state = prepared.inner.state_dict()
            else:
                state = prepared.checkpoint_state_dict()
            names = {name for name, _ in named_parameters(prepared.inner, remove_duplicate=False)}
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or value.is_meta:
                    continue
                if canonical_name(name) in names:
                    parameters[prefix + canonical_name(name)] = value
                else:
                    buffers[prefix + canonical_name(name)] = value
        self._record(run, "parameter", parameters)
        self._record(run, "buffer", buffers)

    def _record_state(self, run: RunCheckpoints, optimizer: AcceleratedOptimizer) -> None:
        prefix = _optimizer_prefix(run, optimizer)
        prepared = run.objects.find_trained(optimizer)
        if prepared is None or _is_readable(prepared):
            names = {}
            for position, parameter in enumerate(parameters_of(optimizer)):
                names[id(parameter)] = f"parameter {position}"
            for model_prefix, other in _models(run):
                for name, parameter in _parameters(other):
                    names[id(parameter)] = model_prefix + name
            self._record(run, "state", dict(_states(optimizer.optimizer, names, prefix)))
            return
        trained = PreparedOptimizer(optimizer, prepared)
        by_position = dict(enumerate(itertools.chain.from_iterable(trained.group_shapes() or ())))
        tensors: Tensors = {}
        for position, entry in trained.state_dict().get("state", {}).items():
            name = by_position.get(position, f"parameter {position}")
            tensors.update(_numbers(prefix + name, entry))
        self._record(run, "state", tensors)

    def _record(self, run: RunCheckpoints, kind: str, tensors: Tensors) -> None:
        """Join tensors, and note the first one of which ranks have different copies."""
        if not self._info:
            size = sum(map(_size, run.objects.models))
            self._info = {"is_large": size > LARGE}
        for name, tensor in join(tensors, self._info["is_large"]).items():
            self._tensors[f"{kind}/{name}"] = tensor
        different = None
        if kind != "state":
            different = different_replica(tensors)
        if different is not None:
            name, first, second = different
            places = self._coordinates(run, first), self._coordinates(run, second)
            dimensions = [key for key, place in places[0].items() if places[1][key] != place]
            noted = {
                "step": self._steps + 1,
                "kind": kind,
                "name": name,
                "rank": second,
                "dimension": "x".join(dimensions),
            }
            if kind == "buffer":
                # A layout may leave them to each rank.
                self._info.setdefault("buffers", noted)
            else:
                self._info.setdefault("replicas", noted)

    def _coordinates(self, run: RunCheckpoints, index: int) -> dict[str, int]:
        layout = getattr(run.strategy, "layout", None)
        if layout is None:
            return {"ddp": index}
        places = mesh.coordinates(layout, index)
        return {_DIMENSIONS.get(name, name): place for name, place in places.items()}

    # -- the files

    def _write(self) -> None:
        self._steps += 1
        if rank() == 0:
            # Another accelerator of the script may have written some.
            number = 1 + len(list(self._folder.glob("step_*.pt")))
            torch.save(self._tensors, self._folder / f"step_{number}.pt")
        self._tensors = {}

    def _end(self, run: RunCheckpoints) -> None:
        info = {
            **self._info,
            "steps": self._steps,
            "shards": run.strategy.data_shard[1],
            "layout": run.strategy.name,
            "processes": dist.get_world_size() if dist.is_initialized() else 1,
            "draws": sorted(self._forward.draws),
        }
        if rank() == 0:
            (self._folder / "run.json").write_text(json.dumps(info))
        run.loop.remove(self)
        if self._settings.exits:
            # Blocks that the exception leaves may still save, log and communicate.
            atexit.register(_end_training, weakref.ref(run))
            raise SystemExit(0)


def _end_training(reference: weakref.ref[RunCheckpoints]) -> None:
    run = reference()
    if run is not None:
        run.end_training()


def _prefix(index: int, prepared: PreparedModel) -> str:
    if index == 0:
        return ""
    return f"model {index} ({class_name(prepared.inner)}) "


def _optimizer_prefix(run: RunCheckpoints, optimizer: AcceleratedOptimizer) -> str:
    index = run.objects.optimizers.index(optimizer)
    return f"optimizer {index} " if index else ""


def _models(run: RunCheckpoints) -> Iterator[tuple[str, PreparedModel]]:
    """(prefix of names, model)."""
    for index, prepared in enumerate(run.objects.models):
        yield _prefix(index, prepared), prepared


def _computed_in(run: RunCheckpoints) -> torch.dtype:
    """The dtype that rounds more than those of the tensors, if there is one."""
    dtype: torch.dtype = getattr(run.precision, "dtype", torch.float64)
    return dtype


def _is_readable(prepared: PreparedModel) -> bool:
    """Whether parameters, their gradients and their state are tensors of the plain model's shapes."""
    return isinstance(prepared, ShardedModel) or not prepared.is_partial


def _parameters(prepared: PreparedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(plain name, parameter) of those that this process has, under each of their names."""
    for name, parameter in named_parameters(prepared.inner, remove_duplicate=False):
        if not parameter.is_meta:
            yield name, parameter


def _size(prepared: PreparedModel) -> int:
    values = prepared.state_template.state_dict().values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _states(
    optimizer: Any, names: Mapping[int, str], prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of an optimizer's state, and of that of optimizers inside of it."""
    for key, entry in optimizer.state.items():
        name = names.get(id(key))
        if name is None:
            name = str(key)
        yield from _numbers(prefix + name, entry)
    for attribute, inner in vars(optimizer).items():
        if is_optimizer(inner) and inner.state is not optimizer.state:
            yield from _states(inner, names, f"{prefix}{attribute} ")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of tensors and numbers in nested data, each number as a tensor."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, torch.tensor(float(value), dtype=torch.float64)
    for key, inner in (children(value) or {}).items():
        separator = "." if isinstance(key, int) else " "
        yield from _numbers(f"{name}{separator}{key}", inner)


def _batches(shards: list[list[list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """Each batch of a step, joined over the shards that have it."""
    batches = []
    for i in range(max(map(len, shards), default=0)):
        parts = [shard[i] for shard in shards if i < len(shard) and shard[i]]
        batches.append([_joined(tensors) for tensors in zip(*parts, strict=False)])
    return batches


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.cat(list(parts))
    except RuntimeError:
        return parts[0]


def _weighted_mean(shares: Iterable[tuple[float, float]]) -> float:
    """The mean over ranks of (loss, weight)."""
    total = weights = 0.0
    for loss, weight in shares:
        if weight:
            # The loss of a placeholder may not be finite.
            total += loss * weight
            weights += weight
    return total / (weights or 1.0)
