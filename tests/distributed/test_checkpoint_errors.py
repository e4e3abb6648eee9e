# SPDX-License-Identifier: Apache-2.0
"""An error of one rank in a save: every rank raises it at the same call, nothing is left, and the next save works."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import cases
from full_disk import full_disk
from rank_pool import on_ranks

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.checkpointing import RunState, save_run, verify
from accelerate.checkpointing.files import BlockIO
from accelerate.checkpointing.layout import newest_valid
from accelerate.collectives import gather_object
from accelerate.collectives import verify as debug
from accelerate.core.errors import CheckpointError
from accelerate.runtime.agreement import Agreement
from accelerate.utils import ProjectConfiguration, find_executable_batch_size

PLACES = ["registered", "scheduler", "hook", "model", "optimizer"]


class Counted:
    def state_dict(self):
        return {"count": 3}

    def load_state_dict(self, state):
        pass


def fail(*_, **__):
    raise ValueError("bad state")


def broken(accelerator, place, objects):
    """Make one part of the run fail on this rank; the returned function mends it."""
    model, optimizer, scheduler, registered = objects
    if place == "hook":
        return accelerator.register_save_state_pre_hook(fail).remove
    if place == "model":
        inner = accelerator.unwrap_model(model)
        return inner.register_state_dict_post_hook(fail).remove
    if place == "optimizer":
        return optimizer.optimizer.register_state_dict_pre_hook(fail).remove
    target = {"registered": registered, "scheduler": getattr(scheduler, "scheduler", scheduler)}[
        place
    ]
    target.state_dict = fail

    def mend():
        del target.state_dict

    return mend


def raised(accelerator, save):
    """What this rank raises, which has to be the same on all of them."""
    start = time.monotonic()
    try:
        save()
    except CheckpointError as error:
        text = str(error)
    else:
        text = "nothing"
    everyone = gather_object([text])
    assert len(set(everyone)) == 1, everyone
    assert time.monotonic() - start < 20, "the ranks have waited for each other"
    return text


@on_ranks(2, timeout=100)
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_every_rank_raises_it_and_the_next_save_works(layout, tmp_path):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin if layout == "sharded" else None,
        project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True),
    )
    rank = accelerator.process_index
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    registered = Counted()
    accelerator.register_for_checkpointing(registered)
    objects = (model, optimizer, scheduler, registered)
    for saved, blocking in enumerate((True, False)):
        for place in PLACES:
            for victim in (0, 1):
                mend = broken(accelerator, place, objects) if rank == victim else lambda: None
                told = raised(
                    accelerator, lambda blocking=blocking: accelerator.save_state(blocking=blocking)
                )
                mend()
                assert f"rank {victim}: ValueError: bad state" in told, (
                    layout,
                    place,
                    victim,
                    blocking,
                    told,
                )
        # A checkpoint under the same number, since the iteration did not go on anywhere.
        folder = Path(accelerator.save_state(blocking=blocking))
        assert folder.name == f"checkpoint_{saved}"
        if not blocking:
            accelerator._checkpoints._writer.wait()
        accelerator.wait_for_everyone()
        verify(folder)
        names = sorted(entry.name for entry in folder.parent.iterdir())
        assert names == [f"checkpoint_{number}" for number in range(saved + 1)], names
        accelerator.wait_for_everyone()
    accelerator.end_training()


@contextlib.contextmanager
def no_rename():
    """The last step of a save fails, in which its folder is renamed by any rank."""
    former, os.rename = os.rename, fail
    try:
        yield
    finally:
        os.rename = former


@contextlib.contextmanager
def removed_folder():
    """The temporary folder of a save is removed before its files are written."""
    former = BlockIO.__init__

    def remove(*args, **kwargs):
        for folder in Path.cwd().glob("checkpoints/.checkpoint*.tmp-*"):
            shutil.rmtree(folder, ignore_errors=True)
        former(*args, **kwargs)

    BlockIO.__init__ = remove
    try:
        yield
    finally:
        BlockIO.__init__ = former


FAULTS = [
    (full_disk, [0], "rank 0: OSError: .*File too large"),
    (full_disk, [1], "rank 1: OSError: .*File too large"),
    (no_rename, [0, 1], "rank [01]: ValueError: bad state"),
    (removed_folder, [0], "FileNotFoundError|was removed while"),
    (removed_folder, [1], "FileNotFoundError|was removed while"),
]
KINDS = [{}, {"safe_serialization": False}, {"layout": "compat"}]


@on_ranks(2, timeout=100)
@pytest.mark.parametrize("options", cases(KINDS, thorough=KINDS[1:]), ids=str)
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_disk_that_fails_on_one_rank(layout, options, tmp_path):
    os.chdir(tmp_path)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin if layout == "sharded" else None,
        project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True),
    )
    model = torch.nn.Linear(40, 40)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    last = Path(accelerator.save_state(**options))
    for blocking in (True, False):

        def save(blocking=blocking):
            folder = Path(accelerator.save_state(blocking=blocking, **options))
            if not blocking:
                accelerator._checkpoints._writer.wait()
            return folder

        for fault, victims, text in FAULTS:
            with fault() if accelerator.process_index in victims else contextlib.nullcontext():
                told = raised(accelerator, save)
            assert re.search(text, told) and "Traceback" not in told, told
            assert "Earlier checkpoints are unchanged" in told
            assert newest_valid(last.parent) == last
            accelerator.wait_for_everyone()
        last = save()
        verify(last)
    accelerator.end_training()
    assert not list(last.parent.glob(".*tmp*"))


@on_ranks(4)
def test_groups_of_other_sizes_in_one_process(tmp_path):
    """Ranks that have been in different groups before count their rounds alike in the next one."""
    rank = int(os.environ["RANK"])
    for number, size in enumerate((4, 2, 4)):
        if rank >= size:
            continue
        store = dist.FileStore(str(tmp_path / f"store{number}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

        class Process:
            process_index, num_processes, local_process_index = rank, size, rank

        for again in range(2):
            save_run(RunState(progress={"step": again}), tmp_path / f"c{number}", process=Process())
        assert Agreement(Process(), "other").exchange(
            "number", rank, 20, reduce=lambda ranks: sorted(ranks.values())
        ) == list(range(size))
        debug.agree("gather", torch.ones(2))
        tried = []

        @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 4)
        def train(batch_size, tried=tried):
            tried.append(batch_size)
            if batch_size == 8 and rank == 1:
                raise RuntimeError("CUDA out of memory.")

        train()
        assert tried == [8, 4], tried
        dist.barrier()
        dist.destroy_process_group()
        del store
