# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into a model that is sharded over ranks, read by all of them or by rank 0 alone."""

import json

import torch
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn

WORKER = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from accelerate.placement.load import load_checkpoint_in_model

    folder = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reference = torch.load(os.path.join(folder, "reference.pt"))

    def build(sharded):
        torch.manual_seed(rank)  # the ranks start from different weights
        model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
        if sharded:
            fully_shard(model[0])
            fully_shard(model)
        return model

    def check(model):
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, reference[name]), (rank, name)

    # Only rank 0 sees the files that it sends.
    seen_by_one = os.path.join(folder, "checkpoint") if rank == 0 else "/nowhere"
    for sharded in (False, True):
        model = build(sharded)
        load_checkpoint_in_model(model, seen_by_one, broadcast_from_rank0=True, strict=True)
        check(model)
    model = build(False)
    load_checkpoint_in_model(model, seen_by_one, broadcast_from_rank0=True, dtype="float64")
    assert all(p.dtype == torch.float64 for p in model.parameters())
    # All ranks read, and each keeps its shards.
    model = build(True)
    load_checkpoint_in_model(model, os.path.join(folder, "checkpoint"), strict=True)
    check(model)
    model = build(False)
    load_checkpoint_in_model(model, os.path.join(folder, "checkpoint"), full_state_dict=False, strict=True)
    check(model)
    model = build(True)
    try:
        load_checkpoint_in_model(model, os.path.join(folder, "checkpoint"), dtype="float16")
        raise SystemExit("no error")
    except ValueError as error:
        assert "sharded already and keep their dtype" in str(error)
    # What rank 0 does not find is an error everywhere, at once.
    try:
        load_checkpoint_in_model(build(False), "/nowhere", broadcast_from_rank0=True)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "rank 0 found no checkpoint to send" in str(error), error
    try:
        load_checkpoint_in_model(build(True), os.path.join(folder, "part"), broadcast_from_rank0=True, strict=True)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "not in the checkpoint: 0.bias" in str(error), error
    dist.barrier()
    dist.destroy_process_group()
"""


def test_sharded_models_and_one_reader(tmp_path):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
    state = model.state_dict()
    torch.save(state, tmp_path / "reference.pt")
    for folder, names in (("checkpoint", list(state)), ("part", ["0.weight", "2.weight"])):
        (tmp_path / folder).mkdir()
        weight_map = {}
        for part in "012":
            weights = {name: state[name] for name in names if name.startswith(part)}
            if weights:
                file = f"part-{part}.safetensors"
                save_file(weights, tmp_path / folder / file, metadata={"format": "pt"})
                weight_map.update(dict.fromkeys(weights, file))
        index = tmp_path / folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    run_ranks(WORKER, 2, tmp_path, timeout=100)
