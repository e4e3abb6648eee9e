# SPDX-License-Identifier: Apache-2.0
"""One model's own forward, run for a part of its units only: what comes before is received, what comes after waits.

No tracer is needed. Every rank keeps all of the model's modules, and runs the user's forward with the same inputs; the
units of other stages have no tensors. Called before the stage's own units, they give tensors of the right shapes that
have no content (`absent`), and whose use is an error; the last of them gives what was received. When the stage's last
unit has computed, the forward is left. Masks, positions and all else that the forward makes from its inputs are made
on each stage, and only what passes from block to block travels; with it what modules gave that are `carried`, since
more than the next block uses it (an encoder's output).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...core import trees
from ...core.errors import PrepareError
from .absent import Absent, AbsentError, Guard, Origin, first_absent

Inner = Callable[..., Any]
# What is called in its place, with it and its arguments.
Outer = Callable[[Inner, tuple[Any, ...], dict[str, Any]], Any]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Spec:
    """A tensor without its content."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def stand_in(self, device: torch.device) -> torch.Tensor:
        """A tensor of one element's memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


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


class OrderError(PrepareError):
    """A forward calls its units in another order than it was cut for. The caller adds what would fit."""


class Reached(BaseException):
    """The last unit of a stage has computed: the forward is left with its output. Never seen outside."""

    def __init__(self, output: Any) -> None:
        self.output = output


@dataclass
class Part:
    """Units [start, stop) of a forward, and what they need from the others.

    `received` is what unit start - 1 gave, and what the carried modules before it did; `seen` what the units before
    gave, by unit, call by call (Specs). With `record` the calls of the own units are added to it. `leave`: unit
    stop - 1 ends the forward, whatever follows. `carried`: what those modules gave here, call by call.
    """

    start: int
    stop: int
    received: tuple[Any, dict[str, list[Any]]] | None = None
    seen: dict[int, list[Any]] = field(default_factory=dict)
    record: bool = False
    leave: bool = False
    # Whether a backward will follow.
    grad: bool = False
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
        bounds: Sequence[int] = (),
        guard: Guard | None = None,
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.device = device
        self.part: Part | None = None
        self.bounds = bounds or (0, len(units))
        # What a tensor asks that is not on this stage.
        self.guard = guard or Guard()
        # Whether the forward runs to see the order of its units, without parts.
        self.observing = False
        # What would make a forward fit that was called in another order than it was cut for: a sentence, from the
        # inputs of a call.
        self.remedy: Callable[[tuple[Any, ...], dict[str, Any]], str] | None = None
        self._origins: dict[int, Origin] = {}
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
        self.guard.where = f"stage {self._stage_of(part.start)}"
        try:
            return self._run(part, args, kwargs)
        except (AbsentError, OrderError) as error:
            if self.remedy is None:
                raise
            self.part = None
            raise PrepareError(f"{error} {self.remedy(args, kwargs)}") from error
        finally:
            self.part = None

    def _run(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            output = self._forward(*args, **kwargs)
        except Reached as reached:
            output = reached.output, part.carried
        else:
            if part.leave:
                raise OrderError(
                    f"The forward ended without calling {self.units[part.stop - 1]}, behind which the model is cut."
                )
            if part.start and not part.passed:
                raise OrderError(
                    f"The forward did not call {self.units[part.start - 1]}, behind which the model is cut."
                )
        if (absent := first_absent(trees.leaves(output))) is not None:
            absent.origin.fail()
        return output

    @contextlib.contextmanager
    def observed(self) -> Iterator[Inner]:
        """In the block, a forward of all units that computes as if nothing was cut, on tensors without content."""
        self.observing = True
        try:
            yield self._forward
        finally:
            self.observing = False

    def _stage_of(self, unit: int) -> int:
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if unit < stop or stop == self.bounds[-1])

    def _call_unit(self, number: int, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part = self.part
        if part is None:
            if self.observing or torch._C._current_graph_task_id() != -1:
                # What the backward computes again (activation checkpointing of the model's own) was this stage's.
                return inner(*args, **kwargs)
            raise RuntimeError(
                f"{self.units[number]} was called outside of the pipeline: call the model that prepare returned"
            )
        if number < part.start:
            return self._former(part, number)
        if number >= part.stop:
            raise OrderError(
                f"{self.units[number]} computes before {self.units[part.stop - 1]}, on an earlier stage than its own."
            )
        if part.grad and not torch.is_grad_enabled():
            self._check_outside_of_functions(number)
        # A part without a start of its own begins where the model does.
        self.guard.computing = True
        try:
            output = inner(*args, **kwargs) if self.recompute is None else self.recompute(inner, args, kwargs)
        finally:
            self.guard.computing = False
        if part.record:
            part.seen.setdefault(number, []).append(describe(output, f"the output of {self.units[number]}"))
        if part.leave and number == part.stop - 1:
            raise Reached(output)
        return output

    def _check_outside_of_functions(self, number: int) -> None:
        """Raise where a unit is called by an autograd function, whose gradient is lost when its forward is left."""
        frame = sys._getframe()
        while frame is not None:
            context = frame.f_locals.get("ctx")
            if isinstance(context, torch.autograd.function.FunctionCtx):
                name = type(context).__name__.removesuffix("Backward")
                raise PrepareError(
                    f"{self.units[number]} is called inside of an autograd function ({name}), which a stage cannot "
                    "leave in its middle: its gradient would be lost. Activation checkpointing takes "
                    "use_reentrant=False; layers with a backward of their own over several blocks (reversible ones) "
                    "cannot be cut."
                )
            frame = frame.f_back  # type: ignore[assignment]

    def _former(self, part: Part, number: int) -> Any:
        """What a unit before the part gives: of the last one what was received, of the others an absent tensor."""
        if part.passed:
            raise OrderError(
                f"{self.units[number]} computes behind {self.units[part.start - 1]}, on a later stage than its own."
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
        origin = self._origins.get(number)
        if origin is None:
            home = f"stage {self._stage_of(number)}"
            origin = self._origins[number] = Origin(f"the output of {self.units[number]}", home, self.guard)

        def absent(spec: Spec) -> Absent:
            return Absent.of(spec.shape, spec.dtype, self.device, origin)

        return trees.map_leaves(absent, known[call], is_spec)

    def _call_carried(
        self, name: str, last: int, compute: Outer, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module of which later stages get what it gave: computed where its last unit is, received behind that."""
        part = self.part
        if part is None or self.observing:
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


