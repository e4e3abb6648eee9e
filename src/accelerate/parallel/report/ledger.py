# SPDX-License-Identifier: Apache-2.0
"""Counts the storages, operations, moved bytes and messages of a block, real or of a model on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Kinds of memory, in the order of the table.
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, MESSAGES, ROUNDING = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "rounding",
)
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, MESSAGES, ROUNDING)

# What a collective is called here -> names of its operations. The bytes are those of its largest tensor.
_COLLECTIVES = {
    "all-reduce": ("allreduce_", "all_reduce", "all_reduce_", "allreduce_coalesced_"),
    "all-gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor", "allgather_into_tensor_coalesced_"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-to-all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "broadcast": ("broadcast_",),
    "point-to-point": ("send",),
}
_KIND_OF_COLLECTIVE = {name: kind for kind, names in _COLLECTIVES.items() for name in names}
_MESSAGE_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")
# torch 2.13 knows no formula for attention's kernels on the CPU; those of the same shapes elsewhere are the same.
_SAME_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


@dataclass(eq=False)
class Allocation:
    """The life of one storage: from event `born` until before event `freed`, in bytes."""

    size: int
    born: int
    kind: str = ACTIVATIONS
    freed: int | None = None


@dataclass
class Work:
    """What the operations of a step do.

    Fields:
        flops: floating point operations of matrix products and attention, by dtype.
        moved: bytes that all other operations read and write.
        operations: their number, and that of matrix products.
        messages: (collective, size of its group) -> (number, bytes).
    """

    flops: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    operations: int = 0
    messages: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def send(self, kind: str, ranks: int, size: int, times: int = 1) -> None:
        """Count messages."""
        number, sent = self.messages.get((kind, ranks), (0, 0))
        self.messages[kind, ranks] = number + times, sent + times * size


class Ledger(TorchDispatchMode):
    """A mode that follows every storage, fake or real, from its first tensor to its end.

    Kinds are given to storages at any time, so that a peak can be divided when the step is over.

    Args:
        fake: the block is inside a fake mode; operations on real tensors only then stay real.
        sends: whether collectives are run; else they are only counted, and those on real tensors raise RuntimeError.
    """

    def __init__(self, fake: bool = False, sends: bool = True) -> None:
        super().__init__()
        self._is_fake = fake
        self._sends = sends
        self.work: Work = Work()
        self.blocks: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._events = 0
        self._resize = torch.UntypedStorage.resize_

    # -- the mode

    def __enter__(self) -> Ledger:
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            done = resize(storage, size)
            # FSDP frees and allocates the gathered weights of a unit so, without any operation.
            self._resized(storage, int(size))
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            # The operations on local tensors come here next.
            return NotImplemented
        kwargs = kwargs or {}
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        replaced = _REPLACED.get(func._overloadpacket) if any(isinstance(one, FakeTensor) for one in inputs) else None
        message = func.namespace in _MESSAGE_SPACES
        is_real = self._is_fake and not any(isinstance(one, FakeTensor) for one in inputs)
        if message and is_real and not self._sends:
            raise RuntimeError(f"{func} on a tensor that is not fake: a trace sends nothing")
        if func.namespace == "c10d" and not self._sends:
            out = _unsent(func, args)
        elif inputs and is_real:
            # A tensor that was there before, as the ranks of a device mesh: its values are known.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        else:
            out = replaced(*args, **kwargs) if replaced else func(*args, **kwargs)
        outputs = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        for tensor in [*inputs, *outputs]:
            self._seen(tensor, MESSAGES if message else ACTIVATIONS, force=message)
        if message:
            self._count_message(func, args, inputs, outputs)
        else:
            self._count_work(func, args, kwargs, out, inputs, outputs)
        return out

    # -- storages

    def _seen(self, tensor: torch.Tensor, kind: str, force: bool = False) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        block = self._alive.get(storage._cdata)
        if block is None:
            block = self._add(storage, kind)
        elif force and block.kind == ACTIVATIONS:
            block.kind = kind

    def _add(self, storage: torch.UntypedStorage, kind: str) -> Allocation:
        self._events += 1
        block = Allocation(storage.nbytes(), self._events, kind)
        self.blocks.append(block)
        key = storage._cdata
        self._alive[key] = block
        weakref.finalize(storage, self._freed, key).atexit = False
        return block

    def _freed(self, key: int) -> None:
        current = self._alive.pop(key, None)
        if current is not None:
            self._events += 1
            current.freed = self._events

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        block = self._alive.get(storage._cdata)
        if block is None or block.size == size:
            return
        self._events += 1
        block.freed = self._events
        again = Allocation(size, self._events, MESSAGES)
        if block.kind == ACTIVATIONS:
            block.kind = MESSAGES
        self.blocks.append(again)
        self._alive[storage._cdata] = again

    def label(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Give the storages behind tensors a kind; storages that no operation has met are counted from now on."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            self._seen(local, kind)
            block = self._alive.get(local.untyped_storage()._cdata)
            if block is not None:
                block.kind = kind

    def mark(self) -> int:
        """The current event, to give to `peak`."""
        return self._events

    def peak(self, since: int = 0, granularity: int = 1, of: Iterable[str] = KINDS) -> dict[str, int]:
        """Bytes by kind at the event after `since` at which most are alive, each block rounded up.

        `of` are the kinds that are counted.
        """
        changes: list[tuple[int, int, Allocation]] = []
        blocks = [block for block in self.blocks if block.kind in of]
        for block in blocks:
            size = -(-block.size // granularity) * granularity
            changes.append((max(block.born, since), size, block))
            if block.freed is not None:
                if block.freed <= since:
                    changes.pop()
                else:
                    changes.append((block.freed, -size, block))
        now = best = 0
        at = since
        for event, change, _ in sorted(changes, key=lambda one: one[:2]):
            now += change
            if now > best:
                best, at = now, event
        found = dict.fromkeys(KINDS, 0)
        for block in blocks:
            if block.born <= max(at, since) and (block.freed is None or block.freed > at):
                found[block.kind] += block.size
                found[ROUNDING] += -block.size % granularity
        return found

    @contextlib.contextmanager
    def fresh_work(self) -> Iterator[Work]:
        """A block whose work is counted by itself."""
        before, self.work = self.work, Work()
        try:
            yield self.work
        finally:
            self.work = before

    # -- work

    def _count_message(
        self, func: OpOverload, args: tuple[object, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        kind = _KIND_OF_COLLECTIVE.get(func._schema.name.partition("::")[2])
        if kind is None:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in [*inputs, *outputs]]
        self.work.send(kind, _group_size(args), max(sizes, default=0))

    def _count_work(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        out: object,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        packet = func._overloadpacket
        formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(_SAME_FLOPS.get(packet))
        if packet is torch.ops.aten._grouped_mm:
            formula = _grouped_flops
        if formula is not None and outputs:
            self.work.operations += 1
            self.work.flops[str(outputs[0].dtype).removeprefix("torch.")] += int(formula(*args, **kwargs, out_val=out))
        elif not (func.is_view or func._schema.name in _FREE):
            self.work.operations += 1
            self.work.moved += sum(tensor.numel() * tensor.element_size() for tensor in [*inputs, *outputs])


_FREE = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::detach"})


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of `aten._grouped_mm`, which torch 2.13 traces for bfloat16 only."""
    dtype = out_dtype or mat_a.dtype
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        assert offs is not None
        return mat_a.new_empty((offs.shape[0], mat_a.shape[0], mat_b.shape[1]), dtype=dtype)
    shape = (mat_a.shape[0] if mat_a.dim() == 3 and mat_b.dim() == 3 else None, mat_a.shape[-2], mat_b.shape[-1])
    return mat_a.new_empty([size for size in shape if size is not None], dtype=dtype)


