# SPDX-License-Identifier: Apache-2.0
"""The layouts that a model may run in on so many ranks, each as the configuration that `accelerate launch` reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..core.enums import PIPELINE_SCHEDULES

# Layouts that a run refuses, and why; those of models with experts.
REFUSED = {
    "pp+cp": "a run rejects it: a pipeline divides batches, but cp_size and sp_size divide "
    "sequences"
}
REFUSED_EXPERTS = {
    "ep+pp": "a run rejects it: experts are sharded while the model is loaded, but a pipeline "
    "takes the plain model"
}
# The smallest fraction of a model that SIZE_BASED_WRAP makes a unit, for models that do not name their blocks.
_UNIT = 1 / 32
# Micro-batches of a stage: more wait less, and compute smaller matrix products.
_MICROBATCHES = 2


@dataclass(frozen=True)
class PlannedLayout:
    """One way to run a model.

    Fields:
        name: for the table.
        ranks: of the run.
        sizes: dimension of `ParallelismConfig` -> size above 1.
        sharded: whether FSDP2 shards the model.
        checkpointing: activations are recomputed in the backward.
        offload: shards are in host memory between their uses.
        accumulation: batches of an optimizer step.
        schedule: of a pipeline.
        loading: size of transformers' `DistributedConfig` -> size, of a model that is sharded while it is loaded.
    """

    name: str
    ranks: int
    sizes: tuple[tuple[str, int], ...] = ()
    sharded: bool = False
    checkpointing: bool = False
    offload: bool = False
    accumulation: int = 1
    schedule: str | None = None
    loading: tuple[tuple[str, int], ...] = ()

    @property
    def pipeline_ranks(self) -> int:
        """The ranks of a pipeline; 1 without one."""
        return dict(self.sizes).get("pp", 1)

    @property
    def stages_per_rank(self) -> int:
        """As a run's by default."""
        if self.schedule:
            row = PIPELINE_SCHEDULES[self.schedule]
        else:
            row = None
        if row is None:
            return 1
        return row.stages_per_rank or 2

    @property
    def microbatches(self) -> int:
        """Of a batch, in a pipeline."""
        if self.pipeline_ranks > 1:
            return _MICROBATCHES * self.pipeline_ranks
        return 1

    @property
    def replicated(self) -> bool:
        """Whether DistributedDataParallel runs it."""
        return self.ranks > 1 and not self.sizes and not self.sharded and not self.loading

    @property
    def sequence_ranks(self) -> int:
        """The ranks that share each sequence."""
        return math.prod(size for name, size in self.sizes if name in ("cp", "sp"))

    @property
    def data_ranks(self) -> int:
        """The ranks, or groups of ranks, that read different samples."""
        shared = [size for name, size in self.sizes if name in ("tp", "cp", "sp", "pp")]
        return self.ranks // math.prod([*shared, dict(self.loading).get("tp_size", 1)])

    @property
    def distributed_config(self) -> str | None:
        """The argument of `from_pretrained` that selects the layout; None if a configuration file does."""
        if not self.loading:
            return None
        return f"DistributedConfig({', '.join(f'{name}={size}' for name, size in self.loading)})"

    def accumulated(self, steps: int) -> PlannedLayout:
        """The same layout with smaller batches."""
        return replace(self, name=f"{self.name} x{steps}", accumulation=steps)

    def configuration(
        self, model: nn.Module, precision: str, device: str, machines: int, sequence: int
    ) -> dict[str, Any]:
        """The content of the configuration file."""
        settings: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": _kind(self, device),
            "mixed_precision": precision,
            "num_machines": machines,
            "num_processes": self.ranks,
            "use_cpu": device == "cpu",
        }
        if self.accumulation > 1:
            settings["gradient_accumulation_steps"] = self.accumulation
        if self.sharded:
            settings["fsdp_config"] = {
                "fsdp_version": "2",
                "fsdp_cpu_ram_efficient_loading": False,
                "fsdp_activation_checkpointing": self.checkpointing,
                "fsdp_offload_params": self.offload,
                **_units(model),
            }
        if self.sizes:
            sizes: dict[str, Any] = {
                f"parallelism_config_{name}_size": size for name, size in self.sizes
            }
            if "sp" in dict(self.sizes):
                sizes["parallelism_config_sp_seq_length"] = sequence
            if self.pipeline_ranks > 1:
                sizes["parallelism_config_pp_schedule"] = self.schedule
                sizes["parallelism_config_pp_num_microbatches"] = self.microbatches
                if self.schedule != "gpipe":
                    sizes["parallelism_config_pp_loss_reduction"] = "mean"
            settings["parallelism_config"] = sizes
        return settings


def _kind(layout: PlannedLayout, device: str) -> str:
    if layout.sharded:
        return "FSDP"
    if layout.ranks == 1:
        return "NO"
    if device == "cpu":
        return "MULTI_CPU"
    return "MULTI_GPU"


