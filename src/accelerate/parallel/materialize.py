# SPDX-License-Identifier: Apache-2.0
"""How weights reach the ranks: made equal, scattered from rank 0 one tensor at a time, or initialized in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..core.errors import PrepareError
from ..core.modules import direct_tensors, named_bottom_up, replace_data
from ..placement.subclasses import inner_tensors
from ..torch_internals.module_copies import unsharded_copy
from .unwrap import canonical_name as canonical_name
from .unwrap import named_parameters as named_parameters
from .unwrap import named_tensors as named_tensors

T = TypeVar("T")


def local_shard(full: torch.Tensor, layout: DTensor) -> torch.Tensor:
    """This rank's shard of `full`, in the layout of a DTensor of the same shape; nothing is sent."""
    laid_out: DTensor = distribute_tensor(
        full.detach(), layout.device_mesh, layout.placements, src_data_rank=None
    )
    return laid_out.to_local()


def where_meta(model: nn.Module) -> str | None:
    """The name of the first parameter without storage, or None."""
    return next((name for name, parameter in named_parameters(model) if parameter.is_meta), None)


def from_first(value: T, device: torch.device | None, group: dist.ProcessGroup | None = None) -> T:
    """The first rank's object, on every rank of a group."""
    message = [value]
    dist.broadcast_object_list(message, group=group, group_src=0, device=device)
    return message[0]


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Each rank's object, in the order of the group."""
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def gather_flags(flag: bool, device: torch.device, group: dist.ProcessGroup | None) -> list[bool]:
    """Each rank's flag, in the order of the group."""
    mine = torch.tensor([float(flag)], device=device)
    answers = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, mine, group=group)
    return [bool(answer) for answer in answers]


