# SPDX-License-Identifier: Apache-2.0
"""The observer that records the first optimizer steps of a run for `accelerate certify`, and then ends the run.

Every rank takes part. Rank 0 writes one file for each step: names and full tensors, in the order of the step.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..core.observers import RunObserver
from ..core.trees import leaves
from ..optimizer import AcceleratedOptimizer, parameters_of
from ..parallel.gradients import gradients_of
from ..parallel.prepared import PreparedModel
from ..run.checkpoints import RunCheckpoints
from ..runtime import mesh
from . import contents
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
            prefix = contents.model_prefix(len(run.objects.models), prepared)
            self._forward.watch(prepared, prefix, run.strategy)

    def batch(self, loader: Any, data: Any) -> None:
        """Note what the loop reads. It may change that in place."""
        tensors: list[torch.Tensor] = []
        if getattr(loader, "batch_weight", 1.0):
            tensors += [tensor for tensor in leaves(data) if tensor.ndim]
        # Those of a placeholder, of weight 0, are no samples.
        self._batches.append([tensor.detach().to("cpu", copy=True) for tensor in tensors])
        self._forward.begin_loop()

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
            self._record(run, "gradient", contents.gradients(run.objects, optimizer))
        for name, value in contents.options(run.objects, optimizer).items():
            self._tensors[f"options/{name}"] = value.to("cpu", copy=True)

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
            parameters, buffers = contents.parameters_and_buffers(run.objects)
            self._record(run, "parameter", parameters)
            self._record(run, "buffer", buffers)
            self._record(run, "state", contents.optimizer_state(run.objects, optimizer))
        self._write()
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        counts = [self._counts.get(other, 0) for other in run.objects.optimizers]
        if min(counts) >= self._settings.steps or max(counts) >= 4 * self._settings.steps:
            self._end(run)

    # -- parts of a step

    def _record_inputs(self, run: RunCheckpoints) -> None:
        """Record batches, losses, and in the first step what modules have returned."""
        self._forward.stop()
        if not self._readers:
            shards = on_all_ranks(run.strategy.data_shard[0])
            self._readers = [shards.index(shard) for shard in sorted(set(shards))]
        losses = [(float(loss), weight) for loss, weight in self._losses]
        for i, shares in enumerate(zip(*from_ranks(losses), strict=False)):
            mean = torch.tensor(_weighted_mean(shares), dtype=self._losses[i][0].dtype)
            self._tensors[f"loss/{i}"] = mean
        read: tuple[list[list[torch.Tensor]], Tensors] = [], {}
        if rank() in self._readers:
            read = self._batches, self._forward.outputs
        of_ranks = from_ranks(read)
        if of_ranks:
            self._join_samples([of_ranks[reader] for reader in self._readers])
        self._forward.outputs.clear()
        self._batches, self._losses = [], []

    def _join_samples(self, shards: list[tuple[list[list[torch.Tensor]], Tensors]]) -> None:
        counts = [len(batches) for batches, _ in shards]
        if len(set(counts)) > 1:
            self._info.setdefault("uneven", {"step": self._steps + 1, "batches": counts})
        for i in range(max(counts)):
            # A shard may have read fewer batches, or a placeholder.
            parts = [batches[i] for batches, _ in shards if batches[i : i + 1] not in ([], [[]])]
            for j, tensors in enumerate(zip(*parts, strict=False)):
                self._add_joined(f"batch/{i}.{j}", tensors)
        for name in shards[0][1]:
            tensors = tuple(outputs[name] for _, outputs in shards if name in outputs)
            self._add_joined(f"output/{name}", tensors)

    def _add_joined(self, name: str, parts: tuple[torch.Tensor, ...]) -> None:
        # Without those of another length on each rank, which one process pads together.
        with contextlib.suppress(RuntimeError):
            self._tensors[name] = torch.cat(parts)

    def _record(self, run: RunCheckpoints, kind: str, tensors: Tensors) -> None:
        """Join tensors, and note the first one of which ranks have different copies."""
        if not self._info:
            self._info = {"is_large": contents.size_of(run.objects) > LARGE}
        for name, tensor in join(tensors, self._info["is_large"]).items():
            self._tensors[f"{kind}/{name}"] = tensor
        if kind == "state":
            return
        different = different_replica(tensors)
        if different is None:
            return
        name, first, second = different
        expected, places = _coordinates(run, first), _coordinates(run, second)
        dimensions = [key for key, place in places.items() if expected[key] != place]
        noted = "replicas"
        if kind == "buffer":
            # A layout may leave them to each rank.
            noted = "buffers"
        self._info.setdefault(
            noted,
            {
                "step": self._steps + 1,
                "kind": kind,
                "name": name,
                "rank": second,
                "dimension": "x".join(dimensions),
            },
        )

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


def _computed_in(run: RunCheckpoints) -> torch.dtype:
    """The dtype that rounds more than those of the tensors, if there is one."""
    dtype: torch.dtype = getattr(run.precision, "dtype", torch.float64)
    return dtype


def _coordinates(run: RunCheckpoints, index: int) -> dict[str, int]:
    """The place of a rank in each dimension of the layout."""
    layout = getattr(run.strategy, "layout", None)
    if layout is None:
        return {"ddp": index}
    places = mesh.coordinates(layout, index)
    return {_DIMENSIONS.get(name, name): place for name, place in places.items()}


def _weighted_mean(shares: Iterable[tuple[float, float]]) -> float:
    """The mean over ranks of (loss, weight)."""
    total = weights = 0.0
    for loss, weight in shares:
        if weight:
            # The loss of a placeholder may not be finite.
            total += loss * weight
            weights += weight
    return total / (weights or 1.0)
