# SPDX-License-Identifier: Apache-2.0
"""FSDP1's unused parameters: their gradient is None, as in a plain loop, and not zero.

FSDP1 has gradients of entire flattened units. An optimizer would decay parameters that no forward has used, and count
a step. And it reduces the gradients of a unit only in a backward that uses the unit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _reduce_grad, _reduce_grad_no_shard, _reshard
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM

from ...core.errors import PrepareError
from ..gradients import GradientReducer
from ..prepared import CommunicationVolume
from .common import other_parameters
from .units import flat_units

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

# The dtype of the flag for one parameter, whether a rank has used it.
FLAG = torch.int32


class FlattenedUnit:
    """One flattened unit, and which of its parameters have received a gradient."""

    def __init__(self, wrapped: FullyShardedDataParallel, handle: FlatParamHandle, names: list[str]) -> None:
        self.wrapped = wrapped
        self.handle = handle
        self.flat: Any = handle.flat_param
        self.names = names
        self.keeps_originals: bool = handle._use_orig_params
        flat = handle.flat_param
        count = len(flat._param_infos)
        # Whether a parameter received a gradient: since the last synchronization; that is still there; ever.
        self.fresh: list[bool] = [False] * count
        self.present: list[bool] = [False] * count
        self.ever: list[bool] = [False] * count
        self.trains: list[bool] = [True] * count if flat._params is None else [p.requires_grad for p in flat._params]
        # The parameters as the optimizer has them, with use_orig_params=True.
        self.originals: list[nn.Parameter] = [*(flat._params or ()), *(flat._shared_params or ())]
        # Whether backwards without synchronization have left a gradient of this rank alone.
        self.unreduced: bool = False
        # The parameters that the next step must not change, with use_orig_params=False.
        self.skipped: list[int] = []
        self._untouched: set[int] = set()

    def reduce_rest(self) -> None:
        """Reduce what earlier backwards have left, if this one, which synchronizes, has not used the unit."""
        wrapped, handle, flat = self.wrapped, self.handle, self.flat
        if not self.unreduced or flat._post_backward_called or flat.grad is None:
            return
        # As torch's hook after the backward of a unit.
        device, stream = wrapped._device_handle, wrapped._post_backward_stream
        current = device.current_stream()
        stream.wait_stream(current)
        with torch.no_grad(), device.stream(stream):
            local = flat.grad.data
            before = wrapped.training_state, handle._training_state
            wrapped.training_state = TrainingState.FORWARD_BACKWARD
            handle._training_state = HandleTrainingState.BACKWARD_POST
            if local.dtype != handle._reduce_dtype and not handle._force_full_precision:
                flat.grad.data = local.to(handle._reduce_dtype)
            (_reduce_grad if handle.uses_sharded_strategy else _reduce_grad_no_shard)(wrapped, handle)
            wrapped.training_state, handle._training_state = before
            if local.device.type != "cpu":
                local.record_stream(stream)
        current.wait_stream(stream)
        if wrapped._all_reduce_stream is not current:
            current.wait_stream(wrapped._all_reduce_stream)
        if wrapped.cpu_offload.offload_params:
            current.synchronize()
        flat._post_backward_called = True

    def watch(self) -> None:
        """A forward begins: register hooks on the parameters that have no gradient yet."""
        self._forget_cleared()
        for number, (name, module, _) in enumerate(self.flat._param_infos):
            if not self.fresh[number]:
                shown = getattr(module, name)
                if shown.requires_grad:
                    shown.register_hook(functools.partial(self._mark, number))

    def _mark(self, number: int, gradient: torch.Tensor) -> None:
        self.fresh[number] = True

    def _forget_cleared(self) -> None:
        """Forget gradients that `zero_grad` has removed."""
        if not self.keeps_originals:
            if self.flat.grad is None:
                self.present = [False] * len(self.present)
            return
        for number, parameter in enumerate(self.flat._params):
            if self.present[number] and parameter.grad is None:
                self.present[number] = False

    def received(self) -> list[bool]:
        """Which parameters have a gradient, or do not train."""
        if self.keeps_originals:
            self.trains = [parameter.requires_grad for parameter in self.flat._params]
        return [a or b or not c for a, b, c in zip(self.fresh, self.present, self.trains, strict=True)]

    def apply(self, received: list[bool]) -> None:
        """Drop the gradients of parameters that have one on no rank, according to `received`."""
        self.fresh, self.present = [False] * len(received), list(received)
        absent = [number for number, there in enumerate(received) if not there]
        self.ever = [a or b for a, b in zip(self.ever, received, strict=True)]
        if self.keeps_originals:
            for number in absent:
                self.flat._params[number].grad = None
            # A parameter that is tied to one of them is in another place.
            missing = {self.flat._param_infos[number][:2] for number in absent}
            for shared, info in zip(self.flat._shared_params, self.flat._shared_param_infos, strict=True):
                if (info.prim_param_name, info.prim_module) in missing:
                    shared.grad = None
            return
        if self.flat.grad is None or len(absent) == len(received):
            # The unit was not used at all: it has no gradient, or one from before.
            absent = []
        if changed := [number for number in absent if self.ever[number]]:
            raise self._refusal(changed)
        self.skipped = absent

    def _refusal(self, numbers: list[int]) -> PrepareError:
        names = ", ".join(self.names[number] for number in numbers[:5])
        return PrepareError(
            f"FSDP1: {names} received gradients before, and none in this step. With use_orig_params=False they "
            "belong to a flattened parameter, which the optimizer steps as one: state and weight decay would still be "
            "applied to them, unlike in a single process. Set use_orig_params=True "
            "(FSDP_USE_ORIG_PARAMS=true), or fsdp_version=2"
        )

    def slices(self, state: dict[str, Any]) -> list[torch.Tensor]:
        """This rank's shards of the parameters to skip. Raises PrepareError if one was trained before."""
        found = []
        for number in self.skipped:
            info = self.flat._shard_param_infos[number]
            if not info.in_shard:
                continue
            place = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
            if number not in self._untouched:
                # In a loaded state the values of a parameter without any gradient so far are all equal.
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == self.flat.shape:
                        piece = value[place]
                        if bool((piece != piece[0]).any()):
                            raise self._refusal([number])
                self._untouched.add(number)
            found.append(self.flat.data[place])
        return found