@torch.no_grad()
def make_equal(
    tensors: Iterable[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Give every rank of the group its first rank's values. Tensors are moved to `device`.

    DTensors are skipped: their shards differ, and have been filled already.
    """
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            continue
        if tensor.device != device:
            replace_data(tensor, tensor.detach().to(device))
        for piece in inner_tensors(tensor.data).values():
            # Pieces of quantized weights are sent as bytes: gloo has no messages in float8.
            if piece.itemsize == 1:
                piece = piece.view(torch.uint8)
            pieces.append(piece)
    if dist.get_world_size(group) == 1:
        return
    sent = []
    for piece in pieces:
        buffer = piece.contiguous()
        work = dist.broadcast(buffer, group=group, group_src=0, async_op=True)
        sent.append((piece, buffer, work))
    for piece, buffer, work in sent:
        work.wait()
        if buffer is not piece:
            piece.copy_(buffer)


class Weights:
    """The values of a model while a layout replaces its tensors.

    Where every rank of the group has weights, they are left to the layout, which makes them equal. Where only the
    first has them (`from_first`, or the others built the model without storage), the model has no storage until
    `fill` spreads them one tensor at a time; if no rank has any, `fill` initializes module by module.

    Fields:
        are_everywhere: every rank has weights.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        ranks: dist.ProcessGroup | None = None,
        from_first: bool = False,
    ) -> None:
        self.device = device
        self.ranks = ranks
        meta = gather_flags(where_meta(model) is not None, device, ranks)
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.are_everywhere: bool = not any(meta) and (not from_first or is_sharded)
        self.are_nowhere: bool = meta[0]
        self._are_equal = False
        self._full: dict[str, torch.Tensor] = {}
        if not self.are_everywhere:
            if dist.get_rank(ranks) == 0 and not self.are_nowhere:
                self._full = dict(named_tensors(model))
            # What is shared between modules stays shared.
            replace_tensors(model, lambda tensor: tensor.to("meta"))

    def make_all_equal(self, model: nn.Module) -> None:
        """Give every rank the first one's values of a model, if every rank has weights."""
        self.make_equal(tensor for _, tensor in named_tensors(model))
        self._are_equal = True

    def make_equal(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the first one's values, if every rank has weights and they are not equal yet."""
        if self.are_everywhere and not self._are_equal:
            make_equal(tensors, self.device, self.ranks)

    def fill(
        self,
        model: nn.Module,
        home: torch.device | None = None,
        init: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Give a model that is laid out its values. Local shards live on `home`."""
        if self.are_everywhere:
            return
        allocate(model, self.device, home)
        if self.are_nowhere:
            initialise(model, self.device, self.ranks, init)
        else:
            spread(self._full, named_tensors(model), self.device, self.ranks)


def allocate(model: nn.Module, device: torch.device, home: torch.device | None = None) -> None:
    """Give what has no storage an empty one on `device`; of a sharded tensor its shard, on `home` if given."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if isinstance(tensor, DTensor) and home is not None:
            return torch.empty_like(tensor, device=home)
        return torch.empty_like(tensor, device=device)

    replace_tensors(model, empty)


@torch.no_grad()
def replace_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer by what `change` makes of it; ties and attributes are preserved."""
    # By the former tensor, which is kept alive: no other one gets its id.
    changed: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in direct_tensors(module).items():
            if tensor not in changed:
                now = change(tensor)
                if now is not tensor and isinstance(tensor, nn.Parameter):
                    now = nn.Parameter(now, requires_grad=tensor.requires_grad)
                    # The attributes of a tensor subclass are its data, which stays that of the new one.
                    now.__dict__.update({**tensor.__dict__, **now.__dict__})
                changed[tensor] = now
            if changed[tensor] is not tensor:
                setattr(module, name, changed[tensor])


@torch.no_grad()
def spread(
    full: dict[str, torch.Tensor],
    targets: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Fill `targets` on every rank from `full`, which is empty on all ranks but the group's first.

    One unsharded tensor at a time is on `device`; each rank keeps its shard. `full` is emptied.
    Raises PrepareError, on every rank, for a name that is missing in `full` (with `strict`), or of another shape.
    """
    listed = list(targets)
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    offered = from_first(shapes, device, group)
    missing = [name for name, _ in listed if name not in offered]
    if missing and strict:
        raise PrepareError(
            f"rank 0 does not have values for {len(missing)} tensors of the model: "
            f"{', '.join(missing[:5])}"
        )
    for name, target in listed:
        if name in offered and offered[name] != tuple(target.shape):
            raise PrepareError(
                f"{name} has the shape {tuple(target.shape)} here but {offered[name]} on rank 0: "
                "all ranks must build the same model"
            )
    for name, target in listed:
        if name not in offered:
            continue
        source = full.pop(name, None)
        if isinstance(source, DTensor):
            source = source.full_tensor()
        value = broadcast_tensor(source, target.shape, target.dtype, device, group)
        if isinstance(target, DTensor):
            target.to_local().copy_(local_shard(value, target))
        else:
            target.copy_(value)


def broadcast_tensor(
    source: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The tensor that the first rank of a group has, on `device` of every rank."""
    if dist.get_rank(group) == 0:
        assert source is not None
        value = source.detach().to(device=device, dtype=dtype).contiguous()
    else:
        value = torch.empty(tuple(shape), dtype=dtype, device=device)
    if dist.get_world_size(group) > 1:
        dist.broadcast(value, group=group, group_src=0)
    return value


def initialise(
    model: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None,
    init: Callable[[nn.Module], object] | None = None,
) -> None:
    """Initialize a model that was built without storage, and then sharded.

    Each module is unsharded alone and initialized by `init(module)`, else by its `reset_parameters()`, then by the
    model's `_init_weights(module)` if it has one, and scattered from the group's first rank.
    Raises PrepareError for a module with tensors that nothing initializes.
    """
    fallback = getattr(model, "_init_weights", None)
    owners: dict[int, nn.Module] = {}
    modules = {module: name for name, module in named_bottom_up(model)}
    for module, name in modules.items():
        if not direct_tensors(module):
            continue
        shadow = unsharded_copy(module, device)
        if init is not None:
            init(shadow)
        else:
            reset = getattr(shadow, "reset_parameters", None) or getattr(
                shadow, "_reset_parameters", None
            )
            if reset is None and fallback is None:
                where = f"{canonical_name(name) or 'the model'} ({type(module).__name__})"
                raise PrepareError(
                    f"{where} has tensors without storage but no reset_parameters(). Define it, "
                    "pass a param_init_fn to the plugin, or load the weights on rank 0 "
                    "(cpu_ram_efficient_loading)."
                )
            if reset is not None:
                reset()
            if fallback is not None:
                fallback(shadow)
        # A tied tensor is that of the module that stands first, as where a model is built with storage.
        for _, tensor in direct_tensors(module).items():
            owners.setdefault(id(tensor), module)
        inside = set(module.modules())
        targets = []
        for key, tensor in named_tensors(module):
            if owners[id(tensor)] in inside:
                targets.append((key, tensor))
        spread(dict(named_tensors(shadow)), targets, device, group)


# -- a model's state without storage: names, shapes and ties, for layouts whose modules do not have them


def without_storage(state: Mapping[str, object]) -> dict[str, object]:
    """A state under plain names whose tensors have shapes only; tied ones are one tensor still."""
    metas: dict[int, torch.Tensor] = {}
    light: dict[str, object] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            # ZeRO-3 replaces a parameter by an empty tensor with its shape as an attribute.
            shape = getattr(value, "ds_shape", value.shape)
            meta = torch.empty(shape, dtype=value.dtype, device="meta")
            light[canonical_name(name)] = metas.setdefault(id(value), meta)
        else:
            light[canonical_name(name)] = value
    return light


def skeleton(name: str, state: Mapping[str, object]) -> nn.Module:
    """A module of a class called `name` whose `state_dict()` is `state`."""
    kind: type[nn.Module] = type(
        name, (nn.Module,), {"state_dict": lambda self, *args, **kwargs: dict(state)}
    )
    return kind()


def complete(state: Mapping[str, T], light: Mapping[str, object]) -> dict[str, T]:
    """A state that has tied tensors under one name, with all the names of `light`; foreign names are left out."""
    values: dict[int, T] = {}
    for name, value in state.items():
        if name in light:
            values[id(light[name])] = value
    completed = {}
    for name, meta in light.items():
        if id(meta) in values:
            completed[name] = state.get(name, values[id(meta)])
    return completed
