# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in a run with other settings: exact where that is possible, and a note on what has another meaning."""

from __future__ import annotations

import pytest
import torch
from states import reset_states
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing import CheckpointMismatch

ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Run:
    def __init__(self, batch_size=2, accumulate=1, schedule=None, **options):
        reset_states()
        torch.manual_seed(1)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = torch.nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedule or (
            lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1.0)
        )
        loader = DataLoader(ROWS, batch_size, **{"shuffle": True, **options})
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule(optimizer), loader
        )

    def train(self, batches=None):
        """The rows that were read; the updates that were made."""
        seen, before = [], self.model.weight.detach().clone()
        for number, rows in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(rows).mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            seen.append(rows)
            if number + 1 == batches:
                break
        return torch.cat(seen), self.model.weight.detach() - before


def sorted_rows(rows):
    return sorted(map(tuple, rows.tolist()))


def test_another_batch_size_reads_the_rest_of_the_samples(tmp_path, caplog):
    run = Run()
    read, _ = run.train(5)
    run.accelerator.save_state(tmp_path / "c")
    other = Run(batch_size=7)
    report = other.accelerator.load_state(tmp_path / "c")
    rest, _ = other.train()
    assert sorted_rows(torch.cat([read, rest])) == sorted_rows(ROWS)
    assert len(report.notes) == 1
    assert "2 samples" in report.notes[0] and "7 here" in caplog.text


def train_with_schedule(steps, batch_size, path, loads):
    run = Run(
        batch_size,
        schedule=lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1.0 + step),
    )
    if loads:
        run.accelerator.load_state(path)
    for _, rows in zip(range(steps), run.loader, strict=False):
        run.accelerator.backward(run.model(rows).mean())
        run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
    if not loads:
        run.accelerator.save_state(path)
    return run.schedule.get_last_lr()[0]


def test_a_schedule_keeps_its_speed_on_other_ranks_with_the_same_batch(ranks, tmp_path):
    path = tmp_path / "c"
    assert ranks(2).run(train_with_schedule, 2, 2, path, False)[0] == pytest.approx(0.5)
    # On one rank a call would be one step.
    assert ranks(1).run(train_with_schedule, 2, 4, path, True)[0] == pytest.approx(0.9)


def test_an_open_window_keeps_its_length(tmp_path):
    run = Run(accumulate=4)
    read, _ = run.train(5)
    run.accelerator.save_state(tmp_path / "c")
    other = Run(accumulate=3)
    report = other.accelerator.load_state(tmp_path / "c")
    assert len(report.notes) == 1
    rest, update = other.train(6)
    # The gradient of the mean of a linear model is the mean of its inputs: of one window of 4 batches, and one of 3.
    expected = -0.1 * (torch.cat([read[8:], rest[:6]]).mean(0) + rest[6:].mean(0))
    torch.testing.assert_close(update[0], expected)


def test_another_sampler_in_the_middle_of_an_epoch_is_a_note(tmp_path):
    run = Run()
    run.train(5)
    run.accelerator.save_state(tmp_path / "c")
    options = {"shuffle": False, "sampler": torch.utils.data.SubsetRandomSampler(range(24))}
    (note,) = Run(**options).accelerator.load_state(tmp_path / "c").notes
    assert "RandomSampler" in note and "SubsetRandomSampler here" in note
    run.train()
    run.accelerator.save_state(tmp_path / "d")
    assert Run(**options).accelerator.load_state(tmp_path / "d").notes == []


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


def multiplicative(optimizer):
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)


def chained(optimizer):
    return torch.optim.lr_scheduler.ChainedScheduler(
        [cosine(optimizer), cosine(optimizer)], optimizer
    )


def test_another_scheduler(tmp_path):
    run = Run(schedule=cosine)
    run.schedule.step()
    run.accelerator.save_state(tmp_path / "c")
    run.accelerator.save_state(tmp_path / "compat", layout="compat")
    for folder in ("c", "compat"):
        with pytest.raises(
            CheckpointMismatch, match=r"scheduler 0 .*T_max.* but this is MultiplicativeLR"
        ):
            Run(schedule=multiplicative).accelerator.load_state(tmp_path / folder)
    with pytest.raises(CheckpointMismatch, match="this is ChainedScheduler"):
        Run(schedule=chained).accelerator.load_state(tmp_path / "c")
    other = Run(schedule=multiplicative)
    with torch.no_grad():
        run.model.weight.fill_(3)
    run.accelerator.save_state(tmp_path / "d")
    notes = other.accelerator.load_state(tmp_path / "d", strict=False).notes
    assert len(notes) == 1
    assert "scheduler 0 (AcceleratedScheduler)" in notes[0] and "CosineAnnealingLR" in notes[0]
    assert (other.model.weight == 3).all() and other.schedule.last_epoch == 0


def test_a_scheduler_of_another_class_with_the_same_entries_is_a_note(tmp_path):
    run = Run()
    run.schedule.step()
    run.accelerator.save_state(tmp_path / "c")
    other = Run(schedule=multiplicative)
    notes = other.accelerator.load_state(tmp_path / "c").notes
    assert len(notes) == 1
    assert "by LambdaLR" in notes[0] and "MultiplicativeLR here" in notes[0]
    assert other.schedule.last_epoch == 1
