# SPDX-License-Identifier: Apache-2.0
"""Activations and optimizer states in host memory: the steps are those of a plain loop, on every number of ranks."""

from __future__ import annotations

import types

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.parallel.activation import ActivationOffload, SavedInHostMemory, _InHostMemory
from accelerate.parallel.optimizer_step import StreamedState, offload_state
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    OptimizerOffloadKwargs,
    is_torch_version,
)

pytestmark = pytest.mark.usefixtures("float64")
STEPS = 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def batches():
    torch.manual_seed(1)
    return torch.randn(STEPS, 8, 6), torch.randn(STEPS, 8, 3)


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for x, y in zip(*batches(), strict=True):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def options(layout):
    if layout == "ddp":
        return {}
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=2, activation_checkpointing=False
        )
    }


@on_ranks(1, 2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_both_options_train_as_a_plain_loop_and_say_what_they_do(layout, nproc):
    handlers = [OptimizerOffloadKwargs()] if layout == "ddp" else []
    accelerator = Accelerator(
        cpu=True, transforms=["activation_offload"], kwargs_handlers=handlers, **options(layout)
    )
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = slice(
        accelerator.process_index * 8 // nproc, (accelerator.process_index + 1) * 8 // nproc
    )
    for x, y in zip(*batches(), strict=True):
        accelerator.backward(nn.functional.mse_loss(model(x[rows]), y[rows]))
        optimizer.step()
        optimizer.zero_grad()
    for name, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(value, plain()[name].detach(), rtol=0, atol=1e-8)
    report = accelerator.explain()
    assert report.find("run", "activation_offload").startswith("nothing to do: on the CPU")
    if handlers:
        assert report.find("run", "optimizer_offload") == "given"


class Counted(SavedInHostMemory):
    """Moves tensors of the CPU to copies there, and counts them."""

    def __init__(self, minimum=0):
        super().__init__(torch.device("cpu"), minimum)
        self.moved, self.returned = 0, 0

    def to_host(self, tensor):
        self.moved += 1
        return _InHostMemory(tensor.clone(), None, tensor.device)

    def to_device(self, saved):
        self.returned += 1
        return saved.host.clone()


def gradients(hooks, recompute=False):
    model = build()
    x, _ = batches()
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        hidden = checkpoint(model[:3], x[0], use_reentrant=False) if recompute else model[:3](x[0])
        loss = model[3:](hidden).square().sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_saved_tensors_other_than_parameters_are_moved(recompute):
    expected, hooks = gradients(Counted(minimum=1 << 30)), Counted()
    for found, right in zip(gradients(hooks, recompute), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    # Without recomputation the inputs of two products and of GELU, and below: Tanh, a product, and the square.
    # torch 2.11 recomputes the input of the square too.
    assert hooks.moved == hooks.returned == (4 + is_torch_version("<", "2.12") if recompute else 6)
    small = Counted(minimum=8 * 16 * 8)
    gradients(small)
    assert small.moved == 4  # not the inputs of the model, nor its outputs


def test_the_forward_of_a_model_is_wrapped(monkeypatch):
    """As on an accelerator, with copies that stay on the CPU."""
    hooks = Counted()
    device = types.SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("accelerate.parallel.activation.PartialState", lambda: device)
    monkeypatch.setattr("accelerate.parallel.activation.SavedInHostMemory", lambda *_: hooks)
    transform, model = ActivationOffload(), build()
    x, _ = batches()
    expected = torch.autograd.grad(model(x[0]).sum(), model.parameters())
    assert transform.apply(model) is model and "in host memory" in transform.describe()
    found = torch.autograd.grad(model(x[0]).sum(), model.parameters())
    assert hooks.moved == hooks.returned == 5
    assert all(map(torch.equal, found, expected))


@on_ranks(2)
def test_a_dtensor_is_moved_as_its_local_part():
    Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    mesh, hooks = init_device_mesh("cpu", (2,)), Counted()
    full = torch.arange(8.0).view(4, 2)
    packed = hooks.pack(distribute_tensor(full, mesh))
    found = hooks.unpack(packed)
    assert hooks.moved == 1 and isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), full)


class OnCpu(StreamedState):
    """The chunks of a step, with copies that are counted and go nowhere."""

    def __init__(self, chunk):
        super().__init__(chunk)
        self.arrived, self.left = [], []

    def to_device(self, optimizer, parameters):
        self.arrived.append(len(parameters))

    def wait(self, arrived):
        pass

    def to_host(self, optimizer, parameters):
        self.left.append(len(parameters))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam])
def test_a_step_in_chunks_is_the_step(kind, monkeypatch):
    monkeypatch.setattr("accelerate.parallel.optimizer_step.StreamedState", OnCpu)
    found = []
    for chunk in (None, 1, 5000):
        model = build()
        # Two groups with options of their own, and a parameter without a gradient.
        groups = [{"params": [*model[0].parameters(), *model[2].parameters()]},
                  {"params": [*model[4].parameters(), nn.Parameter(torch.ones(3))], "lr": 0.01}]  # fmt: skip
        optimizer = kind(groups, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if chunk is not None:
            offload_state(optimizer, chunk)
        for x, y in zip(*batches(), strict=True):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if chunk is not None:
            streamed = optimizer._streamed_state
            assert (
                streamed.arrived == streamed.left == ([1] * 6 if chunk == 1 else [2, 2, 2]) * STEPS
            )
        found.append((list(model.parameters()), optimizer.state_dict()))
    for parameters, state in found[1:]:
        for own, right in zip(parameters, found[0][0], strict=True):
            torch.testing.assert_close(own, right, rtol=0, atol=0)
        assert state["state"].keys() == found[0][1]["state"].keys()
        assert state["param_groups"] == found[0][1]["param_groups"]


def test_what_cannot_be_offloaded_is_an_error():
    with pytest.raises(PrepareError, match=r"LBFGS may not .*ASGD, Adadelta"):
        offload_state(torch.optim.LBFGS(build().parameters()))
    with pytest.raises(ConfigurationError, match="chunk_size=0"):
        OptimizerOffloadKwargs(chunk_size=0)
    for arguments, message in [
        (
            {"dynamo_backend": "eager"},
            "ActivationOffload does not work with dynamo_backend='eager'|EAGER",
        ),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            Accelerator(cpu=True, transforms=["activation_offload"], **arguments)
    with pytest.raises(
        ConfigurationError, match=r"registers a transform 'activation_ofload'.*activation_offload"
    ):
        Accelerator(cpu=True, transforms=["activation_ofload"])