def _grouped_flops(mat_a: torch.Tensor, mat_b: torch.Tensor, *_: object, **__: object) -> int:
    """Each row of a group is multiplied with the matrix of its group once."""
    return 2 * math.prod(mat_a.shape) * mat_b.shape[-1]


_REPLACED: dict[OpOverloadPacket, Callable[..., torch.Tensor]] = {
    torch.ops.aten._grouped_mm: _grouped_mm,
    # It returns the tensor itself; on fake tensors torch 2.13 returns another one.
    torch.ops._c10d_functional.wait_tensor: lambda tensor: tensor,
}


def _unsent(func: OpOverload, args: tuple[object, ...]) -> object:
    """What a collective of c10d returns, without sending anything: its first argument, and what is waited for."""
    work = FakeWork().boxed()
    returned = [args[0] if "Tensor" in str(one.type) else work for one in func._schema.returns]
    return returned[0] if len(returned) == 1 else tuple(returned)


def _group_size(args: tuple[object, ...]) -> int:
    """The number of ranks of the group among the arguments of a collective."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(one).size())
            except RuntimeError:
                continue
        if isinstance(one, str):
            try:
                return int(torch._C._distributed_c10d._resolve_process_group(one).size())  # type: ignore[arg-type]
            except RuntimeError:
                continue
    return dist.get_world_size()


def fake_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model with fake tensors on the CPU; ties stay. Call it in a fake mode.

    Args:
        model: with plain tensors and DTensors.
        memo: id of an object -> what the copy has instead; extended, as by `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    fake_tensors(model, memo)
    return copy.deepcopy(model, memo)


def fake_tensors(model: nn.Module, memo: dict[int, Any]) -> None:
    """Add a fake tensor to `memo` for each tensor of the modules, and a view for each device mesh, that it has not."""
    others = [value for module in model.modules() for value in vars(module).values()]
    for mesh in [value for value in others if isinstance(value, DeviceMesh)]:
        on_cpu(mesh, memo)
    kept = [value for value in others if isinstance(value, torch.Tensor)]
    for tensor in [*model.parameters(), *model.buffers(), *kept]:
        if id(tensor) in memo:
            continue
        local = getattr(tensor, "_local_tensor", tensor)
        value = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
        if isinstance(tensor, DTensor):
            value = as_dtensor(value, tensor._spec, memo)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = value


def as_dtensor(local: torch.Tensor, spec: DTensorSpec, memo: dict[int, Any]) -> DTensor:
    """A DTensor of a fake local tensor on the CPU, with the placements of `spec`."""
    mesh = on_cpu(spec.mesh, memo)
    return DTensor.from_local(local, mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def on_cpu(mesh: DeviceMesh, memo: dict[int, Any]) -> DeviceMesh:
    """A view of a device mesh as one of the CPU: with the groups of the mesh, to which a trace sends nothing.

    `memo` has the views, by the ids of the meshes.
    """
    if id(mesh) not in memo:
        view = memo[id(mesh)] = DeviceMesh.__new__(DeviceMesh)
        vars(view).update(vars(mesh), _device_type="cpu", _hash=None)
        view._flatten_mapping = {name: on_cpu(flat, memo) for name, flat in mesh._flatten_mapping.items()}
        if mesh._root_mesh is not None:
            view._root_mesh = on_cpu(mesh._root_mesh, memo)
    found: DeviceMesh = memo[id(mesh)]
    return found


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss among a model's outputs; the mean of its first output if there is none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while not isinstance(outputs, torch.Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return outputs if outputs.dim() == 0 else outputs.float().mean()
