# SPDX-License-Identifier: Apache-2.0
"""The parallel example as it is, in its layouts on 4 ranks, against a loop of plain PyTorch, to 1e-8."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from accelerate.state import PartialState
from accelerate.utils import set_seed

sys.path.append(str(Path(__file__).parents[2] / "examples" / "parallel"))
import train

STEPS, ACCUMULATION, BATCH, LENGTH = 3, 2, 8, 16
LAYOUTS = [layout for layout in train.LAYOUTS if not layout.startswith("zero")]
# Other layouts contain these, or tests/parallel runs them on 4 ranks.
REPEATED = {"fsdp", "hsdp", "tp", "dp_tp", "cp", "sp", "pp", "pp_dp"}
PRELOADED = ("transformers.models.llama.modeling_llama", "accelerate.parallel.pipeline.strategy")


def plain(kind):
    """What the example's defaults train, over batches in the order of the text."""
    set_seed(0)
    model, _ = train.make_model(kind, LENGTH)
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    for number, batch in enumerate(
        DataLoader(train.Windows(LENGTH), batch_size=BATCH, drop_last=True), start=1
    ):
        output = model(input_ids=batch["input_ids"])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == STEPS * ACCUMULATION:
            return model.state_dict()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A function from a kind of model to the folder with its trained parameters."""
    root = tmp_path_factory.mktemp("expected")

    def folder(kind):
        file = root / kind / "parameters.safetensors"
        if not file.exists():
            file.parent.mkdir()
            save_file({name: value.contiguous() for name, value in plain(kind).items()}, file)
        return file.parent

    return folder


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in REPEATED else ())
        for name in LAYOUTS
    ],
)
def test_own_model(layout, expected, ranks, logs_no_mistake):
    case = ranks(4)
    case.run(check, layout, "own", expected("own"), env={"ACCELERATE_USE_CPU": "true"})
    logs_no_mistake(case.outputs)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_of_transformers(layout, expected, ranks):
    pytest.importorskip("transformers")
    ranks(4).run(
        check, layout, "transformers", expected("transformers"), env={"ACCELERATE_USE_CPU": "true"}
    )


def check(layout, kind, folder):
    # Batches in the order of the text.
    train.DataLoader = lambda *args, shuffle, **kwargs: DataLoader(*args, **kwargs)
    options = f"--dtype float64 --model {kind} --steps {STEPS} --length {LENGTH} --compare {folder} --explain"
    sys.argv = ["train.py", "--layout", layout, *options.split()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train.main()
    text = printed.getvalue()
    if PartialState().is_main_process:
        assert (
            float(re.search(rf"{layout}: parameters differ by at most (\S+)", text)[1]) <= 1e-8
        ), text
        assert text.count("optimizer state") == 4, text
