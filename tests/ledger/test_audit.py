# SPDX-License-Identifier: Apache-2.0
"""The audit of a ledger, compared with the samples that the loop itself has counted."""

import collections
import json

import pytest
import torch
from states import reset_states
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.commands import audit as command
from accelerate.core.errors import ConfigurationError
from accelerate.ledger import rows
from accelerate.ledger.audit import Finding, audit
from accelerate.utils import ProjectConfiguration, set_seed

SAMPLES, BATCH = 22, 4


class Stream(IterableDataset):
    """The same samples, without a length."""

    def __iter__(self):
        for index in range(SAMPLES):
            yield torch.tensor([float(index)])


def make(folder, loader=None, accumulation=1, resume=False, **options):
    """A run that is recorded into a folder."""
    reset_states()
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True,
        telemetry=folder,
        project_config=project,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(**options),
    )
    set_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if loader is None:
        data = TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1))
        loader = DataLoader(
            data, BATCH, shuffle=True, collate_fn=lambda rows: torch.stack([row[0] for row in rows])
        )
    prepared = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.resume()
    return accelerator, *prepared


def step(run, batch):
    """Train with a batch. Returns its samples."""
    accelerator, model, optimizer, _ = run
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [int(index) for index in batch.flatten()]


def audited(folder):
    return audit(rows.read(folder))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_sample_once(tmp_path, accumulation):
    run = make(tmp_path, accumulation=accumulation)
    for _ in range(2):
        for batch in run[3]:
            step(run, batch)
        for _ in run[3].base_dataloader:  # an evaluation, of an unprepared loader
            pass
    run[0].end_training()
    result = audited(tmp_path)
    steps = -(-SAMPLES // BATCH)
    steps = -(-steps // accumulation)
    assert (
        result.is_right() and result.steps == 2 * steps and not result.redone and not result.missing
    )
    for number, epoch in enumerate(result.epochs):
        assert (epoch.loader, epoch.epoch, epoch.total, epoch.trained, epoch.samples) == (
            0,
            number,
            22,
            22,
            22,
        )
        assert epoch.steps == (number * steps + 1, (number + 1) * steps) and epoch.ranks == [1]


def test_an_evaluation_is_no_epoch(tmp_path):
    run = make(tmp_path)
    evaluated = run[0].prepare(DataLoader(torch.arange(9.0).unsqueeze(1), 2))
    for batch in run[3]:
        step(run, batch)
    for batch in evaluated:
        run[1](batch)
    for batch in run[3]:
        step(run, batch)
    run[0].end_training()
    assert [(epoch.loader, epoch.trained) for epoch in audited(tmp_path).epochs] == [
        (0, 22),
        (0, 22),
    ]


def test_a_loop_that_reads_ahead(tmp_path):
    run = make(tmp_path)
    for _ in range(2):
        for batch in [*run[3]]:
            step(run, batch)
        reader = iter(run[3])
        batch = next(reader)
        for following in reader:
            step(run, batch)
            batch = following
        step(run, batch)
    run[0].end_training()
    # A pass that is read entirely before it is trained leaves no positions in the steps.
    assert audited(tmp_path).is_right() and {
        epoch.trained for epoch in audited(tmp_path).epochs
    } >= {22}


def test_one_batch_again_and_again(tmp_path):
    run = make(tmp_path)
    batch = next(iter(run[3]))
    for _ in range(3):
        step(run, batch)
    run[0].end_training()
    (epoch,) = audited(tmp_path).epochs
    assert epoch.trained == BATCH and epoch.is_open


def test_what_the_loop_leaves_out(tmp_path):
    run = make(tmp_path)
    trained = collections.Counter()
    for number, batch in enumerate(run[3]):
        if number != 2:
            trained.update(step(run, batch))
    for number, batch in enumerate(run[3]):
        if number == 4:
            break
        step(run, batch)
    run[3].set_epoch(2)
    for batch in skip_first_batches(run[3], 2):
        step(run, batch)
    run[0].end_training()
    first, second, third = audited(tmp_path).epochs
    assert first.trained == len(trained) and first.findings == [Finding("no_backward", 8, 11, 3)]
    assert second.findings == [Finding("left", 16, 21)] and not second.is_open
    assert third.findings == [Finding("skip", 0, 7)] and third.samples == 14


@pytest.mark.parametrize("stream", [False, True])
def test_drop_last(tmp_path, stream, capsys):
    data = Stream() if stream else torch.arange(float(SAMPLES)).unsqueeze(1)
    run = make(tmp_path, DataLoader(data, BATCH, drop_last=True))
    for _ in range(2):
        for batch in run[3]:
            step(run, batch)
    run[0].end_training()
    result = audited(tmp_path)
    if stream:
        assert result.is_right() and [epoch.total for epoch in result.epochs] == [20, 20]
        return
    assert [epoch.findings for epoch in result.epochs] == [[Finding("drop_last", 20, 21)]] * 2
    codes = []
    for words in ([], ["--allow", "drop_last"], ["--allow", "drop"], ["--json"]):
        with pytest.raises(SystemExit) as end:
            command.main([str(tmp_path), *words])
        codes.append(end.value.code)
    output = capsys.readouterr()
    assert codes == [1, 0, 2, 1] and "drop_last" in output.err and "even_batches" in output.err
    assert json.loads(output.out.splitlines()[-1])["epochs"][1]["trained"] == 20


def test_a_step_that_the_optimizer_leaves_out(tmp_path):
    reset_states()
    accelerator = Accelerator(cpu=True, telemetry=tmp_path, non_finite="skip")
    run = (accelerator, *accelerator.prepare(*make_parts()))
    for number, batch in enumerate(run[3]):
        accelerator.backward(run[1](batch).mean() / (number != 1))
        run[2].step()
        run[2].zero_grad()
    accelerator.end_training()
    (epoch,) = audited(tmp_path).epochs
    assert epoch.findings == [Finding("optimizer", 4, 7, 2)]


def make_parts():
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(float(SAMPLES)).unsqueeze(1), BATCH)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), loader


