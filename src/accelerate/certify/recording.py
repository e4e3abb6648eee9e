# SPDX-License-Identifier: Apache-2.0
"""The observer that records the first optimizer steps of a run for `accelerate certify`, and then ends the run.

Every rank takes part. Rank 0 writes one file for each step: names and full tensors, in the order of the step.
"""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.errors import ConfigurationError
from ..core.observers import RunObserver
from ..core.trees import leaves
from ..optimizer import AcceleratedOptimizer, parameters_of
from ..parallel.gradients import gradients_of
from ..parallel.prepared import PreparedModel
from ..run.checkpoints import RunCheckpoints
from ..runtime import mesh
from ..state import PartialState
from . import contents
from .forward import FirstForward
from .joining import Tensors, different_replica, from_ranks, join, on_all_ranks, plain, rank
from .layouts import FIELDS
from .reference import perturb_gradients, perturb_outputs, remove_dropout
from .settings import Settings

# Bytes of models from which only some elements of each tensor are kept.
LARGE = 1 << 30
# What the file of a step has of it, in this order.
KINDS = ("batch", "output", "loss", "gradient", "options", "parameter", "buffer", "state")


class _Inputs(NamedTuple):
    """What a rank has read and computed in a step.

    Fields:
        losses: (loss, weight).
        batches: their number.
        samples: the tensors of batches and outputs by name; None on a rank that reads those of another one.
    """

    losses: list[tuple[float, float]]
    batches: int
    samples: Tensors | None


