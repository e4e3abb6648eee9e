# SPDX-License-Identifier: Apache-2.0
"""One training step of the prepared model on fake tensors, as one rank of a process group that sends nothing."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..accelerator import Accelerator
from ..config import launch_file
from ..config.launch_settings import resolve_settings
from ..core import env
from ..core.errors import AccelerateError, PrepareError
from ..core.trees import leaves
from ..launchers.plan import variables
from ..parallel.accumulated import AccumulatedGradients
from ..parallel.adopted.strategy import Adopted
from ..parallel.base import Strategy
from ..parallel.context.attention import ContextAttention
from ..parallel.matrices import shared_step_of
from ..precision.base import Precision
from ..run.first_step import FirstStepCheck
from ..torch_internals import pipelining, tracing
from .experts import UNEVEN, Routing, describe_all_ranks, shard_as_loaded
from .layouts import PlannedLayout
from .ledger import GRADIENTS, KINDS, MESSAGES, OPTIMIZER, WEIGHTS, Ledger, Work, fake_copy
from .model import BatchShape, fake_batch, loss_of

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    # Beside Muon for the matrices.
    "muon": (torch.optim.AdamW, {}),
}
# Of DDP, for models that are larger: the first bucket is smaller, to start earlier.
_BUCKET = 25 << 20
# A process that traces one layout must end in this time (seconds).
_LIMIT = 1800.0


@dataclass
class Step:
    """What a step of one layout needs on one rank.

    Fields:
        memory: bytes by kind at the peak.
        work: of the batches before the last one of an accumulation window, and of the last one with the optimizer's
            step.
        waiting: the part of the time of `work` that a rank waits for other stages in addition.
        uneven: half-width of the interval in which the memory of ranks with different numbers of tokens lies, as a
            fraction.
        failure: why the layout has no estimate; None if it has one.
        defect: the traceback of a failure that is neither a refusal nor the model's: one of this package.
    """

    memory: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    work: tuple[Work, Work] = field(default_factory=lambda: (Work(), Work()))
    waiting: float = 0.0
    uneven: float = 0.0
    failure: str | None = None
    defect: str | None = None

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PlannedTraining:
    """What is trained, on any layout.

    Fields:
        model: on the meta device.
        batch: of an optimizer step, on all ranks together.
        precision: as `mixed_precision`.
        optimizer: a name of `OPTIMIZERS`.
        device: the device type of the run.
        machines: over which the ranks are divided.
    """

    model: nn.Module
    batch: BatchShape
    precision: str = "no"
    optimizer: str = "adamw"
    device: str = "cpu"
    machines: int = 1

    def configuration(self, layout: PlannedLayout) -> dict[str, Any]:
        """The configuration file of a layout."""
        return layout.configuration(
            self.model, self.precision, self.device, self.machines, self.batch.length
        )


def trace_all(
    training: PlannedTraining, layouts: Iterable[PlannedLayout], processes: int = 1
) -> Iterator[tuple[PlannedLayout, Step]]:
    """Trace each layout in a separate process (a pipeline in one a stage), `processes` at a time; in their order.

    The processes are forks of a fresh interpreter that has imported what they need. A fork of this process would have
    the threads of its autograd, which torch refuses from version 2.14 on.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__, type(training.model).__module__])
    waiting = list(layouts)
    running = list[tuple[PlannedLayout, dict[Connection, Any]]]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    layout = waiting.pop(0)
                    running.append((layout, {}))
                    for stage in range(layout.pipeline_ranks):
                        receiver, sender = context.Pipe(duplex=False)
                        path = str(Path(folder) / f"{len(waiting)}")
                        child = context.Process(
                            target=_in_child,
                            args=(training, layout, sender, stage, path),
                            daemon=True,
                        )
                        child.start()
                        sender.close()
                        running[-1][1][receiver] = child
                layout, children = running[0]
                step = _received_from_all(children, layout)
                running.pop(0)
                yield layout, step
        finally:
            for _, children in running:
                for child in children.values():
                    child.kill()


