# SPDX-License-Identifier: Apache-2.0
"""Two ranks: one run of a tracker, one trace file a rank, and the files of all there when the block ends."""

import os

import torch

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, on_main_process
from accelerate.utils import ProfileKwargs


class Everywhere(GeneralTracker):
    name, requires_logging_directory, main_process_only = "everywhere", False, False
    tracker = None

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    @on_main_process
    def log(self, values, step=None, **kwargs):
        (self.folder / f"rank{values['rank']}").touch()


def track(folder):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder / "logs"))
    rank = accelerator.process_index
    accelerator.init_trackers("run", {"lr": 1.0})
    accelerator.log({"rank": rank}, step=1)
    tracker = accelerator.get_tracker("tensorboard")
    assert isinstance(tracker, TensorBoardTracker) == (rank == 0), type(tracker)
    tracker.log({"more": 1.0}, step=2)  # nothing on the other rank, and no error
    Everywhere(folder).log({"rank": rank})
    with accelerator.profile(
        ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder / "traces"))
    ):
        torch.ones(4, 4).sum()
    assert sorted(os.listdir(folder / "traces")) == ["profile_0.json", "profile_1.json"]
    accelerator.end_training()


def test_one_run_and_a_trace_file_a_rank(ranks, tmp_path):
    ranks(2).run(track, tmp_path)
    assert len(list((tmp_path / "logs").rglob("events.out.*"))) == 1
    assert {"rank0", "rank1"} <= {path.name for path in tmp_path.iterdir()}
