# SPDX-License-Identifier: Apache-2.0
"""One model's own forward, run for a part of its units only: what comes before is received, what comes after waits.

No tracer is needed. Every rank keeps all of the model's modules, and runs the user's forward with the same inputs; the
units of other stages have no tensors. Called before the stage's own units, they give stand-ins of the right shapes,
filled with NaN so that whatever depends on them shows; the last of them gives what was received. When the stage's last
unit has computed, the forward is left. Masks, positions and all else that the forward makes from its inputs are made
on each stage, and only what passes from block to block travels; with it what modules gave that are `carried`, since
more than the next block uses it (an encoder's output).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...core import trees
from ...core.errors import PrepareError

Inner = Callable[..., Any]
# What is called in its place, with it and its arguments.
Outer = Callable[[Inner, tuple[Any, ...], dict[str, Any]], Any]
_KEPT_STAND_INS = 256
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Spec:
    """A tensor without its content."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def stand_in(self, device: torch.device, nan: bool = True) -> torch.Tensor:
        """A tensor of one element's memory: NaN where the dtype has it, so that its use cannot go unnoticed."""
        nan = nan and (self.dtype.is_floating_point or self.dtype.is_complex)
        return torch.full((), float("nan") if nan else 0, dtype=self.dtype, device=device).expand(self.shape)


def is_spec(value: Any) -> bool:
    return isinstance(value, Spec)


def describe(value: Any, where: str) -> Any:
    """Nested data with each tensor's Spec in its place. Raises PrepareError for what cannot travel between ranks."""

    def spec(tensor: torch.Tensor) -> Spec:
        if isinstance(tensor, DTensor):
            raise PrepareError(
                f"{where} is split over tensor-parallel ranks: a stage's output must be whole. Let the plan's last "
                "layer of a block give its whole output (rowwise)."
            )
        return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    found = trees.map_leaves(spec, value)
    _check_plain(found, where)
    return found


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, (Spec, *_PLAIN)):
        return
    if isinstance(value, (list, tuple)):
        for entry in value:
            _check_plain(entry, where)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _check_plain(entry, f"{where}[{key!r}]")
    elif trees.is_dataclass_instance(value):
        for name, entry in vars(value).items():
            _check_plain(entry, f"{where}.{name}")
    else:
        raise PrepareError(
            f"{where} holds a {type(value).__name__}, which cannot be put together from the stages of a pipeline. "
            "Have the model return tensors alone (use_cache=False for a model of transformers)."
        )


