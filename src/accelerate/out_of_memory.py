# SPDX-License-Identifier: Apache-2.0
"""Explains an out-of-memory error: what a step needs, and the smallest change with which a traced step fits.

Nothing is done in a step. An error is seen where it ends the process, leaves `Accelerator.backward`, or ends an
attempt of `find_executable_batch_size`, and is never changed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from .core import memory, system
from .core.trees import map_leaves
from .parallel.prepared import PreparedModel
from .parallel.report import memory as kinds
from .precision.base import Precision
from .run_objects import RunObjects

# A step that fits leaves so much of the memory free.
_USABLE = 0.95
_MOST_BATCHES = 64
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
    lines = [f"out of memory: {_first_line(error)}", f"  the model: {listed}"]
    found = next(_calls(error.__traceback__, objects.models), None)
    sharded = [one for one in objects.models if one.is_partial] if found is None else [found[0]]
    if sharded and sharded[0].is_partial:
        return "\n".join([*lines, *_of_sharded(sharded[0], usage, kept, limit)])
    if found is None:
        return "\n".join([*lines, "  the inputs of the model are not known here: no change was tried"])
    prepared, inputs = found
    step = _Step(prepared.inner, inputs, precision)
    needed = kept + step.activations()
    lines.append(
        f"  this step, traced: activations {explain.size_of(needed - kept)}, together {explain.size_of(needed)} of "
        f"{explain.size_of(limit)}"
    )
    if needed <= limit * _USABLE:
        lines.append(
            "  it fits by itself: something else in the process uses memory, or there are gaps between blocks"
        )
        limit = needed
    change = next(_changes(step, usage, kept, limit * _USABLE), None)
    if change is None:
        change = (
            f"no smaller batch fits, with or without recomputed activations: {_largest(usage)} need to be sharded. "
            "`accelerate plan` traces tensor parallelism, pipelines and experts on different ranks, not tried here"
        )
    return "\n".join([*lines, f"  smallest change that fits: {change}"])


def _of_sharded(prepared: PreparedModel, usage: Mapping[str, int], kept: int, limit: int) -> Iterator[str]:
    """What is known of a model of which this rank has a part: its step cannot be traced by one rank."""
    from .parallel.report import explain

    together = f"{explain.size_of(kept)} of {explain.size_of(limit)}"
    if kept > limit * _USABLE:
        yield f"  without activations it has {together} already: {_largest(usage)} need more ranks"
    else:
        yield f"  without activations it has {together}"
    yield f"  {prepared.less_memory()}"
    yield "  activations were not traced here, and no change was tried: `accelerate plan` traces them for each layout"


def _largest(usage: Mapping[str, int]) -> str:
    return max(usage, key=lambda name: usage[name])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def memory_limit(kept: int) -> int:
    """Bytes for the tensors of this process: of its device, or of the host less what is no tensor."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.mem_get_info()[1])
    available = system.available_memory()
    limits = [] if available is None else [available + kept]
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - psutil.Process().memory_info().vms + kept)
    return max(kept, min(limits, default=kept))


def _changes(step: _Step, usage: Mapping[str, int], kept: int, limit: float) -> Iterator[str]:
    """Changes that fit, the smallest first."""
    from .parallel.report import explain

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    smaller = 2
    while smaller <= min(_MOST_BATCHES, step.samples):
        needed = kept + step.activations(smaller)
        if needed <= limit:
            yield (
                f"batches of {-(-step.samples // smaller)} instead of {step.samples}, with "
                f"gradient_accumulation_steps x{smaller}: {explain.size_of(needed)}"
            )
            break
        smaller *= 2
    blocks = step.blocks()
    if blocks:
        needed = kept + step.activations(checkpointing=True)
        if needed <= limit:
            yield f"recompute the activations of {blocks} blocks (activation_checkpointing): {explain.size_of(needed)}"
    if ranks > 1:
        # Gathered for the computation: the largest block, and the next one.
        needed = kept // ranks + step.activations() + 2 * step.largest_block()
        if needed <= limit:
            yield f"shard the model over the {ranks} ranks (FSDP): {explain.size_of(needed)}"


class _Step:
    """Forward and backward of a model with given inputs, on fake tensors.

    Args:
        model: a plain module.
        inputs: (positional, named) arguments of its forward.
        precision: of the run.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Any, Any], precision: Precision) -> None:
        self.model = model
        self._inputs = inputs
        self._precision = precision
        first = Counter(tensor.shape[0] for tensor in kinds.tensors_in(list(_values(inputs))) if tensor.dim())
        self.samples: int = first.most_common(1)[0][0] if first else 1

    def blocks(self) -> int:
        """The number of blocks that the model names."""
        return len(self._blocks(self.model))

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        names = set(getattr(model, "_no_split_modules", None) or ())
        return [module for module in model.modules() if type(module).__name__ in names]

    def largest_block(self) -> int:
        """Bytes of the parameters of the largest block; of the model if it names none."""
        found = self._blocks(self.model) or [self.model]
        return max(kinds.local_bytes(block.parameters()) for block in found)

    def activations(self, smaller: int = 1, checkpointing: bool = False) -> int:
        """Bytes at the peak besides weights and gradients, with a batch that is so many times smaller."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        from .parallel.activation import checkpoint_activations
        from .parallel.report.ledger import ACTIVATIONS, GRADIENTS, WEIGHTS, Ledger, fake_copy, loss_of

        ledger = Ledger(fake=True)
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            model = fake_copy(self.model).train()
            # The copy of a wrapped forward would call the original model.
            vars(model).pop("forward", None)
            if checkpointing:
                checkpoint_activations(model, self._blocks(model), torch.device("cpu"))
            ledger.label([*model.parameters(), *model.buffers()], WEIGHTS)
            args, kwargs = (self._shrunk(value, smaller) for value in self._inputs)
            # Not on the device type of the run: the trace is on the CPU.
            dtype = torch.get_autocast_dtype("cpu")
            with torch.autocast("cpu", dtype, enabled=self._precision.computes_in in ("bfloat16", "float16")):
                loss = loss_of(model(*args, **kwargs))
            loss.backward()
            ledger.label([p.grad for p in model.parameters() if p.grad is not None], GRADIENTS)
        return ledger.peak()[ACTIVATIONS]

    def _shrunk(self, value: Any, smaller: int) -> Any:
        def shrink(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == self.samples:
                shape[0] = -(-shape[0] // smaller)
            return torch.zeros(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)

        return map_leaves(shrink, value)


def _values(inputs: tuple[Any, Any]) -> Iterator[Any]:
    args, kwargs = inputs
    yield from args
    yield from kwargs.values()


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
        names = list(inspect.signature(prepared.inner.forward).parameters)
        for frame in frames:
            for value in list(frame.f_locals.values()):
                if isinstance(value, Mapping) and value and set(value) <= set(names) and kinds.tensors_in(dict(value)):
                    yield prepared, ((), dict(value))