def free_unsharded(unit: Any) -> None:
    """Free the unsharded parameters that a forward without its backward has left in an FSDP1 unit."""
    if unit._handle.uses_sharded_strategy and not unit._handle.needs_unshard():
        _reshard(unit, unit._handle, True)


class ParameterUsage(GradientReducer):
    """Which parameters of one wrapped model have received a gradient since gradients were cleared.

    `compiled`: torch.compile sees the model's forward.
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.units: list[FlattenedUnit] = []
        for module, handle, names in flat_units(model):
            if not handle.flat_param.requires_grad:
                continue
            unit = FlattenedUnit(module, handle, names)
            self.units.append(unit)
            _refuse_unsupported(handle)
            _refuse_outside(unit)
            _reduce_rest_before(unit)
            _watch_views(unit, compiled)

    def begin_backward(self) -> None:
        """A backward begins: torch sets this where the backward reaches a unit, and clears it at synchronizations."""
        for unit in self.units:
            unit.flat._post_backward_called = False

    def end_backward(self) -> None:
        """A backward has ended, with or without synchronization."""
        for unit in self.units:
            unit.unreduced = self.is_deferred and (unit.unreduced or unit.flat._post_backward_called)

    def communication_volume(self) -> list[CommunicationVolume]:
        """The flags sent in an optimizer step, in one message for all models."""
        flags = sum(len(unit.fresh) for unit in self.units)
        if not flags or not dist.is_initialized() or dist.get_world_size() == 1:
            return []
        return [CommunicationVolume("all-reduce of flags of used parameters", 1, flags * FLAG.itemsize)]


class UsageAgreement:
    """Finds, at each synchronizing backward, the parameters that received no gradient on any rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def drop_unused(self, models: Sequence[ParameterUsage]) -> None:
        """After a backward: the gradients of what no rank has used since they were cleared become None."""
        units = [unit for model in models if not model.is_deferred for unit in model.units]
        if not units:
            return
        received = [unit.received() for unit in units]
        flat = [flag for flags in received for flag in flags]
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Always sent; a rank that has used all parameters need not wait for the result.
            everyone = torch.tensor(flat, dtype=FLAG).to(self.device, non_blocking=True)
            if self._pending is not None:
                self._pending[0].wait()
            work = dist.all_reduce(everyone, op=dist.ReduceOp.MAX, async_op=True)
            self._pending = (work, everyone)
            if not all(flat):
                work.wait()
                flat = [bool(flag) for flag in everyone.tolist()]
        position = 0
        for unit in units:
            unit.apply(flat[position : position + len(unit.fresh)])
            position += len(unit.fresh)


def keep_unused(optimizer: torch.optim.Optimizer, models: Sequence[ParameterUsage]) -> None:
    """Make an optimizer leave the unused slices of flattened parameters unchanged."""
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(own: torch.optim.Optimizer, *_: object) -> None:
        stepped = {id(p): p for group in own.param_groups for p in group["params"]}
        saved.clear()
        for unit in (unit for model in models for unit in model.units):
            if unit.skipped and id(unit.flat) in stepped:
                saved.extend((piece, piece.clone()) for piece in unit.slices(own.state.get(unit.flat, {})))

    def after(*_: object) -> None:
        for piece, value in saved:
            piece.copy_(value)
        saved.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _watch_views(unit: FlattenedUnit, compiled: bool) -> None:
    """Call `unit.watch` whenever FSDP1 makes the views that replace the unit's parameters in a forward."""
    handle = unit.handle
    show = handle._use_unsharded_views

    def shown(as_params: bool) -> None:
        show(as_params=as_params)
        if not as_params and handle._training_state is HandleTrainingState.FORWARD:
            unit.watch()

    vars(handle)["_use_unsharded_views"] = torch.compiler.disable(shown) if compiled else shown


