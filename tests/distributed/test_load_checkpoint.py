# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into a model that is sharded over ranks, read by all of them or by rank 0 alone."""

import json

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate.placement.load import load_checkpoint_in_model

NAMES = {"checkpoint": None, "part": ["0.weight", "2.weight"]}


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))


def build(sharded):
    """A model whose weights differ between the ranks."""
    model = make(dist.get_rank())
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def check(model):
    reference = make(7).state_dict()
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, reference[name]), name


@pytest.fixture
def folder(tmp_path):
    """Has a complete checkpoint of `make(7)` in several files, and one without the biases."""
    state = make(7).state_dict()
    for kind, names in NAMES.items():
        (tmp_path / kind).mkdir()
        weight_map = {}
        for part in "012":
            weights = {name: state[name] for name in names or state if name.startswith(part)}
            if weights:
                file = f"part-{part}.safetensors"
                save_file(weights, tmp_path / kind / file, metadata={"format": "pt"})
                weight_map.update(dict.fromkeys(weights, file))
        (tmp_path / kind / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
    return tmp_path


@on_ranks(2)
def test_rank_0_reads_for_all(folder):
    dist.init_process_group("gloo")
    # Only rank 0 sees the files that it sends.
    seen_by_one = folder / "checkpoint" if dist.get_rank() == 0 else "/nowhere"
    for sharded in (False, True):
        model = build(sharded)
        load_checkpoint_in_model(model, seen_by_one, broadcast_from_rank0=True, strict=True)
        check(model)
    model = build(False)
    load_checkpoint_in_model(model, seen_by_one, broadcast_from_rank0=True, dtype="float64")
    assert all(p.dtype == torch.float64 for p in model.parameters())
    # What rank 0 does not find is an error everywhere, at once.
    with pytest.raises(RuntimeError, match="rank 0 found no checkpoint"):
        load_checkpoint_in_model(build(False), "/nowhere", broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match=r"not in the checkpoint: 0\.bias"):
        load_checkpoint_in_model(
            build(True), folder / "part", broadcast_from_rank0=True, strict=True
        )


@on_ranks(2)
def test_all_ranks_read(folder):
    dist.init_process_group("gloo")
    model = build(True)
    load_checkpoint_in_model(model, folder / "checkpoint", strict=True)
    check(model)
    model = build(False)
    load_checkpoint_in_model(model, folder / "checkpoint", full_state_dict=False, strict=True)
    check(model)
    with pytest.raises(ValueError, match="keep their dtype"):
        load_checkpoint_in_model(build(True), folder / "checkpoint", dtype="float16")