class RecordedRun(RunObserver):
    """Records each optimizer step of a run.

    Args:
        settings: what to record.
        run: with the prepared objects and the layout.
    """

    def __init__(self, settings: Settings, run: RunCheckpoints) -> None:
        self._settings = settings
        self._run = run
        self._folder = Path(settings.folder)
        self._forward = FirstForward()
        self._steps = 0
        self._steps_of: dict[AcceleratedOptimizer, int] = {}
        self._is_large: bool | None = None
        # Whether no rank before this one reads the same samples.
        self._is_reader: bool | None = None
        # What `run.json` says of differences between ranks.
        self._notes: dict[str, Any] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        # What the file of the present step has.
        self._tensors: Tensors = {}
        self._losses: list[tuple[torch.Tensor, float]] = []
        # What this rank has read: by name, and the number of batches.
        self._samples: Tensors = {}
        self._batches = 0

    # -- the events

    def after_prepare(self, prepared: Any) -> None:
        """Remove the dropout of a model, and watch its first forward."""
        if not isinstance(prepared, PreparedModel):
            return
        if not self._settings.dropout:
            remove_dropout(prepared.module)
        if self._settings.perturb:
            perturb_outputs(prepared.inner, self._computed_in)
        if self._steps == 0:
            prefix = contents.model_prefix(len(self._run.objects.models), prepared)
            self._forward.watch(prepared, prefix, self._run.strategy)

    def batch(self, loader: Any, data: Any) -> None:
        """Note what the loop reads. It may change that in place."""
        # A placeholder, of weight 0, has no samples.
        if getattr(loader, "batch_weight", 1.0):
            tensors = [tensor for tensor in leaves(data) if tensor.ndim]
            for i, tensor in enumerate(tensors):
                name = f"batch/{self._batches}.{i}"
                self._samples[name] = tensor.detach().to("cpu", copy=True)
        self._batches += 1
        self._forward.begin_loop()

    def before_backward(self, loss: Any, num_items: Any) -> None:
        """What is computed from here on is computed again, or is that of another batch."""
        self._forward.stop()

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Note the loss and its weight in the mean over ranks."""
        if not isinstance(loss, torch.Tensor):
            return
        weight = self._run.accumulation.weight
        if num_items is not None:
            weight = float(num_items)
        self._losses.append((plain(loss.detach()), weight))

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> None:
        """Record gradients and the options of the optimizer."""
        objects = self._run.objects
        if optimizer not in objects.optimizers:
            return
        if self._run.exchange.is_uneven:
            raise ConfigurationError(
                "accelerator.join_uneven_inputs: ranks make different numbers of steps, but a "
                "recorded step needs all ranks. Compare without it, with even_batches=True (the "
                "default) or Accelerator(exact=True)"
            )
        if closure is None:
            if self._settings.perturb:
                parameters = parameters_of(optimizer)
                perturb_gradients(gradients_of(parameters), self._computed_in)
            self._record("gradient", contents.gradients(objects, optimizer))
        for name, value in contents.options(objects, optimizer).items():
            self._tensors[f"options/{name}"] = value.to("cpu", copy=True)

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Record what the step has used and changed, and end the run after the last one."""
        objects = self._run.objects
        if optimizer not in objects.optimizers:
            return
        self._record_inputs()
        for prepared in objects.models:
            prepared.reshard()
        modules = [prepared.module for prepared in objects.models]
        contexts = [prepared.swappable() for prepared in objects.models]
        precision = self._run.precision
        with precision.swap_in_master_weights(modules, [optimizer.optimizer], contexts):
            parameters, buffers = contents.parameters_and_buffers(objects)
            self._record("parameter", parameters)
            self._record("buffer", buffers)
            self._record("state", contents.optimizer_state(objects, optimizer))
        self._write()
        self._steps_of[optimizer] = self._steps_of.get(optimizer, 0) + 1
        steps = [self._steps_of.get(other, 0) for other in objects.optimizers]
        limit = self._settings.steps
        if min(steps) >= limit or max(steps) >= 4 * limit:
            self._end()

    # -- parts of a step

    def _record_inputs(self) -> None:
        """Record batches, losses, and in the first step what modules have returned."""
        self._forward.stop()
        if self._is_reader is None:
            shard, _ = self._run.strategy.data_shard
            first = on_all_ranks(shard).index(shard)
            self._is_reader = first == rank()
        losses = [(float(loss), weight) for loss, weight in self._losses]
        samples: Tensors | None = None
        if self._is_reader:
            samples = self._samples
            for name, output in self._forward.outputs.items():
                samples[f"output/{name}"] = output
        self._forward.outputs.clear()
        of_ranks = from_ranks(_Inputs(losses, self._batches, samples))
        if not of_ranks:
            return
        losses_of_ranks = [inputs.losses for inputs in of_ranks]
        for i, shares in enumerate(zip(*losses_of_ranks, strict=False)):
            dtype = self._losses[i][0].dtype
            self._tensors[f"loss/{i}"] = torch.tensor(_weighted_mean(shares), dtype=dtype)
        readers = [inputs for inputs in of_ranks if inputs.samples is not None]
        batches = [inputs.batches for inputs in readers]
        if len(set(batches)) > 1:
            self._notes.setdefault("uneven", {"step": self._steps + 1, "batches": batches})
        self._join_samples([inputs.samples for inputs in readers])

    def _join_samples(self, shards: list[Tensors]) -> None:
        """Record what shards of the data have read and computed, in their order."""
        names: dict[str, None] = {}
        for samples in shards:
            names.update(dict.fromkeys(samples))
        for name in names:
            parts = [samples[name] for samples in shards if name in samples]
            # Without those of another length on each rank, which one process pads together.
            with contextlib.suppress(RuntimeError):
                self._tensors[name] = torch.cat(parts)

    def _record(self, kind: str, tensors: Tensors) -> None:
        """Join tensors, and note the first one of which ranks have different copies."""
        if self._is_large is None:
            self._is_large = contents.size_of(self._run.objects) > LARGE
        for name, tensor in join(tensors, self._is_large).items():
            self._tensors[f"{kind}/{name}"] = tensor
        if kind == "state":
            return
        different = different_replica(tensors)
        if different is None:
            return
        name, first, second = different
        key = "replicas"
        if kind == "buffer":
            # A layout may leave them to each rank.
            key = "buffers"
        note = {
            "step": self._steps + 1,
            "kind": kind,
            "name": name,
            "rank": second,
            "dimension": self._dimension_between(first, second),
        }
        self._notes.setdefault(key, note)

    # -- the files

    def _write(self) -> None:
        self._steps += 1
        if rank() == 0:
            # Another accelerator of the script may have written some.
            files = list(self._folder.glob("step_*.pt"))
            torch.save(self._tensors, self._folder / f"step_{len(files) + 1}.pt")
        self._begin_step()

    def _end(self) -> None:
        run = self._run
        if rank() == 0:
            info = {
                **self._notes,
                "steps": self._steps,
                "shards": run.strategy.data_shard[1],
                "layout": run.strategy.name,
                "processes": PartialState().num_processes,
                "draws": sorted(self._forward.draws),
            }
            (self._folder / "run.json").write_text(json.dumps(info))
        run.loop.remove(self)
        if self._settings.exits:
            # Blocks that the exception leaves may still save, log and communicate.
            atexit.register(run.end_training)
            raise SystemExit(0)

    # -- the layout

    @property
    def _computed_in(self) -> torch.dtype:
        """The dtype that rounds more than those of the tensors, if there is one."""
        dtype: torch.dtype = getattr(self._run.precision, "dtype", torch.float64)
        return dtype

    def _dimension_between(self, first: int, second: int) -> str:
        """The dimensions in which two ranks have another place, such as "ddp"."""
        layout = getattr(self._run.strategy, "layout", None)
        if layout is None:
            return "ddp"
        places = mesh.coordinates(layout, first)
        others = mesh.coordinates(layout, second)
        dimensions = [name for name, key in FIELDS.items() if places[key] != others[key]]
        return "x".join(dimensions)


def _weighted_mean(shares: Iterable[tuple[float, float]]) -> float:
    """The mean over ranks of (loss, weight)."""
    total = weights = 0.0
    for loss, weight in shares:
        if weight:
            # The loss of a placeholder may not be finite.
            total += loss * weight
            weights += weight
    return total / (weights or 1.0)
