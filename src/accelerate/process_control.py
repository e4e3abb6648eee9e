# SPDX-License-Identifier: Apache-2.0
"""The base class of `Accelerator` with the identity of the process, control of execution, and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import collectives
from .core.enums import DistributedType
from .data_loader.metrics import gather_for_metrics
from .parallel.base import Strategy
from .state import AcceleratorState, GradientState, PartialState, ProcessView


class ProcessControl(ProcessView):
    """Properties of the run, process-dependent execution, and collectives on nested data."""

    state: AcceleratorState
    strategy: Strategy
    gradient_state: GradientState
    flag_tensor: torch.Tensor | None

    # -- identity of the process

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes of the run work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of processes in the run."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def mixed_precision(self) -> str:
        """The precision of the run: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def multi_device(self) -> bool:
        """Whether several processes work together, each on an accelerator."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin, or None."""
        return self.state.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP2."""
        return self.state.is_fsdp2

    # -- control of execution

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on the main process only; the other processes get None.

        Args:
            function: the function.

        Returns:
            The decorated function.
        """
        return PartialState().on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on the first process of each machine only; the other processes get None.

        Args:
            function: the function.

        Returns:
            The decorated function.
        """
        return PartialState().on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function to run on the last process only; the other processes get None.

        Args:
            function: the function.

        Returns:
            The decorated function.
        """
        return PartialState().on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on one process only; the other processes get None.

        Args:
            function: the function.
            process_index: the rank of the process.

        Returns:
            The decorated function.
        """
        return PartialState().on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on one process of each machine only; the other processes get None.

        Args:
            function: the function.
            local_process_index: the rank of the process on its machine.

        Returns:
            The decorated function.
        """
        return PartialState().on_local_process(function, local_process_index)

    # -- data between the ranks

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along dimension 0, in rank order.

        It sends one message, whatever the number of tensors.

        Args:
            tensor: nested tensors, with the same structure and shapes on every process.

        Returns:
            The same structure on every process, with `num_processes` times the rows.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather one row for each sample, without the rows that only fill up the last batch.

        Ranks that read the same samples (tensor, context and pipeline parallelism) contribute them once. After a
        forward on sharded sequences each rank contributes its shard.

        Args:
            input_data: nested tensors with one row for each sample of the batch, or other objects.
            use_gather_object: gather `input_data` as objects even if it consists of tensors.

        Returns:
            The gathered tensors; for objects, the flat list over all ranks.

        Example:
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        """
        strategy = self.strategy
        return gather_for_metrics(
            input_data,
            self.gradient_state.active_dataloader,
            use_gather_object,
            strategy.data_shard[1],
            strategy.data_group,
            None if strategy.sequence is None else strategy.sequence.last_group,
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average tensors over all processes.

        Args:
            tensor: nested tensors, with the same structure and shapes on every process.
            reduction: "sum" (or "none", which the API treats the same), or "mean".
            scale: a factor for the result.

        Returns:
            The same structure on every process.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size on any process.

        Args:
            tensor: nested tensors.
            dim: the dimension to pad.
            pad_index: the value of the padding.
            pad_first: pad at the beginning instead of the end.

        Returns:
            The same structure, with the same size along `dim` on every process.
        """
        return collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # -- a flag that any process may raise

    def set_trigger(self) -> None:
        """Set a flag on this process, which `check_trigger` then reports on every process."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any process called `set_trigger` since the last True. Every process must call it."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        if bool(collectives.reduce(self.flag_tensor, "sum") >= 1):
            self.flag_tensor = torch.tensor(0, device=self.device)
            return True
        return False
