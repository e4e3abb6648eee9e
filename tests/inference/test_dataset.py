# SPDX-License-Identifier: Apache-2.0
"""A function applied to a dataset: each result once and in order, on any number of processes, after any kill."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from rank_pool import on_ranks
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.inference import map_dataset
from accelerate.state import PartialState

SAMPLES = [
    {"input_ids": list(range(3 + 7 * number % 11)), "number": number} for number in range(50)
]
EXPECTED = [{"number": sample["number"], "sum": sum(sample["input_ids"])} for sample in SAMPLES]


def add_up(samples):
    return [{"number": sample["number"], "sum": sum(sample["input_ids"])} for sample in samples]


def read(files):
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dataset", [SAMPLES, Stream()], ids=["items", "stream"])
def test_each_result_once_and_in_order(dataset, tmp_path):
    PartialState(cpu=True)
    files = map_dataset(add_up, dataset, tmp_path / "output", batch_size=4, part_size=8)
    assert [file.name for file in files] == [f"part-0000{number}.jsonl" for number in range(7)]
    assert read(files) == EXPECTED
    # What is there already is not computed again.
    removed = files[3].read_bytes()
    PartialState().wait_for_everyone()
    files[3].unlink(missing_ok=True)
    PartialState().wait_for_everyone()
    calls = []
    again = map_dataset(
        lambda samples: calls.append(len(samples)) or add_up(samples),
        dataset,
        tmp_path / "output",
        batch_size=4,
        part_size=8,
    )
    assert again == files and files[3].read_bytes() == removed and sum(calls) in (0, 8)


@on_ranks(2)
def test_ranks_that_differ_are_refused(nproc, tmp_path):
    rank = PartialState(cpu=True).process_index
    with pytest.raises(ConfigurationError, match=r"rank 0: .*'samples': 50.*; rank 1: .*49"):
        map_dataset(add_up, SAMPLES[: 50 - rank], tmp_path)
    with pytest.raises(ConfigurationError, match="has parts but not plan"):
        (tmp_path / "part-00000.jsonl").write_text("")
        (tmp_path / "plan.json").unlink(missing_ok=True)
        PartialState().wait_for_everyone()
        map_dataset(add_up, SAMPLES, tmp_path)


KILLED = """
import os, sys
sys.path[:0] = [{tests!r}]
from accelerate.state import PartialState
from accelerate.inference import map_dataset
from test_dataset import SAMPLES, add_up
calls = 0
def compute(samples):
    global calls
    calls += 1
    if calls > {calls}:
        os.kill(os.getpid(), 9)
    return add_up(samples)
PartialState(cpu=True)
map_dataset(compute, SAMPLES, {output!r}, batch_size=4, part_size=8)
"""


@pytest.mark.parametrize("calls", [0, 3, 12])
def test_a_killed_run_goes_on_without_a_lost_or_doubled_row(calls, tmp_path):
    output = str(tmp_path / "output")
    script = KILLED.format(tests=os.path.dirname(__file__), calls=calls, output=output)
    (done,) = run_ranks(script, 1, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (tmp_path / "output" / ".part-00005.jsonl.00.tmp").write_text("what a killed process leaves")
    computed = []
    PartialState(cpu=True)
    files = map_dataset(
        lambda samples: computed.extend(samples) or add_up(samples),
        SAMPLES,
        output,
        batch_size=4,
        part_size=8,
    )
    assert read(files) == EXPECTED
    assert len(computed) == 50 - calls // 2 * 8
    assert sorted(os.listdir(output)) == [file.name for file in files] + ["plan.json"]


@pytest.fixture
def alone():
    PartialState(cpu=True)


def test_models_get_batches_of_similar_length(alone, tmp_path):
    class Model(nn.Module):
        def forward(self, ids, number):
            sizes.append(ids.shape)
            assert not torch.is_grad_enabled() and not self.training
            return {
                "mean": ids.double().mean(1),
                "twice": torch.stack([number, number], 1),
                "loss": None,
            }

    def collate(samples):
        width = max(len(sample["input_ids"]) for sample in samples)
        rows = [
            sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples
        ]
        return {
            "ids": torch.tensor(rows),
            "number": torch.tensor([sample["number"] for sample in samples]),
        }

    sizes = []
    files = map_dataset(Model(), SAMPLES, tmp_path, batch_size=8, part_size=50, collate=collate)
    rows = read(files)
    assert [row["twice"] for row in rows] == [[number, number] for number in range(50)]
    widths = [width for _, width in sizes]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) > 3


def test_a_tensor_for_each_sample(alone, tmp_path):
    data = torch.randn(10, 3, dtype=torch.double)
    model = nn.Linear(3, 2).double()
    rows = read(map_dataset(model, data, tmp_path, batch_size=3, part_size=4))
    # Batches of another size may round differently.
    outputs = torch.tensor([row["output"] for row in rows], dtype=torch.double)
    torch.testing.assert_close(outputs, model(data).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda samples: 1,
            r"the function returned an object of type int for 4 samples: return one row per sample",
        ),
        (
            lambda samples: samples[:1],
            r"the function returned an object of type list with 1 rows for 4 samples",
        ),
        (
            lambda samples: {"x": torch.zeros(3)},
            r"the function returned an object of type Tensor with 3 rows as 'x' for 4 samples",
        ),
        (
            lambda samples: [object()] * 4,
            r"the row of sample 0 cannot be written: an object of type object is not a number",
        ),
        (
            lambda samples: ["\ud800"] * 4,
            r"the row of sample 0 cannot be written: .*surrogates not allowed",
        ),
    ],
)
def test_results_that_cannot_be_written_are_named(alone, result, message, tmp_path):
    with pytest.raises(PrepareError, match=message):
        map_dataset(result, SAMPLES, tmp_path, batch_size=4, part_size=4)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_error_names_its_samples(alone, tmp_path):
    def fail(samples):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        map_dataset(fail, list("abc"), tmp_path)
    assert caught.value.__notes__ == ["map_dataset: in the batch of samples 0, 1, 2"]


def test_wrong_arguments_and_another_dataset_are_refused(alone, tmp_path):
    map_dataset(add_up, SAMPLES, tmp_path)
    for options, message in [
        ({"part_size": 0}, "part_size=0 must be at least 1"),
        ({"file_format": "csv"}, "file_format='csv' is neither 'jsonl' nor 'parquet'"),
        (
            {"part_size": 7},
            "was written with .*'part_size': 1024.*, but now it is .*'part_size': 7",
        ),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            map_dataset(add_up, SAMPLES, tmp_path, **options)
    for dataset, message in [
        (DataLoader(SAMPLES), "dataset is a DataLoader: pass its dataset and batch_size"),
        ({"train": SAMPLES}, "dataset is a dict: pass one of its datasets"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            map_dataset(add_up, dataset, tmp_path)


def test_finished_parts_of_another_model_or_dataset_are_kept_with_a_warning(alone, tmp_path):
    data, torch_model = torch.randn(4, 3), nn.Linear(3, 2)
    files = map_dataset(torch_model, data, tmp_path)
    rows = read(files)
    for model, samples, what in [
        (nn.Linear(3, 2), data, "model"),
        (torch_model, data + 1, "first sample"),
    ]:
        with pytest.warns(UserWarning, match=f"1 complete parts .*different {what}"):
            assert read(map_dataset(model, samples, tmp_path)) == rows


def test_parquet(alone, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    files = map_dataset(add_up, SAMPLES, tmp_path, part_size=20, file_format="parquet")
    assert [row for file in files for row in parquet.read_table(file).to_pylist()] == EXPECTED
