# SPDX-License-Identifier: Apache-2.0
"""What the modules of a run's models return before the first backward, and which of them draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.modules import class_name
from ..core.trees import leaves
from ..data_loader.order import capture
from ..parallel.base import Strategy
from ..parallel.materialize import from_all
from ..parallel.pipeline.remote_tensor import RemoteTensor
from ..parallel.prepared import PreparedModel
from ..parallel.unwrap import canonical_name, extract_model_from_parallel
from ..torch_internals.compiled import uncompiled
from .joining import ELEMENTS, Tensors, plain


class FirstForward:
    """Hooks of all modules.

    Attributes:
        outputs: by the module's name, the first tensor that it has returned.
        draws: what draws random numbers itself: names of modules, and the loop between a batch and the backward.
    """

    def __init__(self) -> None:
        self.outputs: Tensors = {}
        self.draws: set[str] = set()
        self._handles: list[Any] = []
        self._device = torch.device("cpu")
        # Of the random generators when the loop went on after a batch or a forward; None inside of a forward.
        self._loop_states: list[Any] | None = None

    def watch(self, prepared: PreparedModel, prefix: str, strategy: Strategy) -> None:
        """Watch a model until `stop`."""
        if uncompiled(prepared.module) is not prepared.module:
            # A hook would have it compiled again.
            return
        self._device = strategy.device
        model = extract_model_from_parallel(prepared.module)
        handles = self._handles
        handles.append(model.register_forward_pre_hook(lambda *args: self.end_loop()))
        for name, module in model.named_modules():
            if name and prepared.template is not None:
                # A stage runs its modules once for each micro-batch, and before that to find shapes.
                break
            shown_name = canonical_name(name) or class_name(model)
            watched = _Module(self, prefix + shown_name, strategy)
            handles.append(module.register_forward_pre_hook(watched.before_forward))
            handles.append(module.register_forward_hook(watched.after_forward))
        handles.append(model.register_forward_hook(lambda *args: self.begin_loop()))

    def generators(self) -> list[Any]:
        """The states of the random generators."""
        states: list[Any] = [capture()]
        if self._device.type != "cpu":
            device_module = torch.get_device_module(self._device)
            states.append(device_module.get_rng_state().tolist())
        return states

    def begin_loop(self) -> None:
        """The loop goes on, with a batch or after a forward."""
        if self._handles:
            self._loop_states = self.generators()

    def end_loop(self) -> None:
        """Note whether the loop has drawn random numbers."""
        if self._loop_states is not None and self._loop_states != self.generators():
            self.draws.add("the training loop")
        self._loop_states = None

    def stop(self) -> None:
        """Watch no longer."""
        self.end_loop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Module:
    """The hooks of a module."""

    def __init__(self, forward: FirstForward, name: str, strategy: Strategy) -> None:
        self._forward = forward
        self._name = name
        self._strategy = strategy
        self._calls = 0
        self._states: list[Any] = []
        self._draws = 0

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Note the states of the random generators."""
        self._states = self._forward.generators()
        self._draws = len(self._forward.draws)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note what the module has returned."""
        if not torch.is_grad_enabled():
            return
        draws = self._forward.draws
        is_drawn = self._states != self._forward.generators()
        # Those inside of it may have drawn.
        if is_drawn and len(draws) == self._draws:
            draws.add(self._name)
        self._calls += 1
        tensors = [tensor for tensor in leaves(output) if tensor.is_floating_point()]
        # Losses are recorded by themselves.
        tensors = [tensor for tensor in tensors if tensor.ndim]
        if not tensors:
            return
        full = self._full(tensors[0].detach())
        if full is not None:
            self._add(full)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor of full sequences; None where this rank cannot have it."""
        if isinstance(tensor, RemoteTensor):
            return None
        tensor = plain(tensor)
        sequence = self._strategy.sequence
        if sequence is None or sequence.region is None:
            return tensor
        if tensor.ndim < 2 or tensor.shape[1] != sequence.region.rows:
            return None
        shards = from_all(tensor.cpu(), sequence.group)
        return sequence.layout.join(shards, 1)

    def _add(self, tensor: torch.Tensor) -> None:
        name = self._name
        if self._calls > 1:
            name += f" (call {self._calls})"
        shape = tensor.shape[1:]
        size = shape.numel()
        if size > ELEMENTS:
            # Of each sample, since a rank has some samples. Other shapes have other elements, under another name.
            name = f"{self._name} (call {self._calls}, elements of {list(shape)})"
            positions = torch.linspace(0, size - 1, ELEMENTS, dtype=torch.float64)
            positions = positions.long().to(tensor.device)
            tensor = tensor.flatten(1)[:, positions]
        self._forward.outputs[name] = tensor.to("cpu", copy=True)
