# SPDX-License-Identifier: Apache-2.0
"""Options of tensor, context, sequence and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.enums import PIPELINE_SCHEDULES, PipelineSchedule
from ..core.errors import ConfigurationError
from ..core.strategy_options import SP_ATTENTION
from . import checks

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class TorchTensorParallelPlugin:
    """The API's older form of tensor parallelism: `tp_size` ranks, on the user's mesh if given.

    `torch_device_mesh` then has one dimension, of that size, called "tp".
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        checks.integer("tp_size", self.tp_size)
        mesh = self.torch_device_mesh
        if mesh is None:
            return
        names = getattr(mesh, "mesh_dim_names", None)
        shape = getattr(mesh, "shape", None)
        if names != ("tp",) or shape != (self.tp_size,):
            raise ConfigurationError(
                f"torch_device_mesh={mesh!r} with tp_size={self.tp_size}: use a one-dimensional "
                f"DeviceMesh of that size, init_device_mesh(device, ({self.tp_size},), "
                "mesh_dim_names=('tp',)), or leave torch_device_mesh out"
            )


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Fields:
        enable_async_tp: overlap communication with the multiplications.
        sequence_parallel: between the split layers (norms, residual stream) each rank keeps a part of the sequence.
        loss_parallel: a loss that the model itself computes is computed on logits that stay split over the vocabulary.
        plan: module name (`*` stands for one part) -> a word (`colwise`, `rowwise`, ...) or torch's `ParallelStyle`.
            None uses the model's own plan (`_tp_plan`), or infers one.
    """

    enable_async_tp: bool = False
    sequence_parallel: bool = False
    loss_parallel: bool = False
    plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        checks.fields_of(self)
        if self.plan is not None and not (isinstance(self.plan, Mapping) and self.plan):
            raise ConfigurationError(
                f"plan={self.plan!r}: a tensor-parallel plan maps module names to words such as "
                "'colwise'; None uses the model's own plan or infers one"
            )
        if self.enable_async_tp:
            raise ConfigurationError(
                "enable_async_tp=True needs symmetric-memory kernels, which this library does "
                "not support: use False"
            )


@dataclass
class TorchContextParallelConfig:
    """How context-parallel ranks exchange keys and values: `cp_comm_strategy` is allgather or alltoall.

    None takes PARALLELISM_CONFIG_CP_COMM_STRATEGY, else allgather.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = env.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        self.cp_comm_strategy = checks.word(
            "cp_comm_strategy", self.cp_comm_strategy, ("allgather", "alltoall")
        )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of Ulysses sequence parallelism. If one is None, the variable PARALLELISM_CONFIG_SP_* sets it.

    Fields:
        sp_seq_length: tokens of a full sequence. Required if the length does not vary.
        sp_seq_length_is_variable: whether the length varies between batches. Default: True.
        sp_attn_implementation: the attention of the model, such as "sdpa".

    Raises:
        ConfigurationError: the length is missing, or the attention does not support sequence parallelism.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length is None:
            self.sp_seq_length = env.get_int("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = env.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        variable = "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"
        self.sp_seq_length_is_variable = checks.truth_or(
            "sp_seq_length_is_variable", self.sp_seq_length_is_variable, variable, True
        )
        if self.sp_seq_length is not None:
            checks.integer("sp_seq_length", self.sp_seq_length)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "when `sp_seq_length_is_variable` is `False` `sp_seq_length` must be provided either through the "
                "constructor or the environment variable PARALLELISM_CONFIG_SP_SEQ_LENGTH"
            )
        kind = self.sp_attn_implementation
        if kind is not None and kind not in SP_ATTENTION and "/" not in kind:
            raise ConfigurationError(
                f"Invalid sp_attn_implementation: {kind}. Must be one of {list(SP_ATTENTION)} or a hub-hosted flash "
                "attention kernel (e.g. 'kernels-community/flash-attn2')."
            )


