# SPDX-License-Identifier: Apache-2.0
"""Explains an out-of-memory error: what a step needs, and the smallest change with which a traced step fits.

Nothing is done in a step. An error is seen where it ends the process, leaves `Accelerator.backward`, or ends an
attempt of `find_executable_batch_size`, and is never changed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import nn

from .core import devices, memory, system
from .core.errors import PrepareError
from .core.trees import convert_to_fp32, map_leaves
from .gradient_state import GradientState
from .parallel.prepared import Change, PreparedModel
from .parallel.report import memory as kinds
from .parallel.unwrap import extract_model_from_parallel
from .precision.base import Precision
from .run_objects import RunObjects

# A step that fits leaves so much of the memory free.
_USABLE = 0.95
_MOST_BATCHES = 64
# What is traced is expected to fit, or exceeds the memory by little.
_NEARLY = 0.9
# For all traces of an explanation.
_SECONDS = 20.0
_NO_CHANGE = Change()
# Of the latest run: references to its objects and precision; the hook before ours; whether an error was explained.
_state: dict[str, Any] = {"run": None, "hook": None, "reported": False}


def watch(objects: RunObjects, precision: Precision) -> None:
    """Explain the first out-of-memory error of a run in this process, from its prepared models."""
    _state.update(run=(weakref.ref(objects), weakref.ref(precision)), reported=False)
    if _state["hook"] is None:
        memory.exhausted_hooks.append(_explain)
        _state["hook"] = sys.excepthook
        sys.excepthook = _uncaught


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with contextlib.suppress(Exception):
        memory.report_exhausted(error)
    _state["hook"](kind, error, trace)


def _explain(error: BaseException) -> None:
    objects, precision = (reference() for reference in _state["run"])
    if objects is None or precision is None or not objects.models or _state["reported"]:
        return
    _state["reported"] = True
    try:
        text = report(error, objects, precision)
    except Exception as failure:
        text = f"out of memory; why cannot be explained: {type(failure).__name__}: {failure}"
    print(text, file=sys.stderr, flush=True)


def report(error: BaseException, objects: RunObjects, precision: Precision) -> str:
    """What the step needs by kind, and the smallest change that fits."""
    from .parallel.report import explain

    optimizers = [one.optimizer for one in objects.optimizers]
    usage = explain.memory_usage(objects.models, optimizers, windows=False)
    kept = sum(usage.values())
    if not usage[kinds.STATE] and optimizers:
        # Before the first step; Adam's two moments, unless the optimizer has none.
        moments = 2 if any("betas" in group for one in optimizers for group in one.param_groups) else 0
        usage[kinds.STATE] = moments * usage[kinds.GRADIENTS]
        kept += usage[kinds.STATE]
    limit = memory_limit(kept)
    listed = ", ".join(f"{name} {explain.size_of(size)}" for name, size in usage.items() if size)
    first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    lines = [f"out of memory: {first_line}", f"  the model: {listed}"]
    found = next(_calls(error.__traceback__, objects.models), None)
    partial = next((one for one in objects.models if one.is_partial), None) if found is None else found[0]
    if found is not None:
        step = _Step(*found, precision, usage, kept)
        why = step.cannot_be_traced()
    else:
        why = "the inputs of the model are not known here"
    if why is None:
        lines += _traced(step, usage, limit)
    elif partial is not None:
        lines += _untraced(partial, usage, kept, limit, why)
    else:
        lines.append(f"  {why}: no change was tried")
    return "\n".join(lines)


def _traced(step: _Step, usage: Mapping[str, int], limit: int) -> Iterator[str]:
    """The step's peak, and what makes it smaller."""
    from .parallel.report import explain

    needed = step.needed()
    detail = f"activations {explain.size_of(needed.activations)}"
    if needed.messages:
        detail += f", gathered weights and messages {explain.size_of(needed.messages)}"
    yield f"  this step, traced: {detail}, together {explain.size_of(needed.total)} of {explain.size_of(limit)}"
    if needed.total <= limit * _USABLE:
        yield "  it fits by itself: something else in the process uses memory, or there are gaps between blocks"
        limit = needed.total
    try:
        change = next(_changes(step, limit * _USABLE), None) or _no_change(step.prepared, _largest(usage))
    except TimeoutError:
        change = f"not found in {_SECONDS:g} s. {step.prepared.less_memory()}"
    yield f"  smallest change that fits: {change}"
    for why in dict.fromkeys(step.failures):
        yield f"  a change could not be traced: {why}"


