# SPDX-License-Identifier: Apache-2.0
"""Frequent errors of torch get a line that says what to do about them; their class and message stay torch's."""

import re
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator, ParallelismConfig
from accelerate.core.errors import add_remedy


class Branches(nn.Module):
    """The second branch has no part in the output."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


def vector(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)))


def detached(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)).sum().detach())


def number(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)).sum().item())


@pytest.mark.parametrize(
    "step, kind, message, remedy",
    [
        (vector, RuntimeError, "scalar outputs", "`loss.mean\\(\\)`"),
        (detached, RuntimeError, "does not require grad", r"`\.detach\(\)`"),
        (number, AttributeError, "'float' object has no attribute 'backward'", "not a number"),
    ],
)
def test_the_remedy_of_a_loss_is_below_the_error(step, kind, message, remedy):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(kind, match=message) as caught:
        step(accelerator, model, optimizer)
    (note,) = caught.value.__notes__
    assert re.search(remedy, note) and "accelerator.backward" in note and "\n" not in note
    assert type(caught.value) is kind


def prepared():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


WRONG = {
    "precision": lambda path: Accelerator(mixed_precision="x"),
    "rng_types": lambda path: Accelerator(rng_types=["x"]),
    "dynamo": lambda path: Accelerator(dynamo_backend="x"),
    "handler": lambda path: Accelerator(cpu=True, kwargs_handlers=[3]),
    "plugin": lambda path: Accelerator(cpu=True, fsdp_plugin=3),
    "sizes": lambda path: Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=3)),
    "size": lambda path: ParallelismConfig(tp_size=-1),
    "accumulation": lambda path: Accelerator(cpu=True, gradient_accumulation_steps=0),
    "tracker": lambda path: Accelerator(cpu=True, log_with="x"),
    "prepare": lambda path: Accelerator(cpu=True).prepare(nn.Linear(1, 1), forward_methods=["x"]),
    "model": lambda path: Accelerator(cpu=True).prepare_model(3),
    "text": lambda path: prepared()[0].backward("x"),
    "vector": lambda path: vector(*prepared()),
    "folder": lambda path: prepared()[0].save_state(str(path)),
    "folder type": lambda path: prepared()[0].save_state(3),
    "absent": lambda path: prepared()[0].load_state(f"{path}/absent"),
    "norm": lambda path: prepared()[0].clip_grad_norm_(torch.ones(1), "x"),
    "config": lambda path: Accelerator(cpu=True, log_with="local", project_dir=path.parent)
    .init_trackers("x", config=3),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_raised_where_the_user_called(case, tmp_path):
    """The traceback begins in the user's line and ends in the public method, or one call below it."""
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(Exception) as caught:
        WRONG[case](path)
    # Without the line that stands for the interpreter's own.
    lines = traceback.format_exception(caught.type, caught.value, caught.tb.tb_next)
    lines = [line for text in lines for line in text.splitlines() if line.strip(" ~^")]
    assert len(lines) <= 12, "\n".join(lines)


def test_an_error_inside_of_a_public_method_keeps_its_traceback(tmp_path):
    """Only what a wrong argument causes is cut."""

    class Broken(nn.Module):
        def to(self, *args, **kwargs):
            raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own") as caught:
        Accelerator(cpu=True).prepare(Broken())
    assert traceback.extract_tb(caught.tb)[-1].name == "to"


class Elsewhere(torch.autograd.Function):
    """Its backward has the mistake that it is told to make."""

    @staticmethod
    def forward(ctx, x, mistake):
        ctx.mistake = mistake
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.mistake(), None


def another_device():
    raise RuntimeError("Expected all tensors to be on the same device, but got cuda:0 and cpu")


def another_tensor():
    torch.autograd.backward(torch.ones(2))


def another_vector():
    with torch.enable_grad():
        torch.autograd.backward(torch.ones(2, requires_grad=True) * 2)


def another_object():
    return (3.0).backward()


@pytest.mark.parametrize(
    "mistake", [another_device, another_tensor, another_vector, another_object]
)
def test_an_error_in_a_backward_of_the_users_own_keeps_its_line(mistake):
    """The remedy is added, and the traceback has the line that is wrong; also under recomputation."""
    accelerator, model, _ = prepared()

    def block(x):
        return Elsewhere.apply(model(x), mistake)

    recomputed = torch.utils.checkpoint.checkpoint(block, torch.ones(2, 4), use_reentrant=False)
    for output in (block(torch.ones(2, 4)), recomputed):
        with pytest.raises((RuntimeError, AttributeError)) as caught:
            accelerator.backward(output.sum())
        frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert mistake.__name__ in frames
        assert caught.value.__notes__[0].startswith("accelerate: ")


def test_an_uncaught_error_has_its_remedy_too(capsys):
    """Where the error is raised outside of this package, the hook of uncaught exceptions adds the line."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(AssertionError) as unscaled:
        optimizer.step()
    elsewhere = RuntimeError(
        "Expected all tensors to be on the same device, but got cuda:0 and cpu"
    )
    for error, remedy in (
        (unscaled.value, "accelerator.backward(loss)"),
        (elsewhere, "accelerator.device"),
    ):
        sys.excepthook(type(error), error, error.__traceback__)
        # With the rank before it, once for each process group that earlier tests have made.
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.match(r"(\[rank\d+\]: )*accelerate: ", last) and remedy in last


def test_parameters_that_a_step_leaves_out_under_ddp():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Branches())
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(
            RuntimeError, match="finished reduction in the prior iteration"
        ) as caught:
            model(torch.ones(2, 4))
    finally:
        dist.destroy_process_group()
    for _ in range(2):
        add_remedy(caught.value)
    text = "".join(traceback.format_exception(caught.value)).strip()
    assert "find_unused_parameters=True" in text.splitlines()[-1]
    assert text.count("DistributedDataParallelKwargs") == 1
