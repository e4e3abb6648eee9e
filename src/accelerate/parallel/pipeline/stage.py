# SPDX-License-Identifier: Apache-2.0
"""A model's own forward, run for a segment of its units: inputs from other stages are received, the rest is left out.

No tracer is needed. Every rank keeps all modules of the model and runs the user's forward with the same inputs; the
units of other stages have no parameters. Called before the stage's own units, they return remote tensors of the right
shapes (`remote_tensor`), whose use is an error; the last of them returns what was received. When the stage's last unit
has computed, the forward is left. Masks, positions and whatever else the forward makes from its inputs are made on
each stage. Only what one block passes to the next is sent, and the outputs of `carried` modules, which more than the
next block uses (an encoder's output).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...core import trees
from ...core.errors import PrepareError
from .p2p import TensorSpec, describe, is_spec
from .remote_tensor import Origin, RemoteTensor, RemoteTensorError, StageContext, first_remote

Args = tuple[object, ...]
Kwargs = dict[str, object]
Forward = Callable[..., object]
# Runs in place of a module's call: takes that call and its arguments.
Interceptor = Callable[[Forward, Args, Kwargs], object]


class OrderError(PrepareError):
    """A forward calls its units in another order than it was cut for. The caller adds the remedy."""


class SegmentEnd(BaseException):
    """The last unit of a segment has computed: leaves the forward with its output. Caught in `StagedModel`."""

    def __init__(self, output: object) -> None:
        self.output = output


@dataclass
class Segment:
    """Units [start, stop) of a forward, and what they need from the others.

    Fields:
        received: the output of unit start - 1, and those of the carried modules before it.
        unit_outputs: the described outputs of the units before, by unit, call by call. With `record`, those of the
            segment's own units are added.
        leave: whether unit stop - 1 ends the forward, whatever follows.
        grad: whether a backward will follow.
        started: whether unit start - 1 was called.
        calls: how often each unit before was called. carried: outputs of carried modules here, call by call.
    """

    start: int
    stop: int
    received: tuple[object, dict[str, list[object]]] | None = None
    unit_outputs: dict[int, list[object]] = field(default_factory=dict)
    record: bool = False
    leave: bool = False
    grad: bool = False
    started: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    carried: dict[str, list[object]] = field(default_factory=dict)


class StagedModel:
    """A model whose forward can run segment by segment.

    Args:
        model: whose modules are intercepted in place.
        units: names, in the order in which they compute.
        device: of remote tensors.
        loss_fn: computes the loss where the model is called with `labels`.
        carried: name of a unit, or of a module with several -> the number of its last unit.
        bounds: stage s has units[bounds[s]:bounds[s + 1]].
        context: shared with the remote tensors of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        device: torch.device,
        loss_fn: Callable[[object, object], torch.Tensor] | None = None,
        carried: Mapping[str, int] | None = None,
        bounds: Sequence[int] = (),
        context: StageContext | None = None,
    ) -> None:
        self.model = model
        self.units: tuple[str, ...] = tuple(units)
        self.device = device
        self.segment: Segment | None = None
        self.bounds: Sequence[int] = bounds or (0, len(units))
        self.context: StageContext = context or StageContext()
        # Whether the forward runs to observe the order of its units.
        self.observing: bool = False
        # From the inputs of a call that does not fit the cut: a sentence that proposes options.
        self.remedy: Callable[[Args, Kwargs], str] | None = None
        self._origins: dict[int, Origin] = {}
        # What a call of the prepared model runs.
        self.entry: Callable[[Args, Kwargs], object] | None = None
        # Calls units with activation checkpointing.
        self.recompute: Interceptor | None = None
        carried = carried or {}
        for number, name in enumerate(self.units):
            call: Interceptor = functools.partial(self._call_unit, number)
            if name in carried:
                call = functools.partial(self._call_carried, name, number, call)
            intercept(model.get_submodule(name), call)
        for name in set(carried) - set(self.units):
            plain: Interceptor = lambda inner, args, kwargs: inner(*args, **kwargs)  # noqa: E731
            intercept(model.get_submodule(name), functools.partial(self._call_carried, name, carried[name], plain))
        self._forward: Forward = functools.partial(type(model).__call__, model)
        if loss_fn is not None:
            self._forward = functools.partial(_call_with_loss, self._forward, loss_fn)
        intercept(model, self._call_model)

    def _call_model(self, inner: Forward, args: Args, kwargs: Kwargs) -> object:
        if self.entry is None:
            return inner(*args, **kwargs)
        return self.entry(args, kwargs)

    def run(self, segment: Segment, args: Args, kwargs: Kwargs) -> object:
        """Run a segment.

        Returns:
            (output of unit stop - 1, outputs of carried modules), or the model's output where the forward ends.
        """
        self.segment = segment
        self.context.where = f"stage {self._stage_of(segment.start)}"
        try:
            return self._run(segment, args, kwargs)
        except (RemoteTensorError, OrderError) as error:
            if self.remedy is None:
                raise
            self.segment = None
            raise PrepareError(f"{error} {self.remedy(args, kwargs)}") from error
        finally:
            self.segment = None

    def _run(self, segment: Segment, args: Args, kwargs: Kwargs) -> object:
        try:
            output = self._forward(*args, **kwargs)
        except SegmentEnd as end:
            output = end.output, segment.carried
        else:
            if segment.leave:
                raise OrderError(
                    f"The forward ended without calling {self.units[segment.stop - 1]}, behind which the model is cut."
                )
            if segment.start and not segment.started:
                raise OrderError(
                    f"The forward did not call {self.units[segment.start - 1]}, behind which the model is cut."
                )
        if (remote := first_remote(trees.leaves(output))) is not None:
            remote.origin.fail()
        return output

    @contextlib.contextmanager
    def observed(self) -> Iterator[Forward]:
        """A block in which the forward runs all units as if the model was not cut."""
        self.observing = True
        try:
            yield self._forward
        finally:
            self.observing = False

    def _stage_of(self, unit: int) -> int:
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if unit < stop or stop == self.bounds[-1])

    def _call_unit(self, number: int, inner: Forward, args: Args, kwargs: Kwargs) -> object:
        segment = self.segment
        if segment is None:
            if self.observing or torch._C._current_graph_task_id() != -1:
                # The model's own activation checkpointing computes units of this stage again in the backward.
                return inner(*args, **kwargs)
            raise RuntimeError(
                f"{self.units[number]} was called outside of the pipeline: call the model that prepare returned"
            )
        if number < segment.start:
            return self._earlier_unit(segment, number)
        if number >= segment.stop:
            raise OrderError(
                f"{self.units[number]} computes before {self.units[segment.stop - 1]}, on an earlier stage than its "
                "own."
            )
        if segment.grad and not torch.is_grad_enabled():
            self._check_outside_of_functions(number)
        self.context.computing = True
        try:
            output = inner(*args, **kwargs) if self.recompute is None else self.recompute(inner, args, kwargs)
        finally:
            self.context.computing = False
        if segment.record:
            described = describe(output, f"the output of {self.units[number]}")
            segment.unit_outputs.setdefault(number, []).append(described)
        if segment.leave and number == segment.stop - 1:
            raise SegmentEnd(output)
        return output

    def _check_outside_of_functions(self, number: int) -> None:
        """Raise where an autograd function calls a unit: leaving its forward would lose the gradient."""
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

    def _earlier_unit(self, segment: Segment, number: int) -> object:
        """The output of a unit before the segment: of the last one what was received, of others remote tensors."""
        if segment.started:
            raise OrderError(
                f"{self.units[number]} computes behind {self.units[segment.start - 1]}, on a later stage than its own."
            )
        if number == segment.start - 1:
            segment.started = True
            assert segment.received is not None
            return segment.received[0]
        call = segment.calls.get(number, 0)
        segment.calls[number] = call + 1
        known = segment.unit_outputs.get(number, ())
        if call >= len(known):
            raise PrepareError(
                f"{self.units[number]} was called more often than on its own stage: a forward that branches "
                "differently on different ranks cannot be cut"
            )
        origin = self._origins.get(number)
        if origin is None:
            home = f"stage {self._stage_of(number)}"
            origin = self._origins[number] = Origin(f"the output of {self.units[number]}", home, self.context)

        def remote(spec: TensorSpec) -> RemoteTensor:
            return RemoteTensor.of(spec.shape, spec.dtype, self.device, origin)

        return trees.map_leaves(remote, known[call], is_spec)

    def _call_carried(
        self, name: str, last: int, compute: Interceptor, inner: Forward, args: Args, kwargs: Kwargs
    ) -> object:
        """A module whose output is sent to all later stages: computed on the stage of its last unit, else received."""
        segment = self.segment
        if segment is None or self.observing:
            return compute(inner, args, kwargs)
        before = segment.carried.get(name, [])
        if segment.start > last + 1:
            assert segment.received is not None
            received = segment.received[1].get(name, [])
            if len(before) >= len(received):
                raise PrepareError(f"{name} was called more often than on its own stage")
            output = received[len(before)]
        else:
            output = compute(inner, args, kwargs)
        segment.carried[name] = [*before, output]
        return output


_INTERCEPTING: dict[type[nn.Module], type[nn.Module]] = {}


def _intercepting(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose instances call their interceptor."""
    if kind in _INTERCEPTING:
        return _INTERCEPTING[kind]

    class Intercepted(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: object, **kwargs: object) -> object:
            return self.__dict__["_pipeline_call"](super().__call__, args, kwargs)

    Intercepted.__name__, Intercepted.__qualname__ = kind.__name__, kind.__qualname__
    Intercepted.__module__ = kind.__module__
    _INTERCEPTING[kind] = Intercepted
    return Intercepted


def intercept(module: nn.Module, call: Interceptor) -> None:
    """Have `module(...)` run `call(its own call, args, kwargs)`. Its class becomes a subclass, one for each class."""
    module.__class__ = _intercepting(type(module))
    module.__dict__["_pipeline_call"] = call


def _call_with_loss(
    forward: Forward,
    loss_fn: Callable[[object, object], torch.Tensor],
    *args: object,
    labels: object = None,
    **kwargs: object,
) -> object:
    output = forward(*args, **kwargs)
    return output if labels is None else (loss_fn(output, labels), output)