def fill(description: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What was described, with these tensors."""
    return trees.replace_leaves(description, tensors, is_spec)


class Reached(BaseException):
    """The last unit of a stage has computed: the forward is left with its output. Never seen outside."""

    def __init__(self, output: Any) -> None:
        self.output = output


@dataclass
class Part:
    """Units [start, stop) of a forward, and what they need from the others.

    `received` is what unit start - 1 gave, and what the carried modules before it did; `seen` what the units before
    gave, by unit, call by call (Specs). With `record` the calls of the own units are added to it. `leave`: unit
    stop - 1 ends the forward, whatever follows. `nan`: what stand-ins hold. `carried`: what those modules gave here,
    call by call.
    """

    start: int
    stop: int
    received: tuple[Any, dict[str, list[Any]]] | None = None
    seen: dict[int, list[Any]] = field(default_factory=dict)
    record: bool = False
    leave: bool = False
    nan: bool = True
    passed: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    carried: dict[str, list[Any]] = field(default_factory=dict)


class StagedModel:
    """A model whose units can be run part by part. `units` are names, in the order in which they compute.

    `carried`: name of a unit, or of a module that holds some -> the number of its last unit.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        device: torch.device,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        carried: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.device = device
        self.part: Part | None = None
        self._stand_ins: dict[tuple[Spec, bool], torch.Tensor] = {}
        # What the prepared model does when it is called.
        self.entry: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        # Units that compute again in the backward instead of keeping what they computed.
        self.recompute: Outer | None = None
        carried = carried or {}
        for number, name in enumerate(self.units):
            call: Outer = functools.partial(self._call_unit, number)
            if name in carried:
                call = functools.partial(self._call_carried, name, number, call)
            intercept(model.get_submodule(name), call)
        for name in set(carried) - set(self.units):
            call = functools.partial(self._call_carried, name, carried[name], _call_inner)
            intercept(model.get_submodule(name), call)
        self._forward: Inner = functools.partial(_plain_call, model, type(model))
        if loss_fn is not None:
            self._forward = functools.partial(_call_with_loss, self._forward, loss_fn)
        intercept(model, self._call_model)

    def _call_model(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.entry is None:
            return inner(*args, **kwargs)
        return self.entry(args, kwargs)

    def run(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What unit part.stop - 1 gives, and what is carried beside; the model's output where the forward ends."""
        self.part = part
        try:
            output = self._forward(*args, **kwargs)
        except Reached as reached:
            return reached.output, part.carried
        finally:
            self.part = None
        if part.leave:
            raise PrepareError(
                f"the forward ended without calling {self.units[part.stop - 1]}, behind which the model is cut: name "
                "other split_points"
            )
        if part.start and not part.passed:
            raise PrepareError(
                f"the forward did not call {self.units[part.start - 1]}, behind which the model is cut: name other "
                "split_points"
            )
        return output

    def _call_unit(self, number: int, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part = self.part
        if part is None:
            raise RuntimeError(
                f"{self.units[number]} was called outside of the pipeline: call the model that prepare returned"
            )
        if number < part.start:
            return self._former(part, number)
        if number >= part.stop:
            raise PrepareError(
                f"{self.units[number]} computes before {self.units[part.stop - 1]}, but is registered behind it: "
                f'say placement={{"{self.units[number]}": "first"}}, or name other split_points'
            )
        # A part without a start of its own begins where the model does.
        output = inner(*args, **kwargs) if self.recompute is None else self.recompute(inner, args, kwargs)
        if part.record:
            part.seen.setdefault(number, []).append(describe(output, f"the output of {self.units[number]}"))
        if part.leave and number == part.stop - 1:
            raise Reached(output)
        return output

    def _former(self, part: Part, number: int) -> Any:
        """What a unit before the part gives: what was received from the last of them, stand-ins from the others."""
        if part.passed:
            raise PrepareError(
                f"{self.units[number]} computes behind {self.units[part.start - 1]}, on a later stage than its own: "
                f'say placement={{"{self.units[number]}": "last"}}, or name other split_points'
            )
        if number == part.start - 1:
            part.passed = True
            assert part.received is not None
            return part.received[0]
        call = part.calls.get(number, 0)
        part.calls[number] = call + 1
        known = part.seen.get(number, ())
        if call >= len(known):
            raise PrepareError(
                f"{self.units[number]} was called more often than on its own stage: a forward that takes other ways "
                "on other ranks cannot be cut"
            )
        return trees.map_leaves(functools.partial(self._stand_in, nan=part.nan), known[call], is_spec)

    def _call_carried(
        self, name: str, last: int, compute: Outer, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module of which later stages get what it gave: computed where its last unit is, received behind that."""
        part = self.part
        if part is None:
            return compute(inner, args, kwargs)
        before = part.carried.get(name, [])
        if part.start > last + 1:
            assert part.received is not None
            arrived = part.received[1].get(name, [])
            if len(before) >= len(arrived):
                raise PrepareError(f"{name} was called more often than on its own stage")
            output = arrived[len(before)]
        else:
            output = compute(inner, args, kwargs)
        part.carried[name] = [*before, output]
        return output

    def _stand_in(self, spec: Spec, nan: bool) -> torch.Tensor:
        found = self._stand_ins.get((spec, nan))
        if found is None:
            if len(self._stand_ins) >= _KEPT_STAND_INS:
                self._stand_ins.clear()
            found = self._stand_ins[spec, nan] = spec.stand_in(self.device, nan)
        return found


_INTERCEPTING: dict[type[nn.Module], type[nn.Module]] = {}


def _intercepting(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a class whose instances ask before they compute; equal classes stay equal."""
    if kind in _INTERCEPTING:
        return _INTERCEPTING[kind]

    class Intercepted(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__["_pipeline_call"](super().__call__, args, kwargs)

    Intercepted.__name__, Intercepted.__qualname__ = kind.__name__, kind.__qualname__
    Intercepted.__module__ = kind.__module__
    _INTERCEPTING[kind] = Intercepted
    return Intercepted


def intercept(module: nn.Module, call: Outer) -> None:
    """Have `module(...)` run `call(its own call, args, kwargs)`. It stays what it is: a subclass of its class."""
    module.__class__ = _intercepting(type(module))
    module.__dict__["_pipeline_call"] = call


def _call_inner(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return inner(*args, **kwargs)


def _plain_call(model: nn.Module, kind: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """The model's call as it was before it was intercepted."""
    return kind.__call__(model, *args, **kwargs)


def _call_with_loss(
    forward: Inner, loss_fn: Callable[[Any, Any], torch.Tensor], *args: Any, labels: Any = None, **kwargs: Any
) -> Any:
    output = forward(*args, **kwargs)
    return output if labels is None else (loss_fn(output, labels), output)


def owned_tensors(model: nn.Module, units: Sequence[str]) -> dict[int, set[int]]:
    """id of a parameter -> the numbers of the units that hold it; of none: 0, where the model begins."""
    holders: dict[int, set[int]] = {}
    for number, name in enumerate(units):
        for parameter in model.get_submodule(name).parameters():
            holders.setdefault(id(parameter), set()).add(number)
    for parameter in model.parameters():
        holders.setdefault(id(parameter), {0})
    return holders


def drop_foreign(model: nn.Module, held: Callable[[nn.Parameter], bool], absent: Sequence[nn.Module]) -> None:
    """Take the parameters that are not held out of a model, and the buffers of modules that are absent.

    Attributes of the same shape and dtype, without memory, stay in their places.
    """
    without_buffers = {id(inner) for module in absent for inner in module.modules()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not held(parameter):
                del module._parameters[name]
                module.__dict__[name] = _placeholder(parameter)
        if id(module) in without_buffers:
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    del module._buffers[name]
                    module._non_persistent_buffers_set.discard(name)
                    module.__dict__[name] = _placeholder(buffer)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    return Spec(tuple(tensor.shape), tensor.dtype).stand_in(torch.device("cpu"))


def placeholders_to(model: nn.Module, device: torch.device) -> None:
    """Put what stands in for foreign tensors on the device that the stage computes on."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, torch.Tensor) and value.device != device:
                module.__dict__[name] = Spec(tuple(value.shape), value.dtype).stand_in(device)


def depends_on_stand_ins(output: Any) -> bool:
    """Whether some tensor of `output` holds NaN."""
    return any(bool(torch.isnan(tensor).any()) for tensor in trees.leaves(output) if tensor.dtype.is_floating_point)
