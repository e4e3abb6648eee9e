# SPDX-License-Identifier: Apache-2.0
"""What users' tests call: conditions, launching, cases, the small regression."""

from __future__ import annotations

import sys
import unittest

import numpy
import pytest
import torch

from accelerate import test_utils
from accelerate.test_utils import testing


def test_every_name_is_there_in_both_places() -> None:
    for name in testing.__all__:
        assert getattr(testing, name) is getattr(test_utils, name), name


def test_conditions_skip_with_a_reason() -> None:
    class Case(unittest.TestCase):
        @test_utils.require_npu
        def test_needs_what_is_not_here(self) -> None:
            raise AssertionError("must not run")

        @test_utils.require_torch_min_version(version="2.0")
        def test_runs(self) -> None:
            pass

        @test_utils.slow
        def test_slow(self) -> None:
            raise AssertionError("must not run")

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert result.testsRun == 3 and result.wasSuccessful()
    slow, npu = sorted(reason for _, reason in result.skipped)
    assert "RUN_SLOW=1" in slow and "npu" in npu
    with pytest.raises(ValueError, match="version="):
        test_utils.require_torch_min_version(Case.test_runs)


def test_the_launcher_command() -> None:
    command = test_utils.get_launch_command(
        num_processes=2, mixed_precision="bf16", cpu=True, debug=False, port=None
    )
    assert command == [
        "accelerate",
        "launch",
        "--num_processes=2",
        "--mixed_precision=bf16",
        "--cpu",
    ]
    assert test_utils.DEFAULT_LAUNCH_COMMAND[:2] == ["accelerate", "launch"]


def test_commands_return_their_output_or_fail_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    good = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"]
    bad = [sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"]
    found = test_utils.execute_subprocess_async(good)
    assert (found.returncode, found.stdout, found.stderr) == (0, ["out"], ["err"])
    assert "Running: " in capsys.readouterr().out
    assert set(test_utils.run_command(good, return_stdout=True).split()) == {"out", "err"}
    with pytest.raises(RuntimeError, match=r"returncode 3(.|\n)*why"):
        test_utils.execute_subprocess_async(bad, echo=False, quiet=True)
    with pytest.raises(test_utils.SubprocessCallException, match=r"exit code 3(.|\n)*why"):
        test_utils.run_command(bad)


def test_exceptions_and_output_are_caught() -> None:
    with test_utils.assert_exception(KeyError, "name"):
        raise KeyError("the name")
    with (
        pytest.raises(AssertionError, match="Expected message"),
        test_utils.assert_exception(KeyError, "other"),
    ):
        raise KeyError("the name")
    with pytest.raises(AssertionError, match="no exception"), test_utils.assert_exception(KeyError):
        pass
    assert test_utils.capture_call_output(print, "a", "b", sep="-") == "a-b\n"


def test_folders_are_emptied_between_tests() -> None:
    class Case(test_utils.TempDirTestCase):
        def test_one(self) -> None:
            assert list(self.tmpdir.iterdir()) == []
            (self.tmpdir / "folder").mkdir()
            (self.tmpdir / "file").touch()

        test_two = test_one

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert result.testsRun == 2 and result.wasSuccessful(), result.errors + result.failures
    assert not Case.tmpdir.exists()


def test_the_regression() -> None:
    data = test_utils.RegressionDataset(a=2, b=3, length=4096, seed=1)
    assert len(data) == 4096 and data[0]["x"].dtype == numpy.float32
    assert data[5] == test_utils.RegressionDataset(a=2, b=3, length=4096, seed=1)[5]
    slope, offset = numpy.polyfit(data.x, data.y, 1)
    assert abs(slope - 2) < 0.02 and abs(offset - 3) < 0.02
    model = test_utils.RegressionModel(a=2, b=3, double_output=True)
    once, twice = model(torch.tensor([1.0, 2.0]))
    assert once.tolist() == [5.0, 7.0] and twice.tolist() == [10.0, 14.0]


def test_one_process_holds_the_same_tensor_as_itself() -> None:
    assert test_utils.are_the_same_tensors(torch.arange(3))
