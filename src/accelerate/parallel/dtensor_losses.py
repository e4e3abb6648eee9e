# SPDX-License-Identifier: Apache-2.0
"""Losses with terms of sharded parameters, as a penalty on their norms: a plain tensor plus a DTensor is a DTensor.

torch takes the plain scalar, which differs on each rank, for a replicated one. In the backward it would give a DTensor
to the plain graph, and each rank would scale the gradients of its shards by its own factor.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Replicate

from ..core.errors import PrepareError

Gradients = tuple[torch.Tensor | None, ...]
# The nodes of `to_local` (also that of `tensor.layers`), `full_tensor` and `from_local`.
_TO_PLAIN = {"_ToTorchTensorBackward", "ToLocalBackward"}
_FROM_PLAIN = {"_FromTorchTensorBackward"}
# Operations whose gradients do not depend on values, which differ on each rank.
_LINEAR = (
    "Add",
    "Sub",
    "Rsub",
    "Neg",
    "Stack",
    "Cat",
    "Sum",
    "Mean",
    "ToCopy",
    "View",
    "Squeeze",
    "Unsqueeze",
    "Alias",
)


@contextlib.contextmanager
def plain_gradients(loss: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> Iterator[None]:
    """A context for the backward of `loss`, whose gradients are then those of a single process.

    Args:
        loss: nothing is done unless it is a DTensor.
        group: those who average gradients.
        ranks: how many they are.

    Raises:
        PrepareError: a product of a term of parameters and one of this rank's data, or another nonlinear operation.
    """
    if not isinstance(loss, DTensor) or loss.grad_fn is None:
        yield
        return
    graph = _Graph(loss.grad_fn)
    average = functools.partial(_average, group=group) if ranks > 1 else None
    with contextlib.ExitStack() as stack:
        for node in graph.sharded:
            children = _children(node)
            if node in graph.of_parameters:
                if average is not None and _is_scalar(node) and not any(map(graph.is_scalar_term, children)):
                    stack.callback(node.register_prehook(average).remove)
                continue
            mixed = {child in graph.of_parameters for child in children}
            if average is not None and len(mixed) > 1 and not node.name().startswith(_LINEAR):
                raise PrepareError(
                    f"the loss combines a term of sharded parameters with one of this rank's data ({node.name()}), of "
                    "which the gradient differs on each rank. Add terms of model.parameters() to the loss, or compute "
                    "them in the model's forward"
                )
            for child in children:
                # torch mixes nothing but scalars.
                if child not in graph.sharded and _is_scalar(child):
                    stack.callback(child.register_prehook(_unshard).remove)
        yield


class _Graph:
    """Which nodes of the graph below a DTensor have DTensors as outputs, and which of these see parameters only."""

    def __init__(self, root: Node) -> None:
        self.sharded: dict[Node, None] = {}
        self.of_parameters: set[Node] = set()
        seen: set[Node] = set()
        waiting = [(root, False)]
        while waiting:
            node, children_are_done = waiting.pop()
            if children_are_done:
                children = _children(node)
                if any(child in self.sharded for child in children):
                    self.sharded[node] = None
                    if all(child in self.of_parameters for child in children):
                        self.of_parameters.add(node)
            elif node not in seen:
                seen.add(node)
                if isinstance(getattr(node, "variable", None), DTensor):
                    self.sharded[node] = None
                    self.of_parameters.add(node)
                elif node.name() in _FROM_PLAIN:
                    self.sharded[node] = None
                elif node.name() not in _TO_PLAIN:
                    waiting.append((node, True))
                    waiting.extend((child, False) for child in _children(node))

    def is_scalar_term(self, node: Node) -> bool:
        """Whether a node is a scalar of parameters, and no parameter."""
        return node in self.of_parameters and _is_scalar(node) and not hasattr(node, "variable")


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _is_scalar(node: Node) -> bool:
    return all(math.prod(output.shape) == 1 for output in node._input_metadata)


def _unshard(gradients: Gradients) -> Gradients:
    return tuple(found.full_tensor() if isinstance(found, DTensor) else found for found in gradients)


def _average(gradients: Gradients, group: dist.ProcessGroup | None) -> Gradients:
    """The mean of a factor of parameters' gradients: each rank has those of its shards."""
    found = []
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mean = gradient.full_tensor().clone()
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
            mesh = gradient.device_mesh
            gradient = DTensor.from_local(mean, mesh, [Replicate()] * mesh.ndim, run_check=False)
        found.append(gradient)
    return tuple(found)