def _units(model: nn.Module) -> dict[str, Any]:
    if getattr(model, "_no_split_modules", None):
        return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": max(1, int(count * _UNIT)),
    }


def candidates(ranks: int, machines: int = 1, device: str = "cpu") -> list[PlannedLayout]:
    """All layouts of so many ranks, the plain ones first; whether a model allows one shows when it is prepared."""
    if ranks == 1:
        return [PlannedLayout("single", 1)]
    layouts = [PlannedLayout("ddp", ranks)]
    for layout in _sharded(ranks, machines):
        checkpointed = replace(layout, name=f"{layout.name}+ckpt", checkpointing=True)
        layouts += [layout, checkpointed]
    if device != "cpu":
        shards = (("dp_shard", ranks),)
        layouts.append(
            PlannedLayout(
                "fsdp+ckpt+offload", ranks, shards, sharded=True, checkpointing=True, offload=True
            )
        )
    layouts.append(PlannedLayout(f"tp{ranks}", ranks, (("tp", ranks),)))
    layouts += _pipelines(ranks)
    return layouts


def expert_candidates(ranks: int) -> Iterator[PlannedLayout]:
    """The layouts in which transformers shards the experts of a mixture."""
    for size in (2, 4, 8):
        if ranks % size:
            continue
        replicas = ranks // size
        yield PlannedLayout(
            f"ep{size}+fsdp{ranks}", ranks, loading=(("fsdp_size", ranks), ("ep_size", size))
        )
        name = f"ep{size}+tp{size}"
        loading = (("tp_size", size), ("ep_size", size))
        if replicas == 1:
            yield PlannedLayout(name, ranks, loading=loading)
        else:
            yield PlannedLayout(
                f"{name}+fsdp{replicas}", ranks, loading=(("fsdp_size", replicas), *loading)
            )


def _pipelines(ranks: int) -> Iterator[PlannedLayout]:
    for size in (2, 4, 8):
        if ranks % size:
            continue
        stages = PlannedLayout(f"pp{size}", ranks, (("pp", size),))
        replicas = ranks // size
        if replicas == 1:
            yield from _scheduled(stages, PIPELINE_SCHEDULES)
            continue
        for stage in _stages(stages, replicas):
            yield from _scheduled(stage, ("gpipe", "1f1b"))
            if stage.sharded:
                checkpointed = replace(stage, name=f"{stage.name}+ckpt", checkpointing=True)
                yield from _scheduled(checkpointed, ("1f1b",))


def _scheduled(layout: PlannedLayout, schedules: Iterable[str]) -> Iterator[PlannedLayout]:
    for schedule in schedules:
        name = layout.name
        if schedule != "gpipe":
            name += f"+{schedule}"
        yield replace(layout, name=name, schedule=schedule)


def _stages(pipeline: PlannedLayout, ranks: int) -> Iterator[PlannedLayout]:
    """The pipeline with so many ranks to each stage: replicas, shards, replicas of shards, and split layers."""

    def of(name: str, sharded: bool = False, **sizes: int) -> PlannedLayout:
        return replace(
            pipeline,
            name=f"{pipeline.name}+{name}",
            sizes=(*sizes.items(), *pipeline.sizes),
            sharded=sharded,
        )

    yield of(f"dp{ranks}", dp_replicate=ranks)
    yield of(f"fsdp{ranks}", True, dp_shard=ranks)
    if ranks % 2 == 0 and ranks > 2:
        half = ranks // 2
        yield of(f"hsdp2x{half}", True, dp_replicate=2, dp_shard=half)
        yield of(f"tp2+fsdp{half}", True, dp_shard=half, tp=2)
    yield of(f"tp{ranks}", tp=ranks)


def _sharded(ranks: int, machines: int) -> Iterator[PlannedLayout]:
    yield PlannedLayout("fsdp", ranks, (("dp_shard", ranks),), sharded=True)
    replicas = 2
    if machines > 1:
        replicas = machines
    shards, remainder = divmod(ranks, replicas)
    if shards > 1 and not remainder:
        sizes: tuple[tuple[str, int], ...] = (("dp_replicate", replicas), ("dp_shard", shards))
        yield PlannedLayout(f"hsdp{replicas}x{shards}", ranks, sizes, sharded=True)
    for size in (2, 4, 8):
        shards, remainder = divmod(ranks, size)
        if remainder:
            continue
        suffix = ""
        outer: tuple[tuple[str, int], ...] = ()
        kinds: tuple[str, ...] = ("cp", "sp")
        if shards > 1:
            suffix = f"+fsdp{shards}"
            outer = (("dp_shard", shards),)
            kinds = ("tp", "cp", "sp")
        for kind in kinds:
            name = f"{kind}{size}{suffix}"
            sizes = (*outer, (kind, size))
            yield PlannedLayout(name, ranks, sizes, sharded=True)
