# SPDX-License-Identifier: Apache-2.0
"""Parameters that compute between layers split by columns and by rows, where a rank has some of the features.

A rank's gradient of such a parameter is that of its own features: the gradients of all ranks are summed. Which
parameters these are is read once from the graph of what a layer split by rows is given, whatever the plan says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ...core.errors import PrepareError
from ...core.modules import class_name
from ...torch_internals.compiled import has_compiled_regions, is_compiled_module
from .layers import GatherFeatures, SumBackward, SumForward
from .requirements import Split

# Where a rank's features begin: behind these nodes is a tensor that all ranks have, or a shard of a parameter.
_BEGINS = {f"{SumBackward.__name__}Backward", "_ToTorchTensorBackward"}
# Where they end, in the direction of the forward.
_ENDS = {f"{SumForward.__name__}Backward", f"{GatherFeatures.__name__}Backward"}


class Region:
    """What lies between a layer split by rows and the layers split by columns that it reads.

    Args:
        name: the name of the layer split by rows.
        layer: that layer.
        module: the innermost module that has it and layers split by columns.
        module_name: the name of that module.
        mesh: the ranks.
        watched: parameters of the model whose gradients are summed already, by id.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        module: nn.Module,
        module_name: str,
        mesh: DeviceMesh,
        watched: set[int],
    ) -> None:
        self.name = name
        self.layer = layer
        self.module = module
        self.module_name: str = module_name or class_name(module)
        self.mesh = mesh
        self.watched = watched
        # The modules and names of parameters that no plan mentions, until it is known where they compute.
        self.undecided: dict[str, tuple[nn.Module, str]] = {}
        for path, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                owner, _, key = path.rpartition(".")
                self.undecided[path] = (module.get_submodule(owner), key)
        self.is_new: bool = True
        self.handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Look at what the layer is given in the next forward with gradients."""
        self.handles += [
            self.layer.register_forward_pre_hook(self._look, prepend=True),
            self.module.register_forward_hook(self._explain, always_call=True),
        ]

    def _look(self, layer: nn.Module, args: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling() or not args:
            return
        features = args[0]
        if not isinstance(features, torch.Tensor) or not features.requires_grad:
            return
        trained = []
        for path, (owner, key) in self.undecided.items():
            if getattr(owner, key).requires_grad:
                trained.append(path)
        if not trained and not self.is_new:
            return
        self._sum_gradients(features)
        for path in trained:
            del self.undecided[path]
        self.is_new = False
        if not self.undecided:
            self._close()

    def _sum_gradients(self, features: torch.Tensor) -> None:
        """Sum the gradients of the parameters on which this rank's features depend."""
        between, before = _behind([features.grad_fn], is_sharded=True)
        leaves = []
        for node in between:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and not isinstance(leaf, DTensor):
                leaves.append(leaf)
        if not leaves:
            return
        _, before = _behind(before, is_sharded=False)
        if not between.isdisjoint(before):
            raise PrepareError(
                f"{self.name} is split by rows, but its input in {self.module_name} also depends "
                "on the module's input along a path without layers that are split by columns: "
                "the gradient of that path would cover only this rank's features. Also split the "
                f"layers on that path, or remove {self.name} and its columns from the plan"
            )
        for leaf in leaves:
            if id(leaf) not in self.watched:
                self.watched.add(id(leaf))
                leaf.register_hook(self._sum)

    def _sum(self, gradient: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = SumForward.apply(gradient, self.mesh)
        return total

    def _explain(self, module: nn.Module, args: object, output: object) -> None:
        """Say in an error about sizes that a rank has some of the features."""
        error = sys.exception()
        if torch.compiler.is_compiling() or type(error) not in (RuntimeError, ValueError):
            return
        assert error is not None
        if hasattr(error, "__notes__"):
            # The module is in another one with split layers, or ends in several of them.
            return
        error.add_note(
            f"{self.module_name} ({class_name(module)}) has layers that are split over "
            f"tp_size={self.mesh.size()} ranks, with {self.name} split by rows: between them, a "
            f"rank has 1/{self.mesh.size()} of the features. "
            f"{', '.join(sorted(self.undecided)) or 'Other operations there'} may need all of "
            "them. Remove the layers of this module from the plan"
        )

    def _close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _behind(starts: Iterable[Node | None], is_sharded: bool) -> tuple[set[Node], set[Node]]:
    """The nodes behind `starts`, by where they compute: (of a rank's features, of tensors that all ranks have).

    With `is_sharded` the starts compute a rank's features, and of the second kind only the first nodes are returned.
    """
    sharded, full = set[Node](), set[Node]()
    remaining = [(node, is_sharded) for node in starts]
    while remaining:
        node, within = remaining.pop()
        nodes = sharded if within else full
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if is_sharded and not within:
            continue
        if node.name() in _BEGINS:
            within = False
        elif node.name() in _ENDS:
            within = True
        for following, _ in node.next_functions:
            remaining.append((following, within))
    return sharded, full


def regions_of(split: Split, modules: Mapping[str, nn.Module], mesh: DeviceMesh) -> list[Region]:
    """The regions of a model that is split; `modules` are its modules by name."""
    watched = set[int]()
    regions = []
    for row, parent in split.regions().items():
        regions.append(Region(row, modules[row], modules[parent], parent, mesh, watched))
    return regions


def look_first(model: nn.Module, regions: Sequence[Region]) -> None:
    """Have a compiled model run uncompiled until its first forward with gradients, whose graph the regions read."""
    if not (is_compiled_module(model) or has_compiled_regions(model)):
        return
    blocks: list[contextlib.ExitStack] = []

    def enter(module: nn.Module, args: object) -> None:
        block = contextlib.ExitStack()
        block.enter_context(torch.compiler.set_stance("force_eager"))
        blocks.append(block)

    def leave(module: nn.Module, args: object, output: object) -> None:
        blocks.pop().close()
        if not any(region.is_new for region in regions):
            for handle in handles:
                handle.remove()

    handles = [
        model.register_forward_pre_hook(enter),
        model.register_forward_hook(leave, always_call=True),
    ]
