# SPDX-License-Identifier: Apache-2.0
"""The curve of the README is the same on one process and on several."""

import re
from pathlib import Path

from ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


def test_the_curve_of_the_readme(script, logs_no_mistake):
    rows = re.findall(r"^\| epoch \d \| (.+) \|$", README.read_text(), re.MULTILINE)
    expected = [row.split(" | ") for row in rows]
    columns = {"one": 0, "two": 1, "default": 3}
    arguments = {"one": (1,), "two": (2,), "default": (2, "--default")}
    for name, column in columns.items():
        outputs = run_ranks(script("exact"), *arguments[name], env={"ACCELERATE_USE_CPU": "true"})
        logs_no_mistake(outputs)
        losses = [float(text) for text in re.findall(r"loss (\S+)", outputs[0].stdout)]
        assert len(losses) == 4
        for loss, row in zip(losses, expected, strict=True):
            assert abs(loss - float(row[column])) < 2e-5, (name, losses)
