# SPDX-License-Identifier: Apache-2.0
"""Compilation by regions: the repeated blocks of a model are compiled one by one, so that one compilation serves all.

A model of forty equal layers compiles in the time of one. Source: `torch.compile` regional compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..config.training import TorchDynamoPlugin
from ..core.errors import PrepareError
from ..core.imports import is_torch_version
from ..torch_internals.compiled import is_compiled_module, remember_uncompiled
from ..torch_internals.module_copies import with_children


class Compile:
    """The transform that compiles a model after it is wrapped, entirely or by regions."""

    def __init__(self, options: TorchDynamoPlugin) -> None:
        self.options = options

    def apply(self, model: nn.Module) -> nn.Module:
        """The compiled model. One that its user has compiled already is handed back."""
        if is_compiled_module(model):
            return model
        if is_torch_version("<", "2.12") and any(
            isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
            for parameter in model.parameters()
        ):
            raise PrepareError(
                f"torch {torch.__version__} computes wrong gradients in compiled models that are "
                "split over tp: use torch 2.12 or later, or do not compile the model"
            )
        arguments = self.options.to_kwargs()
        regional = bool(self.options.use_regional_compilation)
        if isinstance(model, DistributedDataParallel):
            # The wrapper synchronises, what it holds computes: compiled from outside, its own Python is traced in some
            # fifty frames whose guards then cost at every step, and a copy of it would not see `no_sync`.
            if regional:
                compile_regions_fsdp2(model.module, **arguments)
            else:
                model.module.compile(**arguments)
            return model
        if not regional:
            return torch.compile(model, **arguments)  # type: ignore[return-value]
        if isinstance(model, FSDPModule):
            return compile_regions_fsdp2(model, **arguments)
        return compile_regions(model, **arguments)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether `module` is a list of equal blocks: a ModuleList whose entries are all of one class."""
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether `module` holds such a list, or is one."""
    return any(is_repeated_blocks(inner) for inner in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """A model that computes the same as `module`, with its regions compiled.

    If no block repeats, the entire model is compiled. The regions are the entries of each list of equal blocks, and
    every other submodule without such a list. The result shares all parameters with `module`, which stays uncompiled
    and is available as `result._orig_mod`.
    `compile_kwargs` are those of `torch.compile`.
    """
    if isinstance(module, nn.ModuleList) and is_repeated_blocks(module):
        return nn.ModuleList([compile_regions(block, **compile_kwargs) for block in module])
    if not has_repeated_blocks(module):
        return torch.compile(module, **compile_kwargs)  # type: ignore[return-value]
    # A copy of the outer module alone: the children are replaced, and the user's module must not see it.
    outer = with_children(module, lambda child: compile_regions(child, **compile_kwargs))
    remember_uncompiled(outer, module)
    return outer


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: object) -> nn.Module:
    """Compile the regions of `module` in place: names, hooks and parameters stay as `fully_shard` needs them."""
    for region in _regions(module):
        region.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: object) -> None:
    """Compile the regions of `module` in place, because DeepSpeed's hooks are on the modules themselves."""
    compile_regions_fsdp2(module, **compile_kwargs)


def _regions(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the lists of equal blocks in `module`, and the largest submodules without such a list."""
    if not has_repeated_blocks(module):
        # A list is no callable: its entries are what runs.
        yield from module if isinstance(module, nn.ModuleList) else (module,)
        return
    for child in module.children():
        yield from _regions(child)
