# SPDX-License-Identifier: Apache-2.0
"""The facade's part that asks the processes: who am I, who runs this, and data between the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from . import collectives
from .core.enums import DistributedType
from .data_loader.metrics import gather_for_metrics
from .parallel.base import Strategy
from .state import AcceleratorState, GradientState, PartialState


class ProcessControl:
    """Properties of the run, process-dependent execution, and collectives on nested data."""

    state: AcceleratorState
    strategy: Strategy
    gradient_state: GradientState
    flag_tensor: torch.Tensor | None

    # -- who am I

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16`, `bf16` or `fp8`."""
        return self.state.mixed_precision

    @property
    def use_distributed(self) -> bool:
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether several processes with an accelerator each train together."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def is_main_process(self) -> bool:
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    @property
    def deepspeed_plugin(self) -> Any:
        return self.state.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        return self.state.is_fsdp2

    # -- who does what

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on each machine's first process only."""
        self.state.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run the function on the main process only."""
        return PartialState().on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run the function on each machine's first process only."""
        return PartialState().on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run the function on the last process only."""
        return PartialState().on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run the function on the process of this index only."""
        return PartialState().on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run the function on the process of this index on each machine only."""
        return PartialState().on_local_process(function, local_process_index)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The block runs on the main process first, then on all others together."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The block runs on each machine's first process first, then on all others together."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """This process's consecutive part of `inputs`; see `PartialState.split_between_processes`."""
        return PartialState().split_between_processes(inputs, apply_padding)

    # -- data between the ranks

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all processes, concatenated along dimension 0 in rank order, on every process.

        All ranks give the same structure and shapes. One message, whatever the number of tensors.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` of one row a sample, without the rows that only fill up the last batch.

        Anything that is not a tensor travels as an object; the result is then the flat list over all ranks. Ranks
        that read the same samples (tensor, context and pipeline parallelism) give them once; after a forward on split
        sequences each rank gives what it has of its part.
        """
        strategy = self.strategy
        return gather_for_metrics(
            input_data,
            self.gradient_state.active_dataloader,
            use_gather_object,
            strategy.data_shard[1],
            strategy.data_group,
            strategy.sequence_group,
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Nested tensors summed (`sum`, also `none`) or averaged (`mean`) over all processes, times `scale`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Nested tensors filled up with `pad_index` along `dim` to the longest of all processes."""
        return collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # -- a flag that any process may raise

    def set_trigger(self) -> None:
        """Raise a flag on this process; `check_trigger` sees it on all of them."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last time it was seen. All processes must ask."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        if bool(collectives.reduce(self.flag_tensor, "sum") >= 1):
            self.flag_tensor = torch.tensor(0, device=self.device)
            return True
        return False
