# SPDX-License-Identifier: Apache-2.0
"""Several dimensions of a mesh as one. torch's public API has no name for it."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from . import Internal

FLATTEN = Internal(
    name="flattened_mesh",
    what="DeviceMesh._flatten",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="FSDP together with context or sequence parallelism, which shards over the ranks of both dimensions",
    without="a mesh without its dimensions `dp`, `dp_shard_cp` and `dp_cp`: such layouts are refused",
    test="tests/torch_internals/test_device_mesh.py::test_two_dimensions_as_one",
)


def flatten(mesh: DeviceMesh, name: str) -> None:
    """Make all dimensions of a mesh one dimension `name` of its root; with the row off, nothing."""
    if FLATTEN.is_on:
        mesh._flatten(name)
