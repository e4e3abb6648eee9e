# SPDX-License-Identifier: Apache-2.0
"""Cross entropies of logits that are split over the vocabulary, against torch on whole logits."""

import functools
import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from accelerate import Accelerator
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.parallel.fsdp.copies import support_mixed_lists
from accelerate.parallel.tensor import loss as tensor_loss
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState

sys.path.append(str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

CLASSES, IGNORED = 12, -100


def both(loss_of, shape, dimension, mesh):
    """A loss of split logits, and its gradient, against those of whole ones."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    split = distribute_tensor(whole.detach().clone(), mesh, [Shard(dimension)]).requires_grad_()
    expected, found = loss_of(whole), loss_of(split)
    weight = torch.rand(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weight).sum().backward()
    (found * DTensor.from_local(weight, mesh, [Replicate()], run_check=False)).sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    assert split.grad.placements == split.placements
    torch.testing.assert_close(split.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)


def split_losses():
    """A mesh, on which losses of split logits are ours as long as the model lives."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = nn.Linear(1, 1)
    tensor_loss.split_losses_while_alive(model)
    return mesh, model


@on_ranks(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7, CLASSES), (3, CLASSES, 5), (CLASSES,)], ids=str)
def test_cross_entropies(shape, reduction, weighted):
    PartialState(cpu=True)
    mesh, _model = split_losses()
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(CLASSES, generator=generator, dtype=torch.float64) if weighted else None
    labels = torch.randint(CLASSES, [size for size in shape if size != CLASSES], generator=generator)
    if labels.ndim:
        labels[0] = IGNORED
    dimension = 0 if len(shape) == 1 else 1
    both(functools.partial(F.cross_entropy, target=labels, weight=weight, reduction=reduction), shape, dimension, mesh)


@on_ranks(2)
def test_what_is_no_cross_entropy_is_exact_as_well():
    PartialState(cpu=True)
    mesh, _model = split_losses()
    both(lambda logits: F.log_softmax(logits, -1).exp().square().sum(), (7, CLASSES), 1, mesh)
    # Logits that lie otherwise are DTensor's own affair.
    both(lambda logits: F.log_softmax(logits, -1).sum(), (8, CLASSES), 0, mesh)


@on_ranks(2)
def test_a_label_outside_of_the_vocabulary_is_refused():
    PartialState(cpu=True)
    mesh, _model = split_losses()
    split = distribute_tensor(torch.zeros(1, CLASSES), mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="none of the 12 classes"):
        F.cross_entropy(split, torch.tensor([CLASSES]))


def prepared(**options):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocabulary=CLASSES, width=16, hidden=24, layers=1))
    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(**options))
    accelerator = Accelerator(cpu=True, parallelism_config=layout)
    return accelerator, accelerator.prepare(model)


@on_ranks(2)
def test_nothing_stays():
    support_mixed_lists()  # once in a process
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    accelerator, model = prepared(loss_parallel=True)
    assert table.keys() - before.keys() == tensor_loss._OPERATIONS.keys()
    tokens = torch.randint(CLASSES, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    inside = model(inputs, labels=labels)[0]
    assert type(inside) is torch.Tensor
    for _ in range(2):
        outside = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        accelerator.backward(outside)
        torch.testing.assert_close(outside.full_tensor(), inside, rtol=0, atol=1e-6)
        with loss_parallel():
            # A block of the user's own, which clears the table at its end.
            pass
    # Another run beside it, without the option.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    other, whole = prepared()
    torch.testing.assert_close(whole(inputs, labels=labels)[0], inside, rtol=0, atol=1e-6)
    other.free_memory()
    # The model itself goes on as long as somebody holds it.
    assert F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).placements == (Replicate(),)
    (model,) = accelerator.free_memory(model)
    del accelerator, inside, outside
    gc.collect()
    assert table == before, table.keys() - before.keys()