@dataclass
class PipelineParallelConfig:
    """Options of pipeline parallelism (`pp_handler`): where the model is split, and in which order its stages compute.

    Fields:
        schedule: "gpipe" works with any loss. "1f1b", "looped_bfs", "interleaved", "zero_bubble" and "zbv" keep fewer
            micro-batches at a time or wait less; they need a model that returns its loss, or a `loss_fn`, and
            `loss_reduction` or `num_items`. None takes PARALLELISM_CONFIG_PP_SCHEDULE, or gpipe.
        num_microbatches: number of micro-batches. None takes PARALLELISM_CONFIG_PP_NUM_MICROBATCHES, or one for each
            stage.
        stages_per_rank: stages on each rank. None: two if the schedule supports any number, otherwise the schedule's
            number.
        split_points: names of the modules at which the second and each later stage begins; None balances.
        balance: balance the stages by "parameters" (bytes) or "time", measured with `example_inputs`.
        example_inputs: keyword arguments of the model's forward. It runs once on the first rank, to see in which order
            modules compute, which outputs are used on later stages, and which weights are read outside their modules.
            None: a transformers model runs on its dummy inputs; any other model is assumed to compute in the order of
            its modules.
        carried: names of modules whose output is used beyond the next block (skip connections) and is therefore sent
            to all later stages. None: those observed with `example_inputs`, and the encoder of a transformers
            encoder-decoder model.
        loss_fn: `loss_fn(output, labels)`. The prepared model then takes `labels=` and returns (loss, output).
        loss_reduction: how the losses of micro-batches combine into the loss of the batch, for all schedules except
            gpipe: "mean" (a mean over samples, or over equally many items of each sample) or "sum". None takes
            PARALLELISM_CONFIG_PP_LOSS_REDUCTION.
        num_items: for a loss that is a mean over unequal numbers of items (labels that are not ignored): a function of
            the model's inputs that returns the number of items. It is called with the inputs of each micro-batch.
        whole_inputs: names of inputs that every micro-batch gets unsplit, even though their first dimension looks like
            the batch dimension.
        gather_output: give every rank the full output. False: a model that returns its loss returns only the loss,
            and None for its other tensors.

    Raises ConfigurationError for an unknown word or an invalid number.
    """

    schedule: str | None = None
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    split_points: Sequence[str] | None = None
    balance: str = "parameters"
    example_inputs: dict[str, Any] | None = None
    carried: Sequence[str] | None = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    loss_reduction: str | None = None
    num_items: Callable[..., int | torch.Tensor] | None = None
    whole_inputs: Sequence[str] = ()
    gather_output: bool = True

    def __post_init__(self) -> None:
        if self.schedule is None:
            self.schedule = env.get("PARALLELISM_CONFIG_PP_SCHEDULE", "gpipe")
        self.schedule = checks.word("schedule", self.schedule, PIPELINE_SCHEDULES)
        if self.num_microbatches is None:
            self.num_microbatches = env.get_int("PARALLELISM_CONFIG_PP_NUM_MICROBATCHES")
        required = self.schedule_row.stages_per_rank
        if self.stages_per_rank is None:
            self.stages_per_rank = required or 2
        for name in ("num_microbatches", "stages_per_rank"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name))
        if self.stages_per_rank != (required or self.stages_per_rank):
            raise ConfigurationError(
                f"stages_per_rank={self.stages_per_rank}: with schedule={self.schedule!r} a rank "
                f"has {required}"
            )
        self.balance = checks.word("balance", self.balance, ("parameters", "time"))
        if self.loss_reduction is None:
            self.loss_reduction = env.get("PARALLELISM_CONFIG_PP_LOSS_REDUCTION")
        if self.loss_reduction is not None:
            self.loss_reduction = checks.word(
                "loss_reduction", self.loss_reduction, ("mean", "sum")
            )
        if self.num_items is not None and self.loss_reduction == "sum":
            raise ConfigurationError(
                "num_items is for a mean loss, but loss_reduction='sum': use only one of them"
            )
        self.gather_output = checks.truth("gather_output", self.gather_output)
        if self.split_points is not None:
            self.split_points = checks.texts("split_points", self.split_points, "module names")
        if self.carried is not None:
            self.carried = checks.texts("carried", self.carried, "module names")
        self.whole_inputs = tuple(checks.texts("whole_inputs", self.whole_inputs, "input names"))

    @property
    def schedule_row(self) -> PipelineSchedule:
        """What the requested schedule is."""
        return PIPELINE_SCHEDULES[str(self.schedule)]
