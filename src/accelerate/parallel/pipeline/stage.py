# SPDX-License-Identifier: Apache-2.0
"""A model's own forward, run for a segment of its units.

No tracer is needed. Every rank runs the user's forward with the same inputs, on a model in which stand-ins replace the
units of other stages. A stand-in of an earlier unit returns remote tensors of the right shapes; that of the unit just
before the segment returns what was received. When the segment's last unit has computed, a hook leaves the forward.
Masks, positions and whatever else the forward makes from its inputs are made on each stage. Only what one block passes
to the next is sent, and the outputs of `carried` modules, which more than the next block uses (an encoder's output).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core import trees
from ...core.errors import PrepareError
from ...core.modules import class_name, direct_buffers, direct_parameters, direct_tensors
from .buffers import StageBuffers
from .microbatch import Args, Kwargs
from .p2p import describe, fill, is_spec
from .remote_tensor import RemoteTensor, first_remote
from .split import StageSplit


class Stage(nn.Module):
    """The units of one stage as one module, which FSDP2 can shard.

    Fields:
        compute: called with the received tensors.
    """

    compute: Callable[[Sequence[torch.Tensor]], object]

    def __init__(self, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units: nn.ModuleList = nn.ModuleList(units)

    def forward(self, *received: torch.Tensor) -> object:
        """Compute a micro-batch."""
        return self.compute(received)


class SegmentEnd(BaseException):
    """The last unit of a segment has computed: leaves the forward with its output. Caught in `StagedModel.run`."""

    def __init__(self, output: object) -> None:
        self.output = output


@dataclass
class Segment:
    """Units [start, stop) of a forward, and what they need from the others.

    Fields:
        received: the described output of unit start - 1, and those of the carried modules before it.
        unit_outputs: the described outputs of the units before, by unit, call by call.
        recorded: is given those of its own units, if it is not None.
        leave: whether unit stop - 1 ends the forward, whatever follows.
        grad: whether a backward will follow.
        started: whether unit start - 1 was called.
        calls: how often each unit before was called. carried: outputs of carried modules here, call by call.
    """

    start: int
    stop: int
    received: Any = None
    unit_outputs: dict[int, list[object]] = field(default_factory=dict)
    recorded: dict[int, list[object]] | None = None
    leave: bool = False
    grad: bool = False
    started: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    carried: dict[str, list[object]] = field(default_factory=dict)


class StandIn(nn.Module):
    """In the place of a unit that is not computed. It has the unit's attributes, and those parameters that are here.

    Args:
        staged: the model that it belongs to.
        number: of the unit.
        unit: without the memory of other stages' tensors.
    """

    def __init__(self, staged: StagedModel, number: int, unit: nn.Module) -> None:
        super().__init__()
        if number not in staged.own_numbers:
            for name, child in unit.named_children():
                self.add_module(name, child)
            for name, parameter in direct_parameters(unit).items():
                # One place: what replaces the parameter is looked for in the model.
                delattr(unit, name)
                self.register_parameter(name, parameter)
        # Not as a submodule.
        vars(self).update(stand_in_for=unit, staged=staged, number=number)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the unit; a tensor of another stage without its values."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "stand_in_for" not in vars(self):
                raise
            return getattr(vars(self)["stand_in_for"], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return what was received of the unit, or remote tensors."""
        return self.staged.call_earlier(self.number)