def _received_from_all(children: Mapping[Connection, Any], layout: PlannedLayout) -> Step:
    """The step of the rank that needs most; of a pipeline, with the work of the stage that computes most."""
    steps = list[Step]()
    left = dict(children)
    while left:
        ready: Any = wait(list(left), _LIMIT)
        if not ready:
            step = _defect(f"the trace did not end in {_LIMIT:g} s")
        for receiver in ready:
            child = left.pop(receiver)
            try:
                step = receiver.recv()
            except EOFError:
                child.join()
                step = _defect(f"the trace process ended with code {child.exitcode}")
            steps.append(step)
        if step.failure is not None:
            # The other stages wait for this one.
            for child in left.values():
                child.kill()
            return step
    largest = max(steps, key=lambda step: step.total)
    computed = []
    for step in steps:
        flops = sum(step.work[-1].flops.values())
        computed.append(max(1, flops))
    most = max(computed)
    # The busiest stage waits until the first micro-batch has reached it and the last one has left the others: for
    # equal stages, (stages - 1) / micro-batches, and less with several stages on each rank.
    waiting = (sum(computed) / most - 1) / (layout.microbatches * layout.stages_per_rank)
    return replace(largest, work=steps[computed.index(most)].work, waiting=waiting)


def _defect(what: str, details: str | None = None) -> Step:
    return Step(failure=f"a bug in accelerate plan: {what}", defect=details or what)


