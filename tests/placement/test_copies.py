# SPDX-License-Identifier: Apache-2.0
"""Weights are copied to a slow device while it computes: values, order, memory, and what is left afterwards."""

import copy
import functools
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_device import slow_device
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from accelerate.placement import copies, offload
from accelerate.placement.copies import FetchRequest
from accelerate.placement.streaming import WeightStream
from accelerate.torch_internals.saved_tensors import outer_hooks

WIDTH = 256  # a large weight of a block takes 1.5 MiB in float64
LARGEST = (3 * WIDTH * WIDTH + 3 * WIDTH) * 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Table(nn.Module):
    """Returns a view of its weight, which lives longer than its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self):
        return self.weight[1:3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x, order=(0, 1, 2, 3)):
        x = self.first(x)
        for number in order:
            if number is None:
                raise RuntimeError("inside the forward")
            x = self.blocks[number](x)
        return self.last(x), self.table()


ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (3, 1), (2, 2, 1), (0, 1, 2, 3), (1,), (0, 1, 2, 3)]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double().eval()


def batch(**options):
    return torch.randn(3, WIDTH, dtype=torch.double, **options)


def weight_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")]


def offloaded(net, how, folder):
    if how == "disk":
        return disk_offload(copy.deepcopy(net), folder / "weights")
    if how == "mixed":
        places = {"table": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk"}
        places |= {"blocks.3": "disk", "first": "disk", "last": "disk"}
        return dispatch_model(copy.deepcopy(net), places, offload_dir=folder / "weights")
    return cpu_offload(copy.deepcopy(net))


@pytest.mark.parametrize("how", ["locked", "not allowed", "no page locks", "disk", "mixed"])
@torch.no_grad()
def test_outputs_memory_and_what_is_left(how, net, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(copies, "CHUNK", 2**18)
    options = {"page_locks": how != "no page locks", "allowed": how != "not allowed"}
    copies._warn_once.cache_clear()
    with slow_device(monkeypatch, delay=0.0003, **options) as device:
        model = offloaded(net, how, tmp_path)
        tables = []
        for order in ORDERS:
            x = batch()
            output, table = model(x, order)
            assert torch.equal(output, net(x, order)[0])
            tables.append(table)
        # What a forward returned was not overwritten.
        assert all(torch.equal(table, net.table.weight[1:3]) for table in tables)
        del tables, table
        assert bool(device.locked) == (how == "locked")
        assert bool(weight_threads()) == (how != "locked")
        assert ("page-locked" in caplog.text) == (how == "not allowed")
        for number in range(50 if how in ("locked", "no page locks") else 10):
            x = batch()
            assert torch.equal(model(x)[0], net(x)[0])
            if number == 1:
                before = device.allocations
                device.peak = 0
        assert device.allocations == before
        assert LARGEST < device.peak <= 2 * LARGEST
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x)[0], net(x)[0])
        for copied in (twin, model):
            remove_hook_from_submodules(copied)
            assert torch.equal(copied(x)[0], net(x)[0])
        # At once, and not when the models are collected.
        assert not device.locked and not weight_threads()
        gc.collect()
        assert device.used == 0
    assert caplog.text.count("page-locked") <= 1


@torch.no_grad()
def test_modules_are_fetched_in_their_order_and_ahead(net, monkeypatch):
    monkeypatch.setattr(copies, "SMALL", 1)
    with slow_device(monkeypatch) as device:
        model = cpu_offload(net)
        model(batch())
        first = list(device.fetched)
        assert len(first) == len(set(first)) == 15
        model(batch())
        device.fetched.clear()
        for _ in range(3):
            model(batch())
        # At the end of a forward the first modules of the next are on their way.
        begun = device.fetched
        assert sorted(begun[:15]) == sorted(first) and begun == 3 * begun[:15]
        start = begun.index(first[0])
        assert begun[start : start + 15] == first and start > 0
        # All in the first pass, and in the second those that follow a new pair.
        assert device.late == [*first, *first[:2]]


@torch.no_grad()
def test_an_error_inside_the_forward_leaves_nothing(net, monkeypatch):
    with slow_device(monkeypatch) as device:
        model = cpu_offload(copy.deepcopy(net))
        for grad in (False, True):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="inside"):
                model(batch(requires_grad=grad), (0, 1, None))
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"shape|size"):
                model(batch(requires_grad=grad)[:, :5])
        assert outer_hooks() is None
        gc.collect()
        assert device.used <= 2 * LARGEST
        assert all(parameter.is_meta for parameter in model.parameters())
        x = batch()
        assert torch.equal(model(x)[0], net(x)[0])
        del model
        gc.collect()
        assert device.used == 0 and not device.locked


class Adapter(nn.Module):
    """LoRA around a frozen layer."""

    def __init__(self, base, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features, generator=generator).double())
        self.b = nn.Parameter(torch.randn(base.out_features, 4, generator=generator).double())

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t() * 0.01


def adapted(model):
    model.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        block.up = Adapter(block.up, number)
        block.down = Adapter(block.down, 10 + number)
    return model


def recomputed(model, use_reentrant):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    return model


@pytest.mark.parametrize("kind", ["locked", "disk", "reentrant", "not reentrant", "outer hooks"])
def test_adapters_train_on_a_streamed_base(kind, net, tmp_path, monkeypatch):
    resident = adapted(copy.deepcopy(net))
    seen = []

    def count(tensor):
        seen.append(tensor)
        return tensor

    def unchanged(tensor):
        return tensor

    with slow_device(monkeypatch, delay=0.0003) as device:
        model = adapted(offloaded(net, kind, tmp_path))
        if "reentrant" in kind:
            recomputed(model, kind == "reentrant")
        for step in range(4):
            device.fetched.clear()
            x = batch(requires_grad=True)
            y = x.detach().clone().requires_grad_()
            if kind == "outer hooks":
                with torch.autograd.graph.saved_tensors_hooks(count, unchanged):
                    output = model(x)[0]
            else:
                output = model(x)[0]
            if step == 2:
                device.peak = 0
            output.square().sum().backward()
            resident(y)[0].square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-10)
            trained = {n: p for n, p in resident.named_parameters() if p.requires_grad}
            for name, parameter in model.named_parameters():
                if name in trained:
                    wanted = trained[name].grad
                    torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-10)
            assert len(trained) == 16
        # A recomputed block keeps what it has computed with until its backward is done.
        modules = 3 if "reentrant" in kind else 2
        assert device.peak <= modules * LARGEST
        if kind == "locked":
            large = [name for name in device.fetched if "up" in name or "down" in name]
            forward = [f"blocks.{n}.{leaf}." for n in range(4) for leaf in ("up", "down")]
            assert large == forward + forward[::-1]
        if kind == "outer hooks":
            # Activations go to them, and no weight that was fetched.
            shapes = {tuple(tensor.shape) for tensor in seen}
            assert (3, WIDTH) in shapes and (3 * WIDTH, WIDTH) not in shapes
        del output
        remove_hook_from_submodules(model)
        gc.collect()
        assert device.used == 0 and not device.locked and not weight_threads()


def test_gradients_of_all_kinds(net, monkeypatch):
    """Those of torch.func, of gradients, twice from one graph, and after the hooks are removed."""
    twin = copy.deepcopy(net)

    def gradients(model, start):
        def loss(x):
            return model(x)[0].square().sum()

        found = [torch.func.grad(loss)(start)]
        x = start.clone().requires_grad_()
        found += torch.autograd.grad(loss(x), x, create_graph=True)
        found += torch.autograd.grad(found[-1].square().sum(), x)
        graph = loss(x)
        for keeps in (True, False):
            found += torch.autograd.grad(graph, x, retain_graph=keeps)
        graph = loss(x)
        remove_hook_from_submodules(model)
        found += torch.autograd.grad(graph, x)
        return found

    with slow_device(monkeypatch, delay=0.0003) as device:
        start = batch()
        for ours, wanted in zip(
            gradients(cpu_offload(net), start), gradients(twin, start), strict=True
        ):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
        assert not device.locked and not weight_threads()


def test_after_inference_mode_training_goes_on(net, monkeypatch):
    twin = copy.deepcopy(net)
    with slow_device(monkeypatch):
        model = cpu_offload(net)
        for _ in range(2):
            with torch.inference_mode():
                assert torch.equal(model(batch())[1], twin.table.weight[1:3])
            x = batch(requires_grad=True)
            y = x.detach().clone().requires_grad_()
            model(x)[0].sum().backward()
            twin(y)[0].sum().backward()
            assert torch.equal(x.grad, y.grad)


@torch.no_grad()
def test_weights_that_are_written_between_forwards_are_copied_again(net, monkeypatch):
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    with slow_device(monkeypatch):
        model = cpu_offload(copy.deepcopy(net), state_dict=weights)
        for _ in range(4):
            x = batch()
            assert torch.equal(model(x)[0], net(x)[0])
            for name, value in net.state_dict().items():
                if name != "last.weight":
                    value.mul_(1.25)
                weights[name].mul_(1.25)


@torch.no_grad()
def test_what_is_not_locked(net, tmp_path, monkeypatch):
    """Files that are mapped, values that a mapping makes anew, and what is pinned already."""
    save_file(
        {name: value for name, value in net.state_dict().items() if name != "last.weight"},
        tmp_path / "w",
    )
    mapped = {**load_file(tmp_path / "w"), "last.weight": net.last.weight}

    class Anew(dict):
        def __getitem__(self, name):
            return super().__getitem__(name).clone()

        def get(self, name, default=None):
            return self[name]

    with slow_device(monkeypatch) as device:
        x = batch()
        for weights in (mapped, Anew(net.state_dict())):
            model = cpu_offload(copy.deepcopy(net), state_dict=weights)
            for _ in range(2):
                assert torch.equal(model(x)[0], net(x)[0])
            assert len(device.locked) <= 1
        pinned = {name: device.pin(value) for name, value in net.state_dict().items()}
        model = cpu_offload(copy.deepcopy(net), state_dict=pinned)
        assert torch.equal(model(x)[0], net(x)[0])
        assert not any(value.data_ptr() in device.locked for value in pinned.values())


@pytest.mark.parametrize("how", ["memory", "disk", "mixed"])
def test_a_transformers_model_generates_with_a_cache(how, tmp_path, monkeypatch):
    """Each token costs one forward: no weight is copied twice in it, and none late after the second."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(copies, "SMALL", 1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=how == "memory",
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    prompt = torch.randint(3, 97, (2, 7))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options["attention_mask"] = torch.ones_like(prompt)
    tokens = model.generate(prompt, **options)
    with slow_device(monkeypatch, delay=0.0002) as device:
        if how == "memory":
            cpu_offload(model)
        elif how == "disk":
            disk_offload(model, tmp_path)
        else:
            places = {"model": "cpu", "model.layers": "disk", "model.layers.1": "cpu"}
            dispatch_model(model, {**places, "lm_head": "disk"}, offload_dir=tmp_path)
        for _ in range(3):
            assert torch.equal(model.generate(prompt, **options), tokens)
        modules = len(set(device.fetched))
        assert modules == {"memory": 30, "disk": 30, "mixed": 19}[how]
        assert len(device.late) <= modules + 2
        # The last forward has begun to fetch for another one.
        assert 24 * modules <= len(device.fetched) <= 25 * modules
        assert device.used < sum(value.nbytes for value in device.blocks.values())
        remove_hook_from_submodules(model)