def _no_change(prepared: PreparedModel, largest: str) -> str:
    if prepared.is_partial:
        return f"none of the traced ones: {largest} need more ranks. {prepared.less_memory()}"
    return (
        f"no smaller batch fits, with or without recomputed activations: {largest} need to be sharded. `accelerate "
        "plan` traces tensor parallelism, pipelines and experts on different ranks, not tried here"
    )


def _untraced(prepared: PreparedModel, usage: Mapping[str, int], kept: int, limit: int, why: str) -> Iterator[str]:
    """What is known of a model of which this rank has a part, where its step was not traced."""
    from .parallel.report import explain

    together = f"{explain.size_of(kept)} of {explain.size_of(limit)}"
    if kept > limit * _USABLE:
        yield f"  without activations it has {together} already: {_largest(usage)} need more ranks"
    else:
        yield f"  without activations it has {together}"
    yield f"  {prepared.less_memory()}"
    yield (
        f"  activations were not traced here, and no change was tried ({why}): `accelerate plan` traces them for each "
        "layout"
    )


def _largest(usage: Mapping[str, int]) -> str:
    return max(usage, key=lambda name: usage[name])


def _used_device() -> torch.device | None:
    """The accelerator that this process uses; None for a process on the CPU."""
    kind = devices.accelerator_type()
    if kind is None or not devices.is_initialized(kind):
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def memory_limit(kept: int) -> int:
    """Bytes for the tensors of this process: of its device, or of the host less what is no tensor."""
    device = _used_device()
    if device is not None:
        with contextlib.suppress(RuntimeError):
            return devices.memory_info(device)[1]
    available = system.available_memory()
    limits = [] if available is None else [available + kept]
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - psutil.Process().memory_info().vms + kept)
    return max(kept, min(limits, default=kept))


def _changes(step: _Step, limit: float) -> Iterator[str]:
    """Changes that fit, the smallest first."""
    from .parallel.report import explain

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    yield from _smaller_batches(step, limit)
    changes = step.prepared.traceable_changes()
    for change, text in changes.items():
        needed = step.needed(change=change)
        if needed.total <= limit:
            yield f"{text}: {explain.size_of(needed.total)}"
    if step.prepared.is_partial:
        for change, text in changes.items():
            yield from (f"{text}, and {found}" for found in _smaller_batches(step, limit, change))
    elif ranks > 1:
        # Gathered for the computation: the largest block, and the next one.
        total = step.kept // ranks + step.needed().activations + 2 * step.largest_block()
        if total <= limit:
            yield f"shard the model over the {ranks} ranks (FSDP): {explain.size_of(total)}"


def _smaller_batches(step: _Step, limit: float, change: Change = _NO_CHANGE) -> Iterator[str]:
    """The largest of the smaller batches that fits."""
    from .parallel.report import explain

    smaller = 2
    while smaller <= min(_MOST_BATCHES, step.samples):
        if step.expected(smaller, change) * _NEARLY <= limit:
            needed = step.needed(smaller, change)
            if needed.total <= limit:
                yield (
                    f"batches of {-(-step.samples // smaller)} instead of {step.samples}, with "
                    f"gradient_accumulation_steps x{smaller}: {explain.size_of(needed.total)}"
                )
                return
        smaller *= 2


def _text_of(failure: Exception) -> str:
    kind = "" if isinstance(failure, PrepareError) else f"{type(failure).__name__}: "
    return " ".join(f"{kind}{failure}".split())[:300]


