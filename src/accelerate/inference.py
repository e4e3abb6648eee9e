# SPDX-License-Identifier: Apache-2.0
"""Pipelined inference: a model cut into one stage a process, through which the parts of a batch flow.

Source: `torch.distributed.pipelining` (the tracer, GPipe's order).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .collectives.objects import broadcast_object_list
from .collectives.padding import pad_input_tensors
from .core import trees
from .core.errors import PrepareError
from .parallel.pipeline.split import balance, check_names, find_units
from .state import PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """`model`, its forward run by all processes: each has one stage, a batch flows through in `num_chunks` parts.

    Args:
        split_points: names of the modules at which the second and each later stage begins, one fewer than processes;
            "auto" balances the stages by the bytes of their parameters.
        no_split_module_classes: classes of modules that "auto" keeps whole.
        example_args, example_kwargs: a whole batch of the shapes that will be used; the model is traced with it.
        num_chunks: parts of a batch; None: as many as processes. A batch that does not divide is padded.
        gather_output: every process gets the output; otherwise the last one does, the others get None.

    Every process calls it, and later the model, with the same inputs. The forward takes batches of the example's size
    and shapes. On one process the model is handed back as it is. Raises PrepareError for split points that do not fit.
    """
    state = PartialState()
    model.eval()
    chunks = num_chunks or state.num_processes
    if chunks < 1:
        raise PrepareError(f"num_chunks={num_chunks} must be at least 1")
    if not state.use_distributed:
        return model
    kwargs = dict(example_kwargs or {})
    batch = trees.ignorant_find_batch_size((example_args, kwargs))
    if batch is None:
        raise PrepareError("prepare_pippy traces the model: give example_args or example_kwargs, a batch of tensors")
    points = _split_points(model, split_points, no_split_module_classes or (), state.num_processes)
    runner = _Runner(model, points, example_args, kwargs, batch, chunks, gather_output)

    # The user's module keeps its class, configuration and names; only what runs is another.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return runner(args, kwargs)

    model.forward = MethodType(forward, model)
    model.hf_split_points = points  # type: ignore[assignment]
    return model


class _Runner:
    """One process's stage of the model and the order in which the parts of a batch pass through."""

    def __init__(
        self,
        model: nn.Module,
        points: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        chunks: int,
        gather: bool,
    ) -> None:
        # Both take long to import: who runs no pipeline does not wait for them.
        from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

        self.state, self.batch, self.chunks, self.gather = PartialState(), batch, chunks, gather
        self.signature = inspect.signature(model.forward)
        named = pad_input_tensors(self._by_name(args, kwargs), batch, chunks)
        part = trees.slice_tensors(named, slice(0, -(-batch // chunks)))
        spec = dict.fromkeys(points, SplitPoint.BEGINNING)
        with torch.no_grad():
            self.shape = _shape_of_output(model, part)
            pipe = pipeline(model, mb_args=(), mb_kwargs=part, split_spec=spec)
        stage = pipe.build_stage(self.state.process_index, self.state.device)
        # A stage takes those inputs of the model that it uses itself; the rest of what it needs comes from the former.
        self.taken = frozenset(inspect.signature(stage.submod.forward).parameters)
        if not stage.is_first:
            _take_inputs_of_the_model(stage)
        self.schedule = ScheduleGPipe(stage, chunks)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The inputs by the names of the forward's parameters: only so can a stage other than the first get one."""
        found: dict[str, Any] = {}
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL and value:
                raise PrepareError(f"the forward takes *{name}: a pipeline needs inputs that have names")
            found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return found

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = trees.find_batch_size((args, kwargs))
        if batch is None or -(-batch // self.chunks) != -(-self.batch // self.chunks):
            raise ValueError(
                f"the model was traced with batches of {self.batch} in {self.chunks} chunks and was given one of "
                f"{batch}: use that size, or prepare the model again"
            )
        state = self.state
        with torch.no_grad():
            named = {name: value for name, value in self._by_name(args, kwargs).items() if name in self.taken}
            named = trees.send_to_device(pad_input_tensors(named, batch, self.chunks), state.device)
            output = self.schedule.step(**named)
        if state.is_last_process:
            output = self.shape.fill(trees.slice_tensors(output, slice(0, batch)))
        elif not self.gather:
            return None
        if self.gather:
            carried = [trees.send_to_device(output, "cpu") if state.is_last_process else None]
            broadcast_object_list(carried, from_process=state.num_processes - 1)
            output = trees.send_to_device(carried[0], state.device)
        return output


def _take_inputs_of_the_model(stage: Any) -> None:
    """Let a traced stage after the first take inputs of the model beside what the former stage sends it.

    In torch 2.13 such a stage refuses the model's inputs among what it receives, and binds the rest by position
    although the inputs may stand before it.
    """
    receive, run = stage._retrieve_recv_activations, stage.forward_maybe_with_nosync
    parameters = list(inspect.signature(stage.submod.forward).parameters)

    def receive_only_what_is_sent(chunk: int) -> Any:
        everything = stage.args_recv_info[chunk]
        stage.args_recv_info[chunk] = tuple(info for info in everything if not info.is_root_arg)
        try:
            return receive(chunk)
        finally:
            stage.args_recv_info[chunk] = everything

    def run_by_name(*received: Any, **inputs: Any) -> Any:
        names = [name for name in parameters if name not in inputs]
        return run(**dict(zip(names, received, strict=True)), **inputs)

    stage._retrieve_recv_activations = receive_only_what_is_sent
    stage.forward_maybe_with_nosync = run_by_name


class _Shape:
    """The containers that a forward returns; a pipeline hands out the tensors in them alone."""

    def __init__(self, output: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(output)
        self.none = [leaf is None for leaf in leaves]

    def fill(self, tensors: Any) -> Any:
        flat = iter(tensors if isinstance(tensors, (tuple, list)) else (tensors,))
        return pytree.tree_unflatten([None if none else next(flat) for none in self.none], self.spec)


def _shape_of_output(model: nn.Module, inputs: dict[str, Any]) -> _Shape:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Tensors without content: nothing is computed to find it out.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return _Shape(model(**trees.map_leaves(mode.from_tensor, inputs)))


def _split_points(model: nn.Module, asked: str | Sequence[str], whole: Sequence[str], stages: int) -> list[str]:
    """The names of the modules at which stages 2, 3, ... begin."""
    if asked == "auto":
        units = find_units(model, whole, nested=True)
        if len(units) < stages:
            raise PrepareError(
                f"the model has {len(units)} parts to cut between and there are {stages} processes: name split_points,"
                " or start fewer processes"
            )
        return [units[place].name for place in balance([unit.size for unit in units], stages)]
    points = [asked] if isinstance(asked, str) else list(asked)
    check_names(model, points)
    if len(points) != stages - 1:
        raise PrepareError(f"{len(points)} split points make {len(points) + 1} stages; there are {stages} processes")
    return points
