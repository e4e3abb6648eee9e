# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks in a bucket: saved together, read by ranges, equal to those in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from s3_server import Request, S3Server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator
from accelerate.checkpointing import (
    CorruptCheckpoint,
    Options,
    PreparedModel,
    PreparedOptimizer,
    RunState,
    ShardedState,
    Writer,
    bucket_shards,
    load_run,
    save_run,
    verify,
)
from accelerate.checkpointing.copying import copy_checkpoint
from accelerate.core.bucket_path import BucketPath
from accelerate.core.errors import BucketAccessError, CheckpointError
from accelerate.core.files import location
from accelerate.parallel.fsdp.strategy import Fsdp2Model
from accelerate.precision.base import Precision
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration

pytest.importorskip("obstore")


@contextlib.contextmanager
def shared_server() -> Iterator[S3Server | None]:
    """A server in the process of rank 0, which all ranks use."""
    state = PartialState()
    with contextlib.ExitStack() as stack:
        server = None
        variables = [None]
        if state.process_index == 0:
            server = stack.enter_context(S3Server())
            variables = [server.environment()]
        dist.broadcast_object_list(variables)
        before = dict(os.environ)
        os.environ.update(variables[0])
        yield server
        state.wait_for_everyone()
        os.environ.clear()
        os.environ.update(before)


