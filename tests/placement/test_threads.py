# SPDX-License-Identifier: Apache-2.0
"""Several threads call one model whose weights are kept elsewhere between forwards."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.big_modeling import attach_layerwise_casting_hooks

THREADS, FORWARDS = 4, 20


class Model(nn.Module):
    """Blocks large enough to be fetched ahead, a branch that the input selects, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.head = nn.Linear(256, 256)
        self.head.weight = self.blocks[0].weight

    def forward(self, x, branch=0):
        if branch < 0:
            raise ValueError("no such branch")
        for index in (0, 1 + branch % 3, 1 + branch % 3):
            x = torch.tanh(self.blocks[index](x))
        return self.head(x)


def spread(way, model, folder):
    if way == "disk_offload":
        return disk_offload(model, folder)
    if way == "cpu_offload":
        return cpu_offload(model)
    if way == "preloaded":
        return cpu_offload(model, preload_module_classes=["Model"])
    places = {"blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "blocks.3": "disk", "head": "disk"}
    if way == "dispatched":
        return dispatch_model(model, places, offload_dir=folder)
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    return load_checkpoint_and_dispatch(model, f"{folder}/model.safetensors", places, offload_folder=folder)


@pytest.fixture
def fast_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def run_threads(function):
    """Call `function(thread)` in all threads at a time; raises the first error."""
    start = threading.Barrier(THREADS)

    def run(number):
        start.wait(30)
        function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run, number) for number in range(THREADS)]:
            future.result(60)


def is_away(model):
    return all(parameter.is_meta for block in model.blocks[1:] for parameter in block.parameters())


@pytest.mark.parametrize("way", ["disk_offload", "cpu_offload", "preloaded", "dispatched", "loaded"])
def test_threads_get_the_outputs_of_the_resident_model(way, tmp_path, fast_switches):
    torch.manual_seed(0)
    resident = Model()
    model = spread(way, copy.deepcopy(resident), tmp_path)
    inputs = torch.randn(THREADS, FORWARDS, 8, 256)
    with torch.no_grad():
        expected = [[resident(x, index) for index, x in enumerate(part)] for part in inputs]

    @torch.no_grad()
    def work(thread):
        for index, x in enumerate(inputs[thread]):
            if index % 7 == thread:
                with pytest.raises(ValueError):
                    model(x, -1)
            if index % 5 == thread and hasattr(model.blocks[1], "_hf_hook"):
                # Other libraries call this, without the other half.
                model.blocks[1]._hf_hook.pre_forward(model.blocks[1])
            assert torch.equal(model(x, index), expected[thread][index])

    run_threads(work)
    for _ in range(2):
        run_threads(lambda thread: model(inputs[thread, 0], 0))
    assert way == "preloaded" or is_away(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(inputs[0, 0], 0), expected[0][0])


def test_a_forward_during_another_one(tmp_path):
    """While one thread is inside of a block, another calls it from beginning to end, as threads of autograd do."""
    model = disk_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path)
    x = torch.ones(1, 4)
    expected = model(x)
    former, calls = model[0]._old_forward, []

    def forward(x):
        calls.append(x)
        if len(calls) == 1:
            other = threading.Thread(target=lambda: calls.append(model(x)))
            other.start()
            other.join(30)
            assert not other.is_alive()
        return former(x)

    model[0]._old_forward = forward
    assert torch.equal(model(x), expected) and torch.equal(calls[-1], expected)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_are_cast_for_several_threads(fast_switches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    x = torch.randn(4, 64)
    expected = model(x)

    def work(thread):
        for _ in range(FORWARDS):
            assert torch.equal(model(x), expected)

    run_threads(work)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float8_e4m3fn}