class StagedModel:
    """A model whose forward can run segment by segment.

    Args:
        model: in which stand-ins replace all units but those of this rank's stages.
        cut: the stages.
        stages: numbers of this rank's stages, in their order.
        device: of remote tensors.
        carried: name of a unit, or of a module with several -> the number of its last unit.
        shared: ids of parameters of other units that this rank has, too.
        loss_fn: computes the loss where the model is called with `labels`.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: StageSplit,
        stages: Sequence[int],
        device: torch.device,
        carried: Mapping[str, int],
        shared: Collection[int],
        loss_fn: Callable[[object, object], torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        self.cut = cut
        self.units: tuple[str, ...] = cut.units
        self.own_numbers: list[int] = cut.units_of(stages)
        self.device = device
        self.segment: Segment | None = None
        self.carried = carried
        self.forward: Callable[..., object] = model.forward
        if loss_fn is not None:
            self.forward = functools.partial(_call_with_loss, model.forward, loss_fn)
        originals = {number: model.get_submodule(name) for number, name in enumerate(self.units)}
        self.stages: dict[int, Stage] = {}
        for stage in stages:
            self.stages[stage] = Stage([originals[number] for number in cut.units_of([stage])])
        self._drop_tensors(originals, shared)
        self._own_units = {number: originals[number] for number in self.own_numbers}
        self.stand_ins: dict[int, StandIn] = {
            number: StandIn(self, number, original) for number, original in originals.items()
        }
        # Where each unit is registered. Units of this rank stay there, and those of others are replaced for good.
        self._places: dict[int, list[tuple[nn.Module, str]]] = {
            number: [] for number in self.own_numbers
        }
        numbers = {id(original): number for number, original in originals.items()}
        for path, module in list(model.named_modules(remove_duplicate=False)):
            number = numbers.get(id(module))
            if number is None:
                continue
            parent_name, _, name = path.rpartition(".")
            parent = model.get_submodule(parent_name)
            if number in self._places:
                self._places[number].append((parent, name))
            else:
                setattr(parent, name, self.stand_ins[number])

    def _drop_tensors(self, units: Mapping[int, nn.Module], shared: Collection[int]) -> None:
        """Replace the tensors of other stages by remote ones."""
        present = set(shared)
        for number in self.own_numbers:
            present.update(map(id, units[number].parameters()))
        foreign = {number: unit for number, unit in units.items() if number not in self.own_numbers}
        present.update(map(id, present_buffers(self.model, foreign.values())))
        for number, unit in foreign.items():
            for prefix, module in unit.named_modules():
                for name, tensor in direct_tensors(module).items():
                    if id(tensor) in present:
                        continue
                    full_name = f"{self.units[number]}.{prefix}.{name}".replace("..", ".")
                    origin = (
                        f"{full_name}, which only stage {self.cut.stage_of(number)} has. Give "
                        "`example_inputs` (PipelineParallelConfig): prepare then finds "
                        "parameters that are used outside their module; or choose `split_points` "
                        "that do not separate them"
                    )
                    remote = RemoteTensor.of(tensor.shape, tensor.dtype, self.device, origin)
                    delattr(module, name)
                    setattr(module, name, remote)

    def __deepcopy__(self, memo: object) -> StagedModel:
        """Refuse: the forward of the copy would run the stages of the original."""
        raise PrepareError(
            "a pipelined model cannot be copied with copy.deepcopy, for example for averaged "
            "weights (AveragedModel, EMA): the copy would compute with the parameters of the "
            "original. Average copies of the parameters of each rank ({name: "
            "parameter.clone()}), or use FSDP2 or DDP, whose models can be copied"
        )

    def watch(self) -> None:
        """Put this rank's units, as they are laid out, into the model, and hooks on them, behind those of FSDP2."""
        units: list[nn.Module] = []
        for stage in self.stages.values():
            units += stage.units
        self._own_units = dict(zip(self.own_numbers, units, strict=True))
        self.show(None)
        self.buffers: StageBuffers = StageBuffers(self.model)
        for name, last in self.carried.items():
            hooked = {self.model.get_submodule(name)}
            if name in self.units:
                hooked.add(self.stand_ins[self.units.index(name)])
            for module in hooked:
                module.register_forward_hook(functools.partial(self._after_carried, name, last))
        for number, unit in self._own_units.items():
            unit.register_forward_hook(functools.partial(self._after_unit, number))

    def replace_forward(self, call: Callable[[Args, Kwargs], object]) -> None:
        """Have a call of the model run `call(args, kwargs)`."""

        @functools.wraps(self.model.forward)
        def forward(*args: object, **kwargs: object) -> object:
            return call(args, kwargs)

        self.model.forward = forward
        if "_original_forward" in vars(self.model):
            # Where `unwrap_model` takes autocast off, the pipeline stays.
            vars(self.model)["_original_forward"] = forward

    def show(self, segment: Segment | None) -> None:
        """Put the units of a segment into the model, or with None all units of this rank; else their stand-ins."""
        for number, places in self._places.items():
            module = self._own_units[number]
            if segment is not None and not segment.start <= number < segment.stop:
                module = self.stand_ins[number]
            for parent, name in places:
                if getattr(parent, name) is not module:
                    setattr(parent, name, module)

    def run(
        self, segment: Segment, args: Args, kwargs: Kwargs, received: Sequence[torch.Tensor]
    ) -> object:
        """Run a segment.

        Args:
            segment: what is computed.
            args: positional inputs of the model.
            kwargs: keyword inputs of the model.
            received: the tensors of what was received.

        Returns:
            (output of unit stop - 1, outputs of carried modules), or the model's output where the forward ends.

        Raises:
            PrepareError: the forward calls units in another order than the model was cut for, or a stage uses values
                that another one has.
        """
        # FSDP2 may have replaced tensors that require grad, to see their backward.
        segment.received = fill(segment.received, received)
        if len(self.own_numbers) > segment.stop - segment.start:
            self.show(segment)
        self.segment = segment
        try:
            output = self.forward(*args, **kwargs)
        except SegmentEnd as end:
            output = end.output, segment.carried
        else:
            if segment.leave:
                raise self._order_error(
                    f"ended without calling {self.units[segment.stop - 1]}, behind which it is cut"
                )
            if segment.start and not segment.started:
                raise self._order_error(
                    f"did not call {self.units[segment.start - 1]}, behind which it is cut"
                )
        finally:
            self.segment = None
        remote = first_remote(output)
        if remote is not None:
            raise remote.fail()
        return output

    def call_earlier(self, number: int) -> object:
        """The output of a unit before the segment: of the last one what was received, of others remote tensors."""
        segment, name = self.segment, self.units[number]
        if segment is None:
            raise PrepareError(
                f"{name} was called outside the pipeline: call the model that prepare returned"
            )
        if number >= segment.stop:
            raise self._order_error(f"calls {name} before {self.units[segment.stop - 1]}")
        if segment.started:
            raise self._order_error(f"calls {name} behind {self.units[segment.start - 1]}")
        if number == segment.start - 1:
            segment.started = True
            return segment.received[0]
        call = segment.calls.get(number, 0)
        segment.calls[number] = call + 1
        outputs = segment.unit_outputs.get(number, ())
        if call >= len(outputs):
            raise self._order_error(f"calls {name} more often than on its own stage")
        origin = (
            f"the output of {name}, which only stage {self.cut.stage_of(number)} has. Name "
            f"{name!r}, or the module that returns it to other modules, in `carried` "
            "(PipelineParallelConfig): its output is then sent to all later stages; or pass "
            "`example_inputs`, and prepare finds such outputs"
        )
        return trees.map_leaves(
            lambda spec: RemoteTensor.of(spec.shape, spec.dtype, self.device, origin),
            outputs[call],
            is_spec,
        )

    def _order_error(self, problem: str) -> PrepareError:
        return PrepareError(
            f"The forward of {class_name(self.model)} {problem}: its modules run in a different "
            "order than the one it was split for. Set `example_inputs` (PipelineParallelConfig), "
            "from which prepare finds the order, or `split_points`"
        )

    def _after_unit(self, number: int, unit: nn.Module, args: object, output: object) -> None:
        segment = self.segment
        if segment is None:
            # The model's own activation checkpointing computes units again in the backward.
            return
        is_lost = segment.grad and not torch.is_grad_enabled()
        if is_lost and any(parameter.requires_grad for parameter in unit.parameters()):
            raise PrepareError(
                f"{self.units[number]} has trainable parameters but is called with gradients "
                "disabled, as inside an autograd function that spans several stages: its "
                "gradient would be lost. Use use_reentrant=False for activation checkpointing; "
                "layers with their own backward over several blocks (such as reversible layers) "
                "cannot be split"
            )
        if segment.recorded is not None and first_remote(output) is None:
            described = describe(output, f"the output of {self.units[number]}")
            segment.recorded.setdefault(number, []).append(described)
        if segment.leave and number == segment.stop - 1:
            raise SegmentEnd(output)

    def _after_carried(
        self, name: str, last: int, module: nn.Module, args: object, output: object
    ) -> object:
        """A module whose output is sent to all later stages: computed on the stage of its last unit, else received."""
        segment = self.segment
        if segment is None:
            return output
        outputs = segment.carried.setdefault(name, [])
        if segment.start > last + 1:
            output = segment.received[1][name][len(outputs)]
        outputs.append(output)
        return output


def present_buffers(model: nn.Module, foreign: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The buffers of all modules of a model but those that are in foreign units only."""
    buffers: list[torch.Tensor] = []
    for _, module in model.named_modules(set(foreign)):
        buffers += direct_buffers(module).values()
    return buffers


def _call_with_loss(
    forward: Callable[..., object],
    loss_fn: Callable[[object, object], torch.Tensor],
    *args: object,
    labels: object = None,
    **kwargs: object,
) -> object:
    output = forward(*args, **kwargs)
    if labels is None:
        return output
    return (loss_fn(output, labels), output)
