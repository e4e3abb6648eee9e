"""Tests of the training script."""

from pathlib import Path

from accelerate.test_utils import assert_same_run

SCRIPT = Path(__file__).with_name("train.py")


def test_two_processes(tmp_path: Path) -> None:
    """Two processes train the same model as one."""
    assert_same_run(SCRIPT, layouts=["ddp:2"], arguments=["--output", tmp_path])
