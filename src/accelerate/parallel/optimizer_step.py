# SPDX-License-Identifier: Apache-2.0
"""How the step of an optimizer is built, in one place, and what the step of one element depends on.

The latter decides whether an optimizer may be given shards of tensors, and whether its step may be divided, so that
its state is in host memory between steps and is streamed through the device during a step.
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import PrepareError
from ..core.messages import warn
from ..optimizer import AcceleratedOptimizer
from ..torch_internals.optimizer_step import replace_step
from .items import global_loss

if TYPE_CHECKING:
    from .base import Strategy

# Adafactor, Muon and LBFGS use entire tensors.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
# Packages whose optimizers take shards themselves, apart from these classes. Their step is not replaced.
_TAKE_SHARDS: dict[str, frozenset[str]] = {
    "bitsandbytes": frozenset(
        {"LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS"}
    ),
    "deepspeed": frozenset({"FusedLamb", "OnebitLamb", "MuonWithAuxAdam"}),
    "lion_pytorch": frozenset(),
    "torchao": frozenset(),
}
# An optimizer that supports shards itself sets this attribute, on its class or on the object.
OPT_OUT = "supports_sharded_parameters"

# Bytes of the state that is on the device at a time, of which there are three: coming, in use and leaving.
CHUNK = 64 * 2**20


def build_step(
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    device_placement: bool = True,
    offload_chunk: int | None = None,
) -> AcceleratedOptimizer:
    """Build the step of an optimizer whose parameters are laid out, from the inside to the outside.

    Nothing else replaces or wraps a step.

    Args:
        optimizer: changed in place, once.
        strategy: the run's.
        device_placement: move the state to the devices of the parameters.
        offload_chunk: keep the state in host memory, and stream this many bytes at a time; None: do not.
    """
    # 1. The step of shards is that of a single process, and uses no stale unsharded parameters.
    strategy.lay_out_step(optimizer)
    # 2. It updates fp32 master weights, which are rounded into the parameters.
    strategy.precision.attach_master_weights(optimizer)
    # 3. It is divided, and its state is on the device for that time only.
    if offload_chunk is not None:
        offload_state(optimizer, offload_chunk)
    # 4. It is taken at the end of an accumulation window, through the scaler. Optimizers that decide by the loss, as a
    # line search does, have to make the same decision on all ranks.
    average_loss = None
    if not is_elementwise(optimizer):
        average_loss = functools.partial(global_loss, strategy)
    return AcceleratedOptimizer(
        optimizer, device_placement, strategy.precision.scaler, average_loss=average_loss
    )


class Scope(enum.Enum):
    """What the step of one element depends on, apart from hyperparameters and counters."""

    ELEMENT = "its own gradient and state"
    PARAMETER = "the entire parameter"
    MODEL = "all parameters of the optimizer"
    UNKNOWN = "unknown"


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step is that of one of torch's optimizers whose step of an element needs no other element."""
    step = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, kind) and inspect.unwrap(kind.step) is step for kind in ELEMENTWISE
    )


def find_scope(optimizer: torch.optim.Optimizer) -> Scope:
    """The scope of an optimizer's step: known by its class, or declared by `supports_sharded_parameters`."""
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    takes_shards = package in _TAKE_SHARDS and kind.__name__ not in _TAKE_SHARDS[package]
    if getattr(optimizer, OPT_OUT, False) or takes_shards or is_elementwise(optimizer):
        return Scope.ELEMENT
    if isinstance(optimizer, torch.optim.LBFGS):
        return Scope.MODEL
    if package in _TAKE_SHARDS or isinstance(optimizer, torch.optim.Adafactor | torch.optim.Muon):
        return Scope.PARAMETER
    if (package, kind.__name__) == ("transformers", "Adafactor") or isinstance(
        optimizer, torch.optim.SparseAdam
    ):
        return Scope.PARAMETER
    return Scope.UNKNOWN


def check_flat_shards(optimizer: torch.optim.Optimizer, layout: str, remedy: str) -> None:
    """Warn of an optimizer that may need entire tensors, where `layout` gives it flat shards. See below."""
    refuse_model_scope(optimizer, layout, remedy)
    if find_scope(optimizer) is not Scope.ELEMENT:
        name = type(optimizer).__name__
        warn(
            f"{name} may not update each element independently, but {layout} gives it flat shards "
            f"of the parameters. If it uses shapes or norms of entire tensors, {remedy}; "
            f"otherwise, set {name}.{OPT_OUT} = True"
        )


def refuse_model_scope(optimizer: torch.optim.Optimizer, layout: str, remedy: str) -> None:
    """Raise PrepareError for an optimizer that needs all parameters at once, where each rank has only some."""
    if find_scope(optimizer) is Scope.MODEL:
        raise PrepareError(
            f"{type(optimizer).__name__} combines values of all its parameters in each step, but "
            f"with {layout} a rank has only some of them: {remedy}"
        )