def sharded(width: int, seed: int = 0, steps: int = 0) -> tuple[RunState, list[torch.Tensor]]:
    """A run under FSDP2 on all ranks, and its local shards."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared = Fsdp2Model(model, Precision(), torch.device("cpu"))
    prepared.saves_shards = True
    optimizers = [prepared.prepared_optimizer(optimizer)]
    run = RunState(
        models=[prepared],
        optimizers=optimizers,
        sharded=ShardedState([prepared], optimizers),
        progress={"step": steps},
    )
    return run, local_tensors(run)


def local_tensors(run: RunState) -> list[torch.Tensor]:
    tensors = [value.to_local() for value in run.models[0].module.parameters()]
    for state in run.optimizers[0].inner.state.values():
        for value in state.values():
            tensors.append(value.to_local() if hasattr(value, "to_local") else value)
    return [tensor.detach().clone() for tensor in tensors]


def assert_equal(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(tensors) == len(others)
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0)


@on_ranks(2)
def test_shards_in_a_bucket(tmp_path: Path) -> None:
    state = PartialState(cpu=True)
    with shared_server() as server:
        saved, shards = sharded(32, steps=2)
        save_run(saved, "s3://bucket/run/a", process=state)
        save_run(saved, tmp_path / "a", process=state)
        manifest = verify("s3://bucket/run/a")
        in_folder = verify(tmp_path / "a")
        indices = {"optimizer_0/index.json", "pytorch_model_fsdp_0/index.json"}
        assert manifest.files.keys() == in_folder.files.keys() | indices

        # Each rank gets its own shards back, and so it does in a folder.
        loaded, _ = sharded(32, seed=1)
        load_run(loaded, "s3://bucket/run/a", process=state)
        assert_equal(local_tensors(loaded), shards)
        from_folder, _ = sharded(32, seed=2)
        load_run(from_folder, tmp_path / "a", process=state)
        assert_equal(local_tensors(loaded), local_tensors(from_folder))

        # A copy of the folder has no index, as checkpoints of earlier versions.
        if server is not None:
            copy_checkpoint(tmp_path / "a", location("s3://bucket/run/copy", "target"))
            assert not any("copy" in key and "index.json" in key for key in sorted(server.keys()))
        state.wait_for_everyone()
        from_copy, _ = sharded(32, seed=3)
        load_run(from_copy, "s3://bucket/run/copy", process=state)
        assert_equal(local_tensors(from_copy), local_tensors(from_folder))

        # In the background, over the first one.
        step_3, shards = sharded(32, steps=3)
        writer = Writer()
        save_run(step_3, "s3://bucket/run/a", process=state, writer=writer)
        writer.wait()
        state.wait_for_everyone()
        if server is not None:
            keys = [key for key in sorted(server.keys()) if key.startswith("run/a/")]
            tokens = {key.split("/")[2] for key in keys}
            assert len(tokens) == 2  # the manifest, and the folder that it names
        loaded, _ = sharded(32, seed=1)
        assert load_run(loaded, "s3://bucket/run/a", process=state).step == 3
        assert_equal(local_tensors(loaded), shards)

        # One process merges them.
        if state.process_index == 0:
            from accelerate.runtime.agreement import OneProcess

            torch.manual_seed(5)
            plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
            optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
            one = RunState(models=[PreparedModel(plain)], optimizers=[PreparedOptimizer(optimizer)])
            load_run(one, "s3://bucket/run/a", process=OneProcess())
            assert torch.equal(next(plain.parameters())[:16], shards[0])
            assert len(optimizer.state) == 4

        # A damaged shard is found by the rank that needs it, before anything changes, and all refuse.
        if server is not None:
            for key in [*server.keys()]:
                if "shard-00002" in key and "pytorch_model" in key:
                    stored = server.objects["bucket", key]
                    stored.data = stored.data[:-1] + bytes([stored.data[-1] ^ 1])
        state.wait_for_everyone()
        loaded, before = sharded(32, seed=1)
        with pytest.raises(CorruptCheckpoint, match="shard-00002"):
            load_run(loaded, "s3://bucket/run/a", process=state)
        assert_equal(local_tensors(loaded), before)


@on_ranks(2)
def test_a_rank_reads_its_ranges_only(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PartialState(cpu=True)
    read = 0
    read_at = BucketPath.read_at

    def counted(path: BucketPath, offset: int, target: memoryview) -> None:
        nonlocal read
        read += len(target)
        read_at(path, offset, target)

    monkeypatch.setattr(bucket_shards, "_BLOCK", 1 << 16)
    with shared_server():
        saved, shards = sharded(1 << 14, steps=1)
        save_run(saved, "s3://bucket/run/b", process=state)
        size = sum(file.size for file in verify("s3://bucket/run/b").files.values())
        loaded, _ = sharded(1 << 14, seed=1)
        monkeypatch.setattr(BucketPath, "read_at", counted)
        load_run(loaded, "s3://bucket/run/b", process=state)
        assert_equal(local_tensors(loaded), shards)
        # Half of the shards, the block of the other rank's scalars, and the index.
        assert 0.48 < read / size < 0.55, (read, size)


@on_ranks(2)
def test_an_error_of_a_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    state = PartialState(cpu=True)

    def refuse(request: Request) -> str | None:
        if request.method == "PUT" and "random_states_1" in request.key:
            return "403"
        return None

    with shared_server() as server:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        run = RunState(models=[PreparedModel(model)], optimizers=[PreparedOptimizer(optimizer)])
        save_run(run, "s3://bucket/run/c", process=state, options=Options(save_on_each_node=True))
        if server is not None:
            server.faults = refuse
            keys = server.keys()
        state.wait_for_everyone()
        with pytest.raises(CheckpointError, match=r"rank 1.*random_states_1") as caught:
            save_run(run, "s3://bucket/run/c", process=state)
        texts = [None, None]
        dist.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1] and "a-secret" not in texts[0]
        state.wait_for_everyone()
        if server is not None:
            # The files of the failed save are deleted, and the earlier checkpoint is there.
            assert server.keys() == keys
        verify(location("s3://bucket/run/c", "folder"))

        # A bucket that is not there is one error, when an optimizer is prepared.
        project = ProjectConfiguration("s3://absent/run", automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        with pytest.raises(BucketAccessError, match=r"^rank 0: .*s3://absent/run"):
            accelerator.prepare(torch.optim.SGD(model.parameters()))