class Noting(nn.Linear):
    """Notes where its weights are."""

    used: ClassVar = []

    def forward(self, x):
        self.used.extend(parameter.data_ptr() for parameter in self.parameters())
        return super().forward(x)


@torch.no_grad()
def test_on_the_cpu_nothing_is_copied():
    model = nn.Sequential(Noting(WIDTH, WIDTH), Noting(WIDTH, WIDTH))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    cpu_offload(model)(torch.ones(2, WIDTH))
    assert Noting.used == addresses


@pytest.mark.parametrize("order", [range(8), (0, 1, 2, 0, 3, 4, 1, 5)], ids=["same", "changing"])
def test_two_modules_are_on_the_device_however_far_the_process_is_ahead(order, monkeypatch):
    monkeypatch.setattr(copies, "CHUNK", 2**20)
    size = 2**21
    computed = []
    with slow_device(monkeypatch, far_behind=True, delay=0.003) as device:
        # Half of the modules are in files.
        memory = {str(number): torch.full((size // 4,), float(number)) for number in range(8)}

        class Source(dict):
            def __getitem__(self, name):
                value = super().__getitem__(name)
                return value.clone() if int(name) % 2 else value

        stream = WeightStream()
        for numbers in (order, order, reversed(order), order, order):
            for number in numbers:
                request = FetchRequest(
                    number, Source(memory), (str(number),), size, torch.device("cpu")
                )
                weights = stream.fetch(request)
                block = device.alias(weights[str(number)]).view("float32")
                # Not the tensor: for the process it is gone before the device computes.
                device.compute(
                    lambda block=block, number=number: computed.append((block == number).all())
                )
                del weights
        device.queue.submit(int).result()
        assert len(computed) == 40 and all(computed)
        assert device.peak == 2 * size and device.allocations == 2


class Stream:
    """As torch's, it may not be entered again before it is left, by another thread neither."""

    def __init__(self, device):
        self.is_entered = False

    def __enter__(self):
        assert not self.is_entered
        self.is_entered = True

    def __exit__(self, *error):
        # Other threads run.
        time.sleep(0.001)
        self.is_entered = False

    def record_event(self, event):
        assert self.is_entered


def test_threads_share_the_stream_of_copies(monkeypatch):
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", lambda device, blocking: device)
    device = copies.DeviceCopies(torch.device("cpu"))

    def send(number):
        host = torch.full((3,), float(number))
        target = device.empty_like(host)
        device.copy(host, target)
        return target[0].item()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(send, range(32))) == list(range(32))


@torch.no_grad()
def test_files_stay_mapped(net, tmp_path, monkeypatch):
    """A file is mapped once, also if it is gone or another one has its name."""
    opened = []
    read = offload.load_offloaded_weight
    monkeypatch.setattr(
        offload, "load_offloaded_weight", lambda *place: opened.append(place) or read(*place)
    )
    with slow_device(monkeypatch, delay=0):
        model = disk_offload(copy.deepcopy(net), tmp_path / "weights")
        model(batch())
        before = len(opened)
        for file in (tmp_path / "weights").glob("*.dat"):
            file.unlink()
            file.write_bytes(b"")
        x = batch()
        assert torch.equal(model(x)[0], net(x)[0])
        assert len(opened) == before
