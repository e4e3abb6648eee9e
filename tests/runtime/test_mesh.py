# SPDX-License-Identifier: Apache-2.0
"""Meshes of a layout in a fake group of 16, and what each rank reads."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime import mesh as meshes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fake_group():
    dist.init_process_group("fake", rank=5, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_all_dimensions():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=2)
    mesh = meshes.build_mesh(config, 16, "cpu")
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert mesh is config.device_mesh is meshes.build_mesh(config, 16, "cpu")
    members = {
        name: dist.get_process_group_ranks(meshes.group_of(mesh, name))
        for name in ("dp", "dp_shard_cp", "tp")
    }
    assert members == {"dp": [1, 5, 9, 13], "dp_shard_cp": [1, 3, 5, 7], "tp": [4, 5]}
    assert meshes.group_of(mesh, "pp") is None
    assert meshes.coordinates(config, 5) == {
        "pp": 0,
        "dp_replicate": 0,
        "dp_shard": 1,
        "cp": 0,
        "sp": 0,
        "tp": 1,
    }
    # Ranks 4 to 7 differ from each other in cp and tp only: they read the same samples.
    assert [meshes.data_shard(config, rank) for rank in range(4, 8)] == [(1, 4)] * 4
    assert [meshes.data_shard(config, rank)[0] for rank in (0, 4, 8, 12)] == [0, 1, 2, 3]
    hybrid = meshes.fsdp_mesh(config, mesh, CPU)
    assert hybrid.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"dp_shard_size": 16}, [list(range(16))]),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 8},
            [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        ),
        ({"dp_replicate_size": 8, "tp_size": 2}, [[rank] for rank in range(1, 16, 2)]),
        ({"cp_size": 8, "tp_size": 2}, [list(range(1, 16, 2))]),
        ({"pp_size": 2, "dp_shard_size": 8}, [list(range(8))]),
    ],
)
def test_what_fsdp_is_given(sizes, expected):
    config = ParallelismConfig(**sizes)
    mesh = meshes.fsdp_mesh(config, meshes.build_mesh(config, 16, "cpu"), CPU)
    assert mesh.mesh.reshape(len(expected), -1).tolist() == expected


def test_refusals():
    with pytest.raises(ValueError, match="tp_size=3 = 3 processes, but 16"):
        meshes.build_mesh(ParallelismConfig(tp_size=3), 16, "cpu")
    for sizes in ({"dp_replicate_size": 16}, {"tp_size": 16}):
        config = ParallelismConfig(**sizes)
        with pytest.raises(ValueError, match="nothing to shard over"):
            meshes.fsdp_mesh(config, meshes.build_mesh(config, 16, "cpu"), CPU)


def test_a_replaced_description_of_the_mesh_is_used(monkeypatch):
    """Packages add dimensions, or keep those of one rank, in lists."""
    names = ["dp_replicate", "dp_shard", "tp"]
    monkeypatch.setattr(ParallelismConfig, "_get_mesh", lambda self: (names, [2, 8, 1]))
    mesh = meshes.build_mesh(ParallelismConfig(dp_replicate_size=2, dp_shard_size=8), 16, "cpu")
    assert mesh.mesh_dim_names == tuple(names) and meshes.group_of(mesh, "dp").size() == 16
