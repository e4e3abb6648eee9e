# SPDX-License-Identifier: Apache-2.0
"""What FSDP refuses: one table, run once before a model is sharded; and a forward that writes parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...core.errors import PrepareError
from ...core.imports import is_torch_version
from ...placement.subclasses import is_quantized_tensor
from ...torch_internals.compiled import is_compiled_module
from ..prepared import PreparedModel
from .units import find_modules


@dataclass(frozen=True)
class Sharding:
    """A model that is about to be sharded.

    Fields:
        model: the model.
        layout: the name of the version.
        unsharded: the ids of the parameters that stay as they are.
        taken: the ids of the parameters, and of layers with flattened ones, of models that were prepared before.
        is_flat: whether parameters are sharded as parts of flat ones, which FSDP1 does.
    """

    model: nn.Module
    layout: str
    unsharded: frozenset[int]
    taken: frozenset[int]
    is_flat: bool

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(description, module) of the modules with parameters that will be sharded."""
        for name, module in self.model.named_modules():
            if not all(id(parameter) in self.unsharded for parameter in module.parameters()):
                yield f"{name or 'the model'} ({type(module).__name__})", module


def _quantized(sharding: Sharding) -> Iterator[str]:
    for name, parameter in sharding.model.named_parameters():
        kind = type(parameter).__name__
        # A tensor with this method describes its own sharding, as the fp8 weights of training do.
        of_torchao = is_quantized_tensor(parameter) and not hasattr(
            parameter, "fsdp_pre_all_gather"
        )
        if (of_torchao or kind == "Int8Params") and id(parameter) not in sharding.unsharded:
            yield (
                f"{name} is a {kind}, quantized by "
                f"{'torchao' if of_torchao else 'bitsandbytes to 8 bits'}, which "
                f"{sharding.layout} cannot shard. Train with DDP, or with a 4-bit bitsandbytes "
                "base. For inference use prepare_model(model, evaluation_mode=True), which keeps "
                "the full model on each process, or a device map. Or add its module to "
                "ignored_modules"
            )


def _sparse(sharding: Sharding) -> Iterator[str]:
    for what, module in sharding.modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            yield (
                f"{what} has sparse gradients, which {sharding.layout} cannot reduce. Build it "
                "with sparse=False"
            )


def _shared(sharding: Sharding) -> Iterator[str]:
    for name, part in (*sharding.model.named_parameters(), *sharding.model.named_modules()):
        if id(part) in sharding.taken:
            kind = "parameter" if isinstance(part, nn.Parameter) else "layer"
            yield (
                f"{name} is also a {kind} of another model, which {sharding.layout} has already "
                "sharded, but torch can shard a parameter in only one model. Put both in one "
                "nn.Module and prepare that, or use DDP"
            )


def _compiled(sharding: Sharding) -> Iterator[str]:
    if sharding.is_flat and is_compiled_module(sharding.model):
        yield (
            f"{sharding.layout} cannot shard a model that torch.compile has wrapped: its state "
            "dict would have flat shards. Pass the plain model to prepare and "
            "dynamo_plugin=TorchDynamoPlugin(...) to Accelerator, or set fsdp_version=2"
        )


def _whole_numbers(sharding: Sharding) -> Iterator[str]:
    flat = sharding.layout == "FSDP1"
    for name, parameter in sharding.model.named_parameters():
        if parameter.is_floating_point() or id(parameter) in sharding.unsharded:
            continue
        if not flat:
            # FSDP2 leaves a scalar as it is.
            if parameter.is_complex() or parameter.ndim == 0:
                continue
            # Before torch 2.12 a shard requires gradients when it is created, and whole numbers cannot have any.
            if is_torch_version(">=", "2.12"):
                continue
        yield (
            f"{name} has the dtype {parameter.dtype}, which {sharding.layout} in torch "
            f"{torch.__version__} cannot shard. Add its module to ignored_modules, or use "
            "fsdp_version=2 with torch 2.12, or with floating-point storage for 4-bit "
            "bitsandbytes layers (quant_storage=torch.float32)"
        )


REQUIREMENTS: tuple[Callable[[Sharding], Iterator[str]], ...] = (
    _quantized, _sparse, _shared, _compiled, _whole_numbers
)  # fmt: skip


def check(
    model: nn.Module,
    layout: str,
    ignored: Iterable[nn.Module] | str | None,
    others: Iterable[PreparedModel] = (),
    flattened: Iterable[object] | None = None,
) -> None:
    """Raise PrepareError for a model that `layout` does not shard.

    Args:
        model: the model.
        layout: the name of the version.
        ignored: modules that it leaves alone.
        others: the models that were prepared before.
        flattened: their layers and parameters that FSDP1 has flattened; None for FSDP2.
    """
    unsharded: set[int] = set()
    for module in find_modules(model, ignored):
        unsharded.update(map(id, module.parameters()))
    taken = set(map(id, flattened or ()))
    for other in others:
        taken.update(map(id, other.trained_parameters()))
    taken -= unsharded
    sharding = Sharding(
        model, layout, frozenset(unsharded), frozenset(taken), flattened is not None
    )
    for requirement in REQUIREMENTS:
        for message in requirement(sharding):
            raise PrepareError(message)


def refuse_writes(model: nn.Module) -> None:
    """Have the first training forward of each FSDP2 unit raise PrepareError if it changes a parameter."""
    if dist.get_backend() == dist.Backend.FAKE:
        # A trace has no values.
        return
    plain = {p for p in model.parameters() if not isinstance(p, DTensor)}
    units = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    for name, unit in units.items():
        assert isinstance(unit, nn.Module)
        _FirstForward(name, unit, plain)


class _FirstForward:
    """Compares the parameters of a unit before and after its first training forward.

    Args:
        name: the unit's.
        unit: has the hooks until then.
        unsharded: parameters of the model that are not gathered.
    """

    def __init__(self, name: str, unit: nn.Module, unsharded: set[nn.Parameter]) -> None:
        self.name = name
        self.unsharded = unsharded
        self.before: dict[str, torch.Tensor] = {}
        # FSDP2's hooks gather before the first, and reshard after the second.
        self.handles = [
            unit.register_forward_pre_hook(self._before_forward),
            unit.register_forward_hook(self._after_forward, prepend=True),
        ]

    def _sums(self, unit: nn.Module) -> dict[str, torch.Tensor]:
        sums = {}
        for name, parameter in unit.named_parameters():
            # Those of units inside are sharded; quantized ones have classes of their own.
            is_gathered = type(parameter) is nn.Parameter and parameter not in self.unsharded
            if is_gathered and parameter.is_floating_point():
                sums[name] = parameter.detach().sum(dtype=torch.float32).nan_to_num()
        return sums

    def _before_forward(self, unit: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled():
            self.before = self._sums(unit)

    def _after_forward(self, unit: nn.Module, *_: object) -> None:
        if not self.before:
            return
        after = self._sums(unit)
        for handle in self.handles:
            handle.remove()
        for name, total in self.before.items():
            if name in after and not torch.equal(after[name], total):
                where = f"{self.name}.{name}" if self.name else name
                raise PrepareError(
                    f"the forward of {type(unit).__name__} changes the parameter {where}. Under "
                    "FSDP2, the forward pass uses a gathered copy, so the change is lost. Change "
                    "it after optimizer.step(), or add its module to ignored_modules"
                )
