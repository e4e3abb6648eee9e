# SPDX-License-Identifier: Apache-2.0
"""Which tensors share memory with a parameter, and whether a tensor was written."""

from __future__ import annotations

import torch

from . import Internal

TENSOR_VIEWS = Internal(
    name="tensor_views",
    what="Tensor._base, the tensor of which a view is one",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="transforms=['activation_offload']",
    without="transposed weights are copied to host memory as if they were activations",
    test="tests/torch_internals/test_tensor_memory.py::test_views_of_parameters",
)
TENSOR_VERSIONS = Internal(
    name="tensor_versions",
    what="Tensor._version, which every write in place increases",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="MasterWeightsKwargs: parameters that other code writes between two steps; save_state of "
    "adapters, whose frozen base may be written; pipelines: code that writes values of another stage; "
    "offloaded weights that are written between two forwards",
    without="what other code writes into a parameter, such as a loaded state, is lost at the next step",
    test="tests/torch_internals/test_tensor_memory.py::test_writes_in_place_are_counted",
)


def is_parameter_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    if isinstance(tensor, torch.nn.Parameter):
        return True
    return TENSOR_VIEWS.is_on and isinstance(tensor._base, torch.nn.Parameter)


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes in place to a tensor."""
    if not TENSOR_VERSIONS.is_on:
        return 0
    return tensor._version