def drop_foreign(
    model: nn.Module,
    held: Callable[[nn.Parameter], bool],
    absent: Sequence[nn.Module],
    kept: Collection[int],
    device: torch.device,
    origin: Callable[[str], Origin],
) -> None:
    """Take the parameters that are not held out of a model, and the buffers of absent modules that are not `kept`.

    In their places stand attributes without content, on `device`; `origin` says of a name what they stand for.
    """
    without_buffers = {id(inner) for module in absent for inner in module.modules()}
    dropped: dict[int, Absent] = {}

    def placeholder(tensor: torch.Tensor, name: str) -> Absent:
        if id(tensor) not in dropped:
            dropped[id(tensor)] = Absent.of(tensor.shape, tensor.dtype, device, origin(name))
        return dropped[id(tensor)]

    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not held(parameter):
                del module._parameters[name]
                module.__dict__[name] = placeholder(parameter, path + name)
        for name, buffer in list(module._buffers.items()) if id(module) in without_buffers else ():
            if buffer is not None and id(buffer) not in kept:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                module.__dict__[name] = placeholder(buffer, path + name)


def forget_aliases(model: nn.Module, former: Mapping[int, str], origin: Callable[[str], Origin], device: Any) -> None:
    """Take parameters of other stages, by id, out of plain attributes, lists and dicts of modules (an LSTM's list)."""

    def placeholder(tensor: torch.Tensor) -> Absent:
        return Absent.of(tensor.shape, tensor.dtype, device, origin(former[id(tensor)]))

    def is_former(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) in former

    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if is_former(value):
                module.__dict__[name] = placeholder(value)
            elif type(value) is list and name not in _OF_MODULES:
                value[:] = [placeholder(entry) if is_former(entry) else entry for entry in value]
            elif type(value) is tuple and any(map(is_former, value)):
                module.__dict__[name] = tuple(placeholder(entry) if is_former(entry) else entry for entry in value)
            elif type(value) is dict and name not in _OF_MODULES:
                value.update({key: placeholder(entry) for key, entry in value.items() if is_former(entry)})


# What nn.Module keeps in its own dictionaries.
_OF_MODULES = frozenset(nn.Module().__dict__)


def holds_nan(output: Any) -> bool:
    """Whether some tensor of `output` holds NaN."""
    return any(bool(torch.isnan(tensor).any()) for tensor in trees.leaves(output) if tensor.dtype.is_floating_point)
