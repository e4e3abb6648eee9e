# SPDX-License-Identifier: Apache-2.0
"""Options of tensor, context and sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelPlugin:
    """The API's older way to ask for tensor parallelism: `tp_size` ranks, on a mesh of the user's where given."""

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ConfigurationError(f"tp_size={self.tp_size!r}: the number of tensor-parallel ranks is at least 1")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Fields:
        enable_async_tp: overlap communication with the multiplications.
        sequence_parallel: between the split layers (norms, residual stream) each rank keeps a part of the sequence.
        loss_parallel: the output layer stays split over the vocabulary, and the loss is computed in parts.
        plan: module name, in which `*` stands for one part -> a word (`colwise`, `rowwise`, ...) or a `ParallelStyle`
            of torch. None takes the model's own plan (`_tp_plan`), else one is inferred.
    """

    enable_async_tp: bool = False
    sequence_parallel: bool = False
    loss_parallel: bool = False
    plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and not (isinstance(self.plan, Mapping) and self.plan):
            raise ConfigurationError(
                f"plan={self.plan!r}: a tensor-parallel plan maps names of modules to words such as 'colwise'; None "
                "takes the model's own, or infers one"
            )
        if self.enable_async_tp:
            raise ConfigurationError(
                "enable_async_tp=True needs symmetric-memory kernels, which this library does not drive: use False"
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
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ConfigurationError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Must be one of 'allgather' or 'alltoall'."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of Ulysses sequence parallelism: the sequence length (tokens) and whether it varies between batches."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length is None:
            self.sp_seq_length = env.get_int("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = env.get_flag("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", True)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = env.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "when `sp_seq_length_is_variable` is `False` `sp_seq_length` must be provided either through the "
                "constructor or the environment variable PARALLELISM_CONFIG_SP_SEQ_LENGTH"
            )
        kind = self.sp_attn_implementation
        if kind in ("eager", "flex_attention"):
            raise ConfigurationError(
                f"Invalid sp_attn_implementation: {kind}. 'eager' and 'flex_attention' are not supported with "
                "sequence parallelism."
            )
        if kind is not None and kind not in _ATTENTION and "/" not in kind:
            raise ConfigurationError(
                f"Invalid sp_attn_implementation: {kind}. Must be one of {list(_ATTENTION)} or a hub-hosted flash "
                "attention kernel (e.g. 'kernels-community/flash-attn2')."
            )