def _in_child(
    training: PlannedTraining,
    layout: PlannedLayout,
    sender: Connection,
    stage: int = 0,
    path: str = "",
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    # Warnings about fake tensors, or of a run in this layout, do not concern a plan; torch logs an error that is
    # caught here.
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    try:
        step = trace_step(training, layout, stage, path)
    except AccelerateError as error:
        step = Step(failure=str(error))
    except Exception as error:
        step = _failed(error)
    sender.send(step)
    sender.close()


def trace_step(
    training: PlannedTraining, layout: PlannedLayout, stage: int = 0, path: str = ""
) -> Step:
    """Prepare the model and run optimizer steps of it, as the first rank; all but the first are measured.

    Of a pipeline it is the first rank of a stage, which exchanges objects with the others through the file `path`. It
    changes the environment and the state of this process: call it in a separate process.
    """
    batch = training.batch.of_rank(layout)
    # More batches than two in a window have the memory of two.
    micro = min(layout.accumulation, 2)
    configuration = training.configuration(layout)
    variables = {**launch_variables(configuration), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": micro}
    env.publish(variables)
    if not layout.replicated and layout.ranks > 1:
        # It sends nothing.
        rank = stage * (layout.ranks // layout.pipeline_ranks)
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks)
    mode = tracing.fake_mode()
    ledger = Ledger(fake=True)
    routing = Routing()
    with mode, ledger:
        model = fake_copy(training.model).train()
        if layout.loading:
            model = shard_as_loaded(model, dict(layout.loading), routing)
    accelerator = _accelerator_of(training, layout, model, path)
    blocks = contextlib.ExitStack()
    if layout.pipeline_ranks > 1 and layout.schedule != "gpipe":
        blocks.enter_context(pipelining.static_shapes())
    # The tokens of this rank's experts, as a multiple of those of other ranks; the first step is not measured.
    loads = [1.0, 1.0]
    if layout.loading:
        loads.append(UNEVEN)
    # An allocator rounds blocks up to so many bytes.
    granularity = 512
    if training.device == "cpu":
        granularity = 64
    peaks = list[dict[str, int]]()
    works = list[Work]()
    with blocks, mode, ledger:
        model, *optimizers = accelerator.prepare(model, *_optimizers_of(training, model))
        ledger.label([*model.parameters(), *model.buffers()], WEIGHTS)
        for load in loads:
            routing.load = load
            start = ledger.mark()
            for _ in range(micro):
                with ledger.fresh_work() as work:
                    inputs = fake_batch(model, batch)
                    _batch(accelerator, model, optimizers, inputs, ledger)
                    works.append(work)
            peaks.append(ledger.peak(start, granularity))
    memory = peaks[1]
    first = works[micro]
    last = works[2 * micro - 1]
    even = sum(memory.values())
    uneven = sum(peaks[-1].values())
    if layout.replicated:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buckets = sum(parameter.nbytes for parameter in trained)
        memory[MESSAGES] += buckets
        messages = max(1, round(buckets / _BUCKET))
        last.send("all-reduce", layout.ranks, min(_BUCKET, buckets), messages)
    spread = 0.0
    if uneven > even:
        spread = (uneven - even) / (uneven + even)
        memory = {kind: (size + peaks[-1][kind]) // 2 for kind, size in memory.items()}
    return Step(memory, (first, last), uneven=spread)


def _optimizers_of(training: PlannedTraining, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizer by its name. With Muon, matrices apart from embeddings have an optimizer of their own."""
    kind, options = OPTIMIZERS[training.optimizer]
    # torch's default is one operation for all parameters on an accelerator, with its temporary tensors.
    options = {"lr": 1e-3, "foreach": training.device != "cpu", **options}
    if training.optimizer != "muon":
        return [kind(model.parameters(), **options)]
    embeddings = set[int]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
    matrices = []
    others = []
    for parameter in model.parameters():
        if parameter.ndim == 2 and id(parameter) not in embeddings:
            matrices.append(parameter)
        else:
            others.append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=1e-3))
    if others:
        optimizers.append(kind(others, **options))
    return optimizers


def _accelerator_of(
    training: PlannedTraining, layout: PlannedLayout, model: nn.Module, path: str
) -> Accelerator:
    """The accelerator of a trace, whose ranks know of each other without messages.

    The step of a replica is that of a single process, with the messages that DDP adds.
    """

    def adopt(device: torch.device, precision: Precision) -> Strategy:
        return Adopted(device, precision, [model], describe_all_ranks)

    strategy = adopt if layout.loading else None
    accelerator = Accelerator(cpu=True, device_placement=False, strategy=strategy)
    # They look at values, which do not exist here.
    FirstStepCheck.close_all()
    if layout.pipeline_ranks > 1:
        from .stages import trace_as_stage

        trace_as_stage(accelerator.strategy, training.model, path)
    sequence = accelerator.strategy.sequence
    if sequence is not None:
        # The states of random generators have no values either: none is seeded.
        sequence.random.kinds = ()
        if isinstance(sequence.attention, ContextAttention):
            # torch's causal bias is no fake tensor. Its kernels store no mask.
            sequence.attention.causal_mask = lambda rows, keys: None
    return accelerator


def launch_variables(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that `accelerate launch` gives the processes of a configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = launch_file.write(Path(folder) / "plan.yaml", dict(configuration))
        return variables(resolve_settings({}, launch_file.read(path)))


def _batch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Iterable[Any],
    batch: dict[str, Any],
    ledger: Ledger,
) -> None:
    tensors = [
        value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 1
    ]
    split = accelerator.maybe_context_parallel(tensors, [1] * len(tensors), set(tensors))
    sequence = accelerator.strategy.sequence
    with accelerator.accumulate(model), split:
        loss = loss_of(model(**batch))
        if sequence is not None and not sequence.communication_volume(1):
            raise PrepareError(f"none of the model's attention goes through {sequence.layout}")
        accelerator.backward(loss)
        del loss
        parameters = {id(parameter) for parameter in model.parameters()}
        ledger.label(AccumulatedGradients(model).of_parameters(parameters), GRADIENTS)
        for optimizer in optimizers:
            optimizer.step()
            states = list(optimizer.state.values())
            shared = shared_step_of(optimizer.optimizer)
            if shared is not None:
                states += [matrix.state for matrix in shared.matrices()]
            ledger.label(leaves(states), OPTIMIZER)
            optimizer.zero_grad()


def _failed(error: BaseException) -> Step:
    """Where in the model a trace has ended, and why; a defect where the last line that is no operation is ours."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    where = ""
    is_ours = True
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        name = str(frame.f_globals.get("__name__"))
        # The operations of the model pass through `tracing`.
        if name.startswith("accelerate.") and name != tracing.__name__:
            is_ours = True
        elif isinstance(module, nn.Module) and not name.startswith("torch."):
            where = f"{type(module).__name__} ({frame.f_code.co_filename}:{line})"
            is_ours = False
        elif isinstance(module, nn.Module) and frame.f_code.co_name == "forward":
            is_ours = False
    if isinstance(error, tracing.NEEDS_VALUES) and where:
        return Step(
            failure=f"{where} needs real data: {error}. Compute it without .item(), .tolist() or boolean indexing"
        )
    if is_ours:
        return _defect(text, "".join(traceback.format_exception(error)))
    return Step(failure=f"{where or 'the model'}: {text}")
