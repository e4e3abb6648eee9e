# SPDX-License-Identifier: Apache-2.0
"""The examples of single features: each prints the same table on one process and on two, where it says so."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from ranks import output_of

SKLEARN = importlib.util.find_spec("sklearn")
if SKLEARN is None:
    pytest.skip("scikit-learn is not installed", allow_module_level=True)

PRELOADED = ("accelerate.tracking", "torch.nn.parallel.distributed")
EXACT = [
    "cross_validation",
    "early_stopping",
    "ema",
    "gradient_weights",
    "inference",
    "matrix_optimizer",
    "metrics",
    "packed",
    "text_classification",
]


@pytest.fixture
def table(printed):
    """A function that runs an example on ranks, and returns the lines that rank 0 printed."""
    return lambda name, nproc, *arguments: printed(
        f"features/{name}", nproc, *arguments, function=with_digits
    )


def load_digits(return_X_y):
    """scikit-learn's digits from its file: importing scikit-learn in each rank takes more time than all else."""
    (folder,) = SKLEARN.submodule_search_locations
    rows = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)


def with_digits(path, *arguments):
    sys.modules["sklearn"] = importlib.util.module_from_spec(SKLEARN)
    sys.modules["sklearn.datasets"] = types.SimpleNamespace(load_digits=load_digits)
    return output_of(path, *arguments)


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_print_the_table_of_one(table, name):
    one = table(name, 1)
    assert len(one) >= 3
    assert table(name, 2) == one


def test_token_weights_are_exact_with_accumulation(table):
    _, *rows = table("gradient_weights", 2)
    columns = list(zip(*(map(float, row.split()[1:]) for row in rows), strict=True))
    assert columns[0] == columns[1] == columns[2]
    assert columns[0][0] > 5.5 and columns[0][-1] < 3.5


def test_steps_that_are_not_finite(table):
    one, two = (table("non_finite", nproc) for nproc in (1, 2))
    assert one == two
    _, ignored, skipped = (line.split() for line in one)
    assert ignored[3] == "nan" and skipped[2] == "9" and float(skipped[4]) > 0.85


def test_early_stopping_stops_early(table):
    stopped = re.search(r"stopped after epoch (\d+) of", table("early_stopping", 2)[-1])
    assert 3 <= int(stopped[1]) < 19


def test_lora(table, tmp_path):
    one = table("lora", 1)
    assert table("lora", 2, "--output", tmp_path) == one
    full, adapted = one[3].split(), one[-1].split()
    assert int(adapted[2]) < int(full[2]) / 2
    assert float(adapted[4]) > 0.8 > float(full[4])
    assert (tmp_path / "adapter.safetensors").stat().st_size < 20_000


def test_tracking(table, tmp_path):
    one = table("tracking", 1, "--output", tmp_path / "1")
    assert len(one) == 5
    assert table("tracking", 2, "--output", tmp_path / "2") == one


def test_a_stopped_run_prints_the_table_of_one_that_was_not(table, tmp_path):
    whole = table("resume", 1, "--output", tmp_path / "whole")
    assert table("resume", 1, "--output", tmp_path / "run", "--stop_after", 70) == [
        "stopped after step 70"
    ]
    assert table("resume", 2, "--output", tmp_path / "run") == whole
    assert len(whole) == 5


def test_profiling(table, tmp_path):
    lines = table("profiling", 2, "--output", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"profile_0.json", "profile_1.json"}
    assert any(re.match(r"aten::conv2d +2 ", line) for line in lines)


def test_local_sgd_leaves_equal_parameters(table):
    _, *rows = table("local_sgd", 2)
    assert [row.split()[3] for row in rows] == ["0.0e+00"] * 3
    assert len({row.split()[1] for row in rows}) == 3
    assert all(float(row.split()[2]) > 0.8 for row in rows)


def test_comm_hooks_change_the_parameters_a_little(table):
    _, none, fp16, bf16 = table("comm_hooks", 2)
    assert float(none.split()[3]) == 0 < float(fp16.split()[3]) < float(bf16.split()[3]) < 0.1