def _reduce_rest_before(unit: FlattenedUnit) -> None:
    """Reduce a unit that the backward has not used before torch gives its gradient to the optimizer."""
    prepare = unit.handle.prepare_gradient_for_optim

    def reduced() -> None:
        unit.reduce_rest()
        prepare()

    vars(unit.handle)["prepare_gradient_for_optim"] = reduced


def _refuse_outside(unit: FlattenedUnit) -> None:
    """Make a backward raise PrepareError where a loss uses the slices that are parameters outside of the forward."""
    for name, parameter in zip(unit.names, unit.originals, strict=False):
        if parameter.requires_grad:
            # Not the instance's own method, which refuses. A forward uses views of the flattened parameter.
            torch.Tensor.register_hook(parameter, functools.partial(_raise_outside, name))


def _raise_outside(name: str, _: torch.Tensor) -> None:
    raise outside_forward(name)


def outside_forward(name: str) -> PrepareError:
    """The error for a loss that uses a parameter where it is a slice."""
    return PrepareError(
        f"FSDP1: the loss uses {name} outside of its module's forward, where a rank has a slice of it, as in "
        "sum(p.norm() for p in model.parameters()). Set fsdp_version=2 (FSDP_VERSION=2), which supports this, compute "
        "the term in the module's forward, or use the optimizer's weight_decay"
    )


def refuse_flat_outside(error: RuntimeError, models: Sequence[ParameterUsage]) -> None:
    """Raise PrepareError for torch's error about a loss that uses a flattened parameter outside of the forward.

    Its gradients from the forward and from elsewhere have the sizes of the unsharded parameter and of the shard.
    """
    sizes = re.findall(r"returned an invalid gradient.* - got \[(\d+)\] but expected shape .* \[(\d+)\]", str(error))
    for unit in (unit for model in models for unit in model.units):
        of_unit = {unit.flat._unpadded_unsharded_size.numel(), unit.flat._sharded_size.numel()}
        of_unit.add(unit.flat._padded_unsharded_size.numel() if hasattr(unit.flat, "_padded_unsharded_size") else 0)
        if any({int(one), int(other)} <= of_unit for one, other in sizes):
            raise outside_forward(", ".join(unit.names[:5])) from error


def _refuse_unsupported(handle: FlatParamHandle) -> None:
    """Make a unit raise PrepareError where FSDP1 would reduce no gradients, or have no parameters."""
    prepare = handle.prepare_gradient_for_backward
    flat: Any = handle.flat_param
    places = [(FLAT_PARAM, handle._fully_sharded_module)]
    if handle._use_orig_params:
        places = [(info.param_name, info.module) for info in flat._param_infos]

    def own(number: int) -> tuple[torch.Tensor, ...]:
        # Views that an unsharded unit shows from its last forward on are remembered by torch.
        return (flat._params[number], flat._tensors[number]) if handle._use_orig_params else (flat,)

    def outside_transforms(call: Callable[[], object]) -> object:
        if torch._C._are_functorch_transforms_active():
            raise PrepareError(
                "FSDP1: the model was called inside of a transform of torch.func (vmap, grad, jvp, ...), which cannot "
                "read flattened parameters. Set fsdp_version=2 (FSDP_VERSION=2), or use DDP"
            )
        for number, (name, module) in enumerate(places):
            found = module._parameters.get(name)
            if found is not None and not any(found is known for known in own(number)):
                raise other_parameters(name, type(module).__name__, "FSDP1")
        return call()

    def checked() -> None:
        # Only a backward with `create_graph=True` runs with gradients enabled.
        if torch.is_grad_enabled():
            raise PrepareError(
                "FSDP1: a backward with create_graph=True (a gradient penalty, a second derivative). FSDP1 frees the "
                "parameters that the graph refers to: set fsdp_version=2 (FSDP_VERSION=2), or use DDP"
            )
        registered = ("_post_backward_hook_state", "_post_backward_hook_handle")
        if handle.flat_param.requires_grad and not any(hasattr(handle.flat_param, name) for name in registered):
            raise PrepareError(
                "FSDP1: a second backward without a forward in between (retain_graph=True, or two forwards and then "
                "two backwards). FSDP1 has parameters and reduces gradients for one backward: add the losses and call "
                "backward once, or set fsdp_version=2 (FSDP_VERSION=2)"
            )
        prepare()

    vars(handle)["prepare_gradient_for_backward"] = checked
    # The first calls in a forward that look at memory; the former in a model's first forward only.
    for name in ("init_flat_param_attributes", "pre_unshard"):
        setattr(handle, name, functools.partial(outside_transforms, getattr(handle, name)))
