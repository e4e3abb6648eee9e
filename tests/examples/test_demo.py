# SPDX-License-Identifier: Apache-2.0
"""The demonstration, with a small model and few steps: the run is killed, resumed, and ends at the same losses."""

import re
import sys

import pytest


@pytest.mark.timeout(300)
def test_the_run_is_killed_and_resumed(example, tmp_path, monkeypatch, capfd):
    demo = example("demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SAVE_EVERY", 150)
    monkeypatch.setattr(demo, "KILL_AT", 170)
    options = [
        "--width",
        "16",
        "--layers",
        "1",
        "--heads",
        "2",
        "--max_steps",
        "400",
        "--eval_every",
        "400",
    ]
    monkeypatch.setattr(sys, "argv", ["demo.py", *options, "--eval_samples", "7"])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    output = "".join(capfd.readouterr())
    assert ended.value.code is False, output
    assert re.search(r"accelerate: resumed \S+checkpoint_0: epoch 0, step 150", output)
    assert "Steps 151 to " in output
    before, after = re.findall(r"The loss of step \d+ was (\d+\.\d{10})", output)
    assert before == after
    assert "equal to the last bit" in output
    assert not re.search("warning|error|traceback", output, re.IGNORECASE), output
