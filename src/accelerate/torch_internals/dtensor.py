# SPDX-License-Identifier: Apache-2.0
"""DTensors that the public constructor does not make, and placements that have no public class."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from . import Internal

HOST_SHARDS = Internal(
    name="host_shards",
    what="the constructor of DTensor, with a DTensorSpec",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="cpu_offload of the fsdp_plugin: loading, and optimizers whose step replaces their state",
    without="shards that are kept in host memory are moved to the device",
    test="tests/torch_internals/test_fsdp.py::test_a_shard_stays_where_it_is",
)
STRIDED_SHARDS = Internal(
    name="strided_shards",
    what="torch.distributed.tensor.placement_types._StridedShard",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="tp_size: fused projections (packed_colwise), of which a rank has a piece of each part",
    without="the optimizer state of such a layer is loaded in the wrong order",
    test="tests/torch_internals/test_fsdp.py::test_packed_shards",
)


def as_dtensor(
    local: torch.Tensor, like: DTensor, placements: Sequence[Placement] | None = None
) -> DTensor:
    """A DTensor of this rank's local tensor, with the shape and mesh of `like`, and its placements or these."""
    mesh, placements = like.device_mesh, tuple(placements or like.placements)
    if not HOST_SHARDS.is_on or local.is_meta or local.device.type == mesh.device_type:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    # `from_local` would move it to the mesh's device.
    spec = DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(like.shape, like.stride(), local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a rank's shard is not one block: fused matrices that are split one by one (packed layers)."""
    if not isinstance(tensor, DTensor) or not STRIDED_SHARDS.is_on:
        return False
    mesh, placements = tensor.device_mesh, tensor.placements
    for dimension, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        # FSDP2 over tensor parallelism has the same placement, for one block of a block.
        inner = range(dimension + 1, mesh.ndim)
        blocks = math.prod(
            mesh.size(other) for other in inner if placements[other].is_shard(placement.dim)
        )
        if blocks != placement.split_factor:
            return True
    return False
