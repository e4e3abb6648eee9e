# SPDX-License-Identifier: Apache-2.0
"""The observer that records the first optimizer steps of a run for `accelerate certify`, and then ends the run.

Every rank takes part. Rank 0 writes one file for each step: names and full tensors, in the order of the step.
"""

from __future__ import annotations

import contextlib
import json
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.modules import class_name
from ..core.observers import RunObserver
from ..core.trees import leaves
from ..gradient_state import GradientState
from ..optimizer import AcceleratedOptimizer
from ..parallel.gradients import local
from ..parallel.prepared import PreparedModel
from ..parallel.unwrap import canonical_name, extract_model_from_parallel
from ..run.checkpoints import RunCheckpoints
from ..torch_internals.compiled import uncompiled
from .reference import perturb, remove_dropout
from .settings import Settings

# Elements that are kept of a tensor of a large model, at positions that depend on its name alone.
ELEMENTS = 4096
# Bytes of a model from which only so many elements are kept.
LARGE = 1 << 30
# What the file of a step has of it, in this order.
KINDS = ("batch", "output", "loss", "gradient", "options", "parameter", "buffer", "state")

Tensors = dict[str, torch.Tensor]


class _Watch:
    """Hooks of the first forwards of a module.

    Args:
        name: of the module.
        outputs: gets the name and the first tensor that the module returns.
        draws: gets the name of a module that draws random numbers itself.
    """

    def __init__(
        self, name: str, outputs: list[tuple[str, torch.Tensor]], draws: list[str]
    ) -> None:
        self._name = name
        self._outputs = outputs
        self._draws = draws
        self._state = torch.empty(0)
        self._drawn = 0

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Note the state of the generator."""
        self._state = torch.get_rng_state()
        self._drawn = len(self._draws)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note what the module has returned."""
        if not torch.is_grad_enabled():
            return
        draws_inside = len(self._draws) > self._drawn
        if not draws_inside and not torch.equal(self._state, torch.get_rng_state()):
            self._draws.append(self._name)
        for tensor in leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self._outputs.append((self._name, _plain(tensor.detach()).clone()))
                return


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
        # Of the present step.
        self._tensors: Tensors = {}
        self._losses: list[tuple[torch.Tensor, Any, float]] = []
        self._batches: list[list[torch.Tensor]] = []
        self._draws: list[str] = []
        self._handles: list[Any] = []
        self._outputs: list[tuple[str, torch.Tensor]] = []
        self._counts: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._steps = 0
        self._info: dict[str, Any] = {"steps": 0, "loaders": 0, "draws": [], "names": {}}

    # -- the events

    def after_prepare(self, prepared: Any) -> None:
        """Change a model as the settings say, and watch its first forward."""
        if not isinstance(prepared, PreparedModel):
            return
        if not self._settings.dropout:
            remove_dropout(prepared.module)
        if self._settings.perturb:
            perturb(prepared.module)
        if uncompiled(prepared.module) is not prepared.module:
            # A hook would have it compiled again.
            return
        model = extract_model_from_parallel(prepared.module)
        for name, module in model.named_modules():
            watch = _Watch(
                self._prefix(prepared) + canonical_name(name), self._outputs, self._draws
            )
            self._handles.append(module.register_forward_pre_hook(watch.before_forward))
            self._handles.append(module.register_forward_hook(watch.after_forward))

    def batch(self, loader: Any, data: Any) -> None:
        """Note what the loop reads."""
        self._info["loaders"] = max(self._info["loaders"], 1)
        tensors = [tensor.detach() for tensor in leaves(data) if isinstance(tensor, torch.Tensor)]
        self._batches.append([tensor for tensor in tensors if tensor.ndim])

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Note the loss."""
        run = self._run()
        if run is not None and isinstance(loss, torch.Tensor):
            self._losses.append((loss.detach(), num_items, run.accumulation.weight))

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> None:
        """Record what the step uses."""
        run = self._run()
        if run is None or not GradientState().sync_gradients:
            return
        self._record_inputs(run)
        if closure is None:
            for prepared in run.objects.models:
                if prepared.trains_with(optimizer.optimizer):
                    gradients = _gradients(prepared, run)
                    self._add("gradient", self._prefix(prepared), gradients)
        index = run.objects.optimizers.index(optimizer)
        for i, group in enumerate(optimizer.param_groups):
            values = {
                name: value for name, value in group.items() if isinstance(value, int | float)
            }
            options = {
                f"group {i} {name}": torch.tensor(float(value), dtype=torch.float64)
                for name, value in values.items()
            }
            self._add("options", f"optimizer {index} " if index else "", options)

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Record what the step has changed, and end the run after the last one."""
        run = self._run()
        if run is None or not GradientState().sync_gradients:
            return
        self._record_models(run)
        self._record_state(run, optimizer)
        self._write()
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        counts = [self._counts.get(other, 0) for other in run.objects.optimizers]
        if min(counts) >= self._settings.steps or max(counts) >= 4 * self._settings.steps:
            self._end(run)

    # -- parts of a step

    def _record_inputs(self, run: RunCheckpoints) -> None:
        shard = run.strategy.data_shard
        for i, parts in enumerate(_batches(_from_shards(shard, self._batches))):
            for j, tensor in enumerate(parts):
                self._add("batch", "", {f"{i}.{j}": tensor})
        losses = [(float(loss), _count(items), weight) for loss, items, weight in self._losses]
        for i, shares in enumerate(zip(*_from_shards(shard, losses), strict=False)):
            joined_loss = torch.tensor(_weighted_mean(shares), dtype=self._losses[i][0].dtype)
            self._add("loss", "", {str(i): joined_loss})
        if self._steps == 0:
            joined = _from_shards(shard, self._outputs)
            for (name, first), *others in zip(*joined, strict=False):
                parts = [first, *(tensor for _, tensor in others)]
                self._add("output", "", {name: _joined(parts)})
            self._info["draws"] = sorted(set(self._draws))
            for handle in self._handles:
                handle.remove()
        self._outputs.clear()
        self._batches, self._losses = [], []

    def _record_models(self, run: RunCheckpoints) -> None:
        for prepared in run.objects.models:
            with _shards(prepared, run):
                state = prepared.state_dict()
            if _world() > 1 and not prepared.is_partial:
                self._compare_replicas(prepared)
            names = prepared.trained_names()
            parameters = {name: value for name, value in state.items() if name in names}
            others = {name: value for name, value in state.items() if name not in names}
            self._add("parameter", self._prefix(prepared), parameters)
            self._add("buffer", self._prefix(prepared), others)

    def _compare_replicas(self, prepared: PreparedModel) -> None:
        """Note the first tensor of a model whose values differ between the ranks that have all of it."""
        sums = [
            (canonical_name(name), float(tensor.detach().double().sum()))
            for name, tensor in prepared.inner.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        ]
        for rank, others in enumerate(_from_ranks(sums)):
            for (name, value), (_, other) in zip(sums, others, strict=False):
                if value != other and "replicas" not in self._info:
                    self._info["replicas"] = {
                        "step": self._steps + 1,
                        "name": self._prefix(prepared) + name,
                        "rank": rank,
                    }

    def _record_state(self, run: RunCheckpoints, optimizer: AcceleratedOptimizer) -> None:
        index = run.objects.optimizers.index(optimizer)
        state = run.objects.prepared_optimizers()[index].state_dict()
        self._info["names"].setdefault(str(index), self._parameter_names(run, optimizer))
        for name, values in state.get("state", {}).items():
            tensors = {
                f"{name} {kind}": value
                for kind, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            self._add("state", f"optimizer {index} " if index else "", tensors)

    def _parameter_names(
        self, run: RunCheckpoints, optimizer: AcceleratedOptimizer
    ) -> dict[Any, str]:
        """The names of an optimizer's parameters by their index, where this process has them all."""
        names: dict[int, str] = {}
        for prepared in run.objects.models:
            for name, parameter in prepared.inner.named_parameters():
                names[id(parameter)] = self._prefix(prepared) + canonical_name(name)
        by_index: dict[Any, str] = {}
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        for i, parameter in enumerate(parameters):
            if id(parameter) in names:
                by_index[i] = names[id(parameter)]
        return by_index

    def _add(self, kind: str, prefix: str, tensors: dict[str, Any]) -> None:
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                self._tensors[f"{kind}/{prefix}{name}"] = _plain(value.detach()).to(
                    "cpu", copy=True
                )

    def _prefix(self, prepared: PreparedModel) -> str:
        run = self._run()
        models = [] if run is None else run.objects.models
        if prepared not in models:
            index = len(models)
        else:
            index = models.index(prepared)
        if index == 0:
            return ""
        return f"model {index} ({class_name(prepared.inner)}) "

    # -- the files

    def _write(self) -> None:
        self._steps += 1
        if _rank() == 0:
            torch.save(_thinned(self._tensors), self._folder / f"step_{self._steps}.pt")
        self._tensors = {}

    def _end(self, run: RunCheckpoints) -> None:
        self._info["steps"] = self._steps
        self._info["shards"] = run.strategy.data_shard[1]
        self._info["layout"] = run.strategy.name
        self._info["processes"] = _world()
        if _rank() == 0:
            (self._folder / "run.json").write_text(json.dumps(self._info))
        run.loop.remove(self)
        run.end_training()
        raise SystemExit(0)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one. All ranks call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def _from_shards(shard: tuple[int, int], value: Any) -> list[Any]:
    """The value of one rank of each data shard, in their order. All ranks call it, and rank 0 gets all."""
    by_shard: dict[int, Any] = {}
    for index, part in _from_ranks((shard[0], value)):
        by_shard.setdefault(index, part)
    return [by_shard[index] for index in sorted(by_shard)]


def _from_ranks(value: Any) -> list[Any]:
    """The value of each rank, on rank 0; nothing on the others."""
    if _world() == 1:
        return [value]
    values: list[Any] | None = None
    if _rank() == 0:
        values = [None] * _world()
    dist.gather_object(value, values)
    return values or []


def _batches(shards: list[list[list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """Each batch of a step, joined over the shards that have it."""
    batches = []
    for i in range(max(map(len, shards), default=0)):
        parts = [shard[i] for shard in shards if i < len(shard)]
        batches.append([_joined(list(tensors)) for tensors in zip(*parts, strict=False)])
    return batches


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 or parts[0].ndim == 0:
        return parts[0]
    try:
        return torch.cat(parts)
    except RuntimeError:
        return parts[0]


def _weighted_mean(shares: Iterable[tuple[float, float | None, float]]) -> float:
    """The mean over the shards of (loss, items, weight)."""
    total = weights = 0.0
    for loss, items, weight in shares:
        if items is not None:
            weight = items
        if weight:
            # The loss of a placeholder may not be finite.
            total += loss * weight
            weights += weight
    return total / (weights or 1.0)


def _count(items: Any) -> float | None:
    if items is None:
        return None
    return float(items)


@contextlib.contextmanager
def _shards(prepared: PreparedModel, run: RunCheckpoints) -> Iterator[None]:
    prepared.reshard()
    with run.precision.swap_in_master_weights([prepared.module], [], [prepared.swappable()]):
        yield


@torch.no_grad()
def _gradients(prepared: PreparedModel, run: RunCheckpoints) -> dict[str, Any]:
    """The gradients under the names of the plain model: the state of the model with these as its parameters."""
    with _shards(prepared, run):
        parameters = [p for p in prepared.module.parameters() if p.requires_grad and not p.is_meta]
        weights = [local(parameter.detach()).clone() for parameter in parameters]
        for parameter in parameters:
            target = local(parameter.detach())
            if parameter.grad is None:
                target.zero_()
            else:
                target.copy_(local(parameter.grad))
        try:
            state = {
                name: value.detach().clone()
                for name, value in prepared.state_dict().items()
                if isinstance(value, torch.Tensor)
            }
        finally:
            for parameter, weight in zip(parameters, weights, strict=True):
                local(parameter.detach()).copy_(weight)
    names = prepared.trained_names()
    return {name: value for name, value in state.items() if name in names}


def _thinned(tensors: Tensors) -> Tensors:
    """The tensors; of a large model, some elements of each and its norm."""
    size = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("parameter/"))
    if size <= LARGE:
        return tensors
    thinned: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.numel() > ELEMENTS:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            positions = torch.randint(tensor.numel(), (ELEMENTS,), generator=generator)
            thinned[f"{name} norm"] = torch.linalg.vector_norm(tensor.double())
            tensor = tensor.flatten()[positions]
        thinned[name] = tensor
    return thinned