def part(folder, stop, torn=0, save=None, **options):
    """A part of a run that is killed after step `stop`: nothing is closed. Returns the samples of its steps."""
    run = make(folder, resume=True, **options)
    accelerator, _, _, loader = run
    report = accelerator.resumed
    done = report.step if report else 0
    samples = {}
    for epoch in range(report.epoch if report else 0, 3):
        for batch in loader:
            indices = step(run, batch)
            done += 1
            samples[done] = epoch, indices
            if done == save:
                accelerator.save_state()
            if done == stop:
                break
        if done == stop:
            break
    accelerator._recorder.writer.flush(wait=True)
    accelerator._checkpoints._locks.release()
    if accelerator.is_main_process and torn:
        path = rows.rows_file(folder, 0)
        path.write_bytes(path.read_bytes()[:-torn])
    return samples


def test_kills_and_other_numbers_of_ranks(ranks, tmp_path):
    """2 ranks, killed after a save; 1 rank; 2 ranks: with what was torn, each sample is trained once, and padding."""
    first = ranks(2).run(part, tmp_path, 2, 100, 1)
    reset_states()
    second = [part(tmp_path, 7, save=3)]
    third = ranks(2).run(part, tmp_path, -1)
    trained = collections.defaultdict(collections.Counter)
    for result, (begin, end) in ((first, (0, 1)), (second, (1, 3)), (third, (3, 99))):
        for steps in result:
            for number, (epoch, indices) in steps.items():
                if begin < number <= end:
                    trained[epoch].update(indices)
    result = audited(tmp_path)
    assert result.attempts == 3 and [epoch.epoch for epoch in result.epochs] == [0, 1, 2]
    # Step 2 of the first attempt is torn; the second one was killed after step 7.
    assert result.redone == [(4, 7)] and not result.missing
    assert result.epochs[0].ranks == [2, 1, 2]
    for epoch in result.epochs:
        counts = trained[epoch.epoch]
        assert set(counts) == set(range(SAMPLES)) and epoch.trained == len(counts) == epoch.total
        repeated = sum(finding.last - finding.first + 1 for finding in epoch.findings)
        assert counts.total() - len(counts) == repeated
        assert {finding.reason for finding in epoch.findings} <= {"even_batches"}
    assert result.is_right(("even_batches",)) and not result.is_right()


def test_steps_that_are_missing_and_another_seed(tmp_path):
    part(tmp_path, 3, save=3)
    path = rows.rows_file(tmp_path, 0)
    path.write_bytes(path.read_bytes()[: -3 * rows.SIZE])
    part(tmp_path, 12)
    result = audited(tmp_path)
    assert result.missing == [(3, 3)]
    assert result.epochs[0].findings == [Finding("unrecorded", 8, 11)]


def test_large_numbers(tmp_path):
    """An epoch of 10^10 samples is a few rows."""
    total, half = 10**10, 5 * 10**9
    data = rows.HEADER
    for number, (begin, end) in enumerate([(0, half), (half, total), (0, half)], 1):
        step_row = rows.STEP.row(number)
        step_row["rows"], step_row["world_size"], step_row["backwards"] = 1, 8, 1
        read = rows.RANGE.row(number)
        read["epoch"], read["first"], read["last"], read["total"] = number // 3, begin, end, total
        read["samples"], read["batches"], read["flags"] = end - begin, 1, rows.LAST * (end == total)
        data += rows.STEP.pack(step_row) + rows.RANGE.pack(read)
    path = rows.rows_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(data)
    first, second = audited(tmp_path).epochs
    assert first.trained == first.samples == total and not first.findings
    assert second.trained == half and second.is_open


@pytest.mark.parametrize("content", [None, b"", b"other" * 40, rows.HEADER + b"\xff" * rows.SIZE])
def test_no_ledger(tmp_path, content, capsys):
    if content is not None:
        path = rows.rows_file(tmp_path, 0)
        path.parent.mkdir()
        path.write_bytes(content)
    if content == b"":
        assert not audited(tmp_path).epochs
        return
    with pytest.raises(ConfigurationError):
        rows.read(tmp_path)
    with pytest.raises(SystemExit) as end:
        command.main([str(tmp_path)])
    assert end.value.code == 2 and str(tmp_path) in capsys.readouterr().err