def offload_state(optimizer: torch.optim.Optimizer, chunk: int = CHUNK) -> None:
    """Make an optimizer of parameters on an accelerator keep its state in pinned host memory from now on.

    Its step updates a chunk of parameters at a time. While it does, the state of the next chunk is copied to the
    device and that of the last one back, on streams of their own.

    Args:
        optimizer: one of torch's elementwise optimizers, of plain parameters.
        chunk: the most bytes of state in a chunk; a larger parameter is a separate chunk.

    Raises:
        PrepareError: the step of this optimizer cannot be divided, or its parameters are sharded.
    """
    kind = type(optimizer)
    if not is_elementwise(optimizer):
        names = ", ".join(sorted(elementwise.__name__ for elementwise in ELEMENTWISE))
        raise PrepareError(
            f"OptimizerOffloadKwargs: the step of {kind.__name__} may not update each parameter "
            f"separately. Use one of {names}, or remove OptimizerOffloadKwargs"
        )
    for group in optimizer.param_groups:
        if any(hasattr(parameter, "device_mesh") for parameter in group["params"]):
            raise PrepareError(
                "OptimizerOffloadKwargs: the parameters are sharded (DTensors). Set cpu_offload=True in the "
                "fsdp_plugin, which keeps parameters, gradients and states in host memory"
            )
    if "_streamed_state" in optimizer.__dict__:
        return
    streamed, reference = StreamedState(chunk), weakref.ref(optimizer)

    def step(
        own: torch.optim.Optimizer,
        former: Callable[..., object],
        closure: Callable[[], object] | None,
    ) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        streamed.step(own, former)
        return loss

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        own = reference()
        assert own is not None
        kind.load_state_dict(own, dict(state_dict))
        streamed.leave(own)

    replace_step(optimizer, step)
    optimizer.__dict__.update(_streamed_state=streamed, load_state_dict=load_state_dict)


class StreamedState:
    """The state of one optimizer, in host memory between steps."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._streams: tuple[torch.Stream, torch.Stream] | None = None

    def step(self, optimizer: torch.optim.Optimizer, call: Callable[[], object]) -> None:
        """Update all parameters that have gradients, by one `call` for each chunk of them."""
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        chunks = self._chunks(optimizer)
        for group, _ in groups:
            group["params"] = []
        try:
            if chunks:
                arriving = self.to_device(optimizer, chunks[0][1])
            else:
                arriving = None
            for number, (group, parameters) in enumerate(chunks):
                present = arriving
                if number + 1 < len(chunks):
                    arriving = self.to_device(optimizer, chunks[number + 1][1])
                else:
                    arriving = None
                self.wait(present)
                group["params"] = parameters
                call()
                group["params"] = []
                self.to_host(optimizer, parameters)
        finally:
            for group, parameters in groups:
                group["params"] = parameters
            self.finish()

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Move a state that was loaded to the host."""
        for group in optimizer.param_groups:
            self.to_host(optimizer, group["params"])
        self.finish()

    def _chunks(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
        """(group, parameters) of each call; the parameters of a call are of one group."""
        found: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        for group in optimizer.param_groups:
            left = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # Adam's two moments; before the first step the size is not known.
                size = 2 * parameter.nbytes
                if size > left or not found or found[-1][0] is not group:
                    found.append((group, []))
                    left = self.chunk
                found[-1][1].append(parameter)
                left -= size
        return found

    def to_device(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
    ) -> torch.Event:
        """Start to copy the state of parameters to the device; returns the event behind the copies."""
        stream = self._stream(parameters[0].device, 0)
        with stream:
            for parameter in parameters:
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if _is_streamed(value) and value.device.type == "cpu":
                        state[name] = value.to(parameter.device, non_blocking=True)
            return stream.record_event()

    def wait(self, arrived: torch.Event | None) -> None:
        """Make the stream of the step wait for the copies of a chunk."""
        torch.accelerator.current_stream().wait_event(arrived)  # type: ignore[arg-type]

    def to_host(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Start to copy the state of parameters to the host, behind their step."""
        streamed = []
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if _is_streamed(value) and value.device.type != "cpu":
                    streamed.append((state, name, value))
        if not streamed:
            return
        device = streamed[0][2].device
        stream = self._stream(device, 1)
        used_in = torch.accelerator.current_stream(device)
        stream.wait_stream(used_in)
        with stream:
            for state, name, value in streamed:
                host = torch.empty_like(value, device="cpu", pin_memory=True)
                host.copy_(value, non_blocking=True)
                # It was allocated on the stream that brought it: the memory is used on both others.
                value.record_stream(used_in)
                value.record_stream(stream)
                state[name] = host

    def finish(self) -> None:
        """Wait until the states are in host memory, where others may read them."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def _stream(self, device: torch.device, number: int) -> torch.Stream:
        if self._streams is None:
            self._streams = torch.Stream(device=device), torch.Stream(device=device)
        return self._streams[number]

    def __reduce__(self) -> tuple[type[StreamedState], tuple[int]]:
        return StreamedState, (self.chunk,)


def _is_streamed(value: object) -> bool:
    """Whether a value of the state is as large as its parameter; counters stay where they are."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
