# SPDX-License-Identifier: Apache-2.0
"""A loss that the model computes on logits sharded over the vocabulary, against the plain model in float64."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rank_pool import on_ranks
from torch.distributed.tensor import DTensor

from accelerate import Accelerator
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallelism_config import ParallelismConfig

sys.path.append(str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

CLASSES, IGNORED = 12, -100
pytestmark = pytest.mark.usefixtures("float64")


def make():
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocabulary=CLASSES, width=16, hidden=24, layers=1))


def gradients(model):
    return {
        name: parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


@on_ranks(2)
def test_losses_inside_and_outside_of_the_model():
    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(loss_parallel=True))
    accelerator = Accelerator(cpu=True, parallelism_config=layout)
    model, plain = accelerator.prepare(make()), make()
    tokens = torch.randint(CLASSES, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :3] = IGNORED
    plain(inputs, labels=labels)[0].backward()
    expected = gradients(plain)

    def check(loss):
        model.zero_grad()
        accelerator.backward(loss)
        torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-8)

    loss, logits = model(inputs, labels=labels)[:2]
    assert (
        type(loss) is torch.Tensor
        and isinstance(logits, DTensor)
        and logits.to_local().shape[-1] == CLASSES // 2
    )
    check(loss)
    logits = model(inputs)
    logits = logits if isinstance(logits, torch.Tensor) else logits[-1]
    assert type(logits) is torch.Tensor and logits.shape[-1] == CLASSES
    check(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    with torch.no_grad():
        assert not any(isinstance(value, DTensor) for value in model(inputs, labels=labels))