class _Needed(NamedTuple):
    """Bytes at the peak of a step: all of them, and those of activations and of gathered weights and messages."""

    total: int
    activations: int
    messages: int


class _Step:
    """Forward and backward of a model with given inputs, on fake tensors.

    Args:
        prepared: the model.
        inputs: (positional, named) arguments of its forward.
        precision: of the run.
        usage: the memory of the run by kind.
        kept: their sum.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        inputs: tuple[Any, Any],
        precision: Precision,
        usage: Mapping[str, int],
        kept: int,
    ) -> None:
        self.prepared = prepared
        self.kept = kept
        self._inputs = inputs
        self._precision = precision
        self._until = time.monotonic() + _SECONDS
        self._traced: dict[tuple[int, Change], _Needed] = {}
        # Why changes could not be traced.
        self.failures: list[str] = []
        own = prepared.memory_usage(windows=False)
        # What the process has besides parameters, gradients and buffers of the model; the same where its shards, and
        # what the optimizer has for them, are on the host.
        sharded = own[kinds.PARAMETERS] + own[kinds.GRADIENTS]
        self._rest = kept - sharded - kinds.of_buffers([prepared.module])
        self._rest_of_device = kept - sharded - usage[kinds.STATE] - own[kinds.MASTER_WEIGHTS]
        values = [*inputs[0], *inputs[1].values()]
        first = Counter(tensor.shape[0] for tensor in kinds.tensors_in(values) if tensor.dim())
        self.samples: int = first.most_common(1)[0][0] if first else 1

    def largest_block(self) -> int:
        """Bytes of the parameters of the largest block; of the model if it names none."""
        found = self.prepared.blocks() or [self.prepared.inner]
        return max(kinds.local_bytes(block.parameters()) for block in found)

    def cannot_be_traced(self) -> str | None:
        """Why the step of this rank cannot be traced without the others; None if it can be."""
        try:
            self.needed()
        except Exception as failure:
            if not self.prepared.is_partial:
                raise
            return _text_of(failure)
        return None

    def needed(self, smaller: int = 1, change: Change = _NO_CHANGE) -> _Needed:
        """The peak with a batch that is so many times smaller, and with a change.

        Raises:
            Exception: of the first trace; later ones are in `failures`.
            TimeoutError: the time for traces is over.
        """
        state = GradientState()
        if state.sync_each_batch or smaller * state.num_steps == 1:
            change = replace(change, reduce=False)
        key = smaller, change
        if key not in self._traced:
            try:
                self._traced[key] = self._trace(smaller, change)
            except Exception as failure:
                if not self._traced or isinstance(failure, TimeoutError):
                    raise
                self.failures.append(_text_of(failure))
                self._traced[key] = _Needed(sys.maxsize, 0, 0)
        return self._traced[key]

    def expected(self, smaller: int, change: Change) -> float:
        """About `needed`, from the trace with batches of the present size: activations become smaller with them."""
        one, windows = self.needed(change=change), 0
        if not change.reduce and not GradientState().sync_each_batch:
            windows = self.prepared.window_gradients() or 0
        if GradientState().num_steps > 1:
            return one.total - (one.activations - windows) * (1 - 1 / smaller)
        return one.total - one.activations * (1 - 1 / smaller) + windows

    def _trace(self, smaller: int, change: Change) -> _Needed:
        from torch._subclasses.fake_tensor import FakeTensorMode

        from .parallel.report import ledger as report

        ledger = report.Ledger(fake=True, sends=False)
        state = GradientState()
        # More batches than two in a window have the memory of two.
        batches = min(2, smaller * state.num_steps) if self.prepared.is_partial else 1
        backwards, former = self.prepared.traced_backwards(change), list[Any]()
        # Not on the device type of the run: the trace is on the CPU.
        on_cpu = mock.patch.object(self._precision, "device_type", "cpu", create=True)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with _quietly(), on_cpu, fake, self.prepared.tracing(), ledger:
            model = self.prepared.traced_copy(change).train()
            forward = vars(model).get("forward")
            if forward is not None and getattr(forward, "__self__", None) is not model:
                # A forward that is no method of the copy would call the original model.
                del model.forward
            for module in model.modules():
                module.register_forward_pre_hook(self._check_time, prepend=True)
            ledger.label([*model.parameters(), *model.buffers()], report.WEIGHTS)
            start = ledger.mark()
            for batch in range(batches):
                last = batch == batches - 1
                self.prepared.switch_reduction(model, change.reduce or state.sync_each_batch or last)
                for _ in range(backwards if last else 1):
                    self._backward(model, smaller)
                    ledger.label([p.grad for p in model.parameters() if p.grad is not None], report.GRADIENTS)
                if backwards > 1 and not last:
                    # Gradients of a batch whose backwards alternate with forwards are apart from those before.
                    former += [p.grad for p in model.parameters()]
                    model.zero_grad()
        if not self.prepared.is_partial:
            activations = ledger.peak(start)[report.ACTIVATIONS]
            return _Needed(self.kept + activations, activations, 0)
        granularity = 64 if _used_device() is None else 512
        if change.offload or self.prepared.offloads():
            peak = ledger.peak(start, granularity, (report.ACTIVATIONS, report.MESSAGES))
            rest = self._rest_of_device
        else:
            peak, rest = ledger.peak(start, granularity), self._rest
        return _Needed(rest + sum(peak.values()), peak[report.ACTIVATIONS], peak[report.MESSAGES])

    def _check_time(self, *_: object) -> None:
        # In a backward, which computes a block again, an error could end the process.
        if time.monotonic() > self._until and torch._C._current_graph_task_id() == -1:
            raise TimeoutError("the time for traces is over")

    def _backward(self, model: nn.Module, smaller: int) -> None:
        from .parallel.report.ledger import loss_of

        args, kwargs = (self._shrunk(value, smaller) for value in self._inputs)
        wrapped = any({"forward", "_original_forward"} <= vars(module).keys() for module in model.modules())
        lower = self._precision.native_amp and not wrapped
        with torch.autocast("cpu", getattr(self._precision, "dtype", None), enabled=lower):
            outputs = model(*args, **kwargs)
        loss_of(convert_to_fp32(outputs) if lower else outputs).backward()

    def _shrunk(self, value: Any, smaller: int) -> Any:
        def shrink(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == self.samples:
                shape[0] = -(-shape[0] // smaller)
            made = torch.zeros(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            return self.prepared.traced_input(made)

        return map_leaves(shrink, value)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A block without the messages of libraries about fake tensors, which leaves the random states as they are."""
    device = _used_device()
    if device is None or not hasattr(devices.module_of(device), "get_rng_state_all"):
        random = torch.random.fork_rng([])
    else:
        random = torch.random.fork_rng([device.index], device_type=device.type)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings(), random:
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def _calls(
    trace: TracebackType | None, models: list[PreparedModel]
) -> Iterator[tuple[PreparedModel, tuple[Any, Any]]]:
    """(prepared model, arguments of its forward) in the frames of an error: of its call, or of who made it."""
    frames: list[FrameType] = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    outer = frames[0].f_back if frames else None
    while outer is not None:
        frames.append(outer)
        outer = outer.f_back
    for frame in frames:
        found = frame.f_locals
        prepared = next(
            (one for one in models if isinstance(m := found.get("self"), nn.Module) and one.is_of(m)), None
        )
        if prepared is not None and frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
            yield prepared, (found.get("args", ()), found.get("kwargs", {}))
    # A backward has no call of the model: the batch is a local variable of the loop.
    for prepared in models:
        plain = extract_model_from_parallel(prepared.module, keep_torch_compile=False)
        names = list(inspect.signature(plain.forward).parameters)
        for frame in frames:
            for value in list(frame.f_locals.values()):
                if isinstance(value, Mapping) and value and set(value) <= set(names) and kinds.tensors_in(dict(value)):
                    yield prepared, ((), dict(value))
