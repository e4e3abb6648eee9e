# SPDX-License-Identifier: Apache-2.0
"""Offloaded weights are fetched ahead of the modules that need them, in the order in which these run."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.core.errors import CheckpointError
from accelerate.placement.copies import FetchRequest
from accelerate.placement.streaming import WeightStream

CPU = torch.device("cpu")


class Source(dict):
    """Weights of modules by number, which records when each is read."""

    def __init__(self, modules):
        super().__init__(
            {str(number): torch.full((1 << 16,), float(number)) for number in range(modules)}
        )
        self.reads = []

    def __getitem__(self, name):
        self.reads.append(int(name))
        return super().__getitem__(name)


@pytest.fixture
def run():
    """Run modules in an order; return those whose weights had been fetched ahead."""
    source, stream = Source(9), WeightStream()
    requests = [FetchRequest(number, source, (str(number),), 1 << 18, CPU) for number in range(9)]

    def run(order):
        ahead = []
        for number in order:
            fetched = stream.fetch(requests[number])
            assert len(stream.ahead) <= 1
            if fetched:
                assert fetched[str(number)].unique().item() == number
                ahead.append(number)
        return ahead

    run.source, run.stream, run.requests = source, stream, requests
    return run


def test_the_second_pass_is_fetched_ahead(run):
    assert run(range(5)) == []
    assert run(range(5)) == [
        2,
        3,
        4,
    ]  # the last module of a pass and the first two of the next are new pairs
    assert run(range(5)) == run(range(5)) == [0, 1, 2, 3, 4]


def test_a_module_that_runs_twice_and_another_order(run):
    order = [0, 1, 0, 2, 0, 3]
    run(order)
    run(order)
    assert run(order) == order
    assert run([4, 3, 2]) == []
    run([4, 3, 2])
    run([4, 3, 2])
    assert run([4, 3, 2]) == [4, 3, 2]


def test_small_modules_are_fetched_together_within_the_size_of_the_largest():
    source, stream = Source(6), WeightStream()
    sizes = [4 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20]
    requests = [
        FetchRequest(number, source, (str(number),), size, CPU) for number, size in enumerate(sizes)
    ]
    ahead = []
    for _ in range(3):
        for number, request in enumerate(requests):
            stream.fetch(request)
            ahead.append((number, sorted(stream.ahead)))
    assert ahead[-6:] == [
        (0, [1, 2, 3, 4]),
        (1, [2, 3, 4, 5]),
        (2, [3, 4, 5]),
        (3, [4, 5]),
        (4, [5]),
        (5, [0]),
    ]


def test_an_error_of_the_background_is_raised_by_the_module_that_needs_the_weights(run):
    for _ in range(3):
        run(range(3))
    del run.source["1"]
    run([0])
    with pytest.raises(KeyError, match="1"):
        run([1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(256, 1024),
            nn.LayerNorm(256),
            nn.Linear(1024, 256),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Branching(nn.Module):
    """Blocks of which some are left out, or run twice, for some inputs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, order=(0, 1, 2, 3)):
        for number in order:
            x = self.blocks[number](x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Branching().double().eval()


@pytest.fixture
def checkpoint(model, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(checkpoint, tmp_path, **options):
    with init_empty_weights():
        empty = Branching().double().eval()
    device_map = {"blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "blocks.3": "disk"}
    return load_checkpoint_and_dispatch(
        empty, checkpoint, device_map=device_map, offload_folder=tmp_path / "offload", **options
    )


ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (3, 1), (2, 2, 1), (0, 1, 2, 3), (1,), (0, 1, 2, 3)]


@torch.no_grad()
def test_a_model_with_branches_computes_the_same(model, checkpoint, tmp_path):
    loaded = load(checkpoint, tmp_path)
    for runner in (loaded, copy.deepcopy(loaded)):
        for order in ORDERS:
            x = torch.randn(3, 256, dtype=torch.double)
            assert torch.equal(runner(x, order), model(x, order))
        assert all(parameter.is_meta for parameter in runner.blocks[1].parameters())


@torch.no_grad()
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_whole_models_compute_the_same(model, offload, tmp_path):
    twin = copy.deepcopy(model)
    twin = offload(twin) if offload is cpu_offload else offload(twin, tmp_path / "offload")
    for order in ORDERS:
        x = torch.randn(3, 256, dtype=torch.double)
        assert torch.equal(twin(x, order), model(x, order))


def test_gradients_flow_through_streamed_weights(model, checkpoint, tmp_path):
    loaded = load(checkpoint, tmp_path)
    for _ in range(3):
        x = torch.randn(3, 256, dtype=torch.double, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        loaded(x).square().sum().backward()
        model(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)


@torch.no_grad()
def test_weights_are_read_from_the_checkpoint_itself(model, checkpoint, tmp_path):
    x = torch.randn(3, 256, dtype=torch.double)
    loaded = load(checkpoint, tmp_path)
    assert [path.name for path in (tmp_path / "offload").iterdir()] == ["index.json"]
    # The model keeps the file that it was loaded from, whatever takes its place.
    wanted = model(x)
    save_file(
        {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
        checkpoint / "new",
    )
    (checkpoint / "new").rename(checkpoint / "model.safetensors")
    assert torch.equal(loaded(x), wanted)
    (checkpoint / "model.safetensors").unlink()
    assert torch.equal(loaded(x), wanted)


@torch.no_grad()
def test_a_checkpoint_that_is_written_over_is_not_taken_for_the_one_that_was_loaded(
    checkpoint, tmp_path
):
    loaded = load(checkpoint, tmp_path)
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(content[:8] + content[8:].replace(b"F64", b"I64"))
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors was changed",
    ):
        loaded(torch.randn(3, 256, dtype=torch.double))


class Writing(nn.Linear):
    """Doubles its weight after it has been used."""

    def forward(self, x):
        y = super().forward(x)
        self.weight.data.mul_(2)
        return y


@torch.no_grad()
def test_what_a_forward_writes_does_not_reach_the_file(tmp_path):
    model, path = nn.Sequential(nn.Linear(256, 256)), tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    content = path.read_bytes()
    with init_empty_weights():
        empty = nn.Sequential(Writing(256, 256))
    loaded = load_checkpoint_and_dispatch(
        empty, path, device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    x = torch.randn(3, 256)
    assert torch.equal(loaded(x), model(x))
    loaded(x)
    assert path.read_bytes() == content


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@torch.no_grad()
@pytest.mark.parametrize("places", [("disk", "cpu"), ("cpu", "disk"), ("disk", "disk")])
def test_a_tied_weight_on_the_disk_and_in_memory(places, tmp_path):
    model, path = Tied(), tmp_path / "model.safetensors"
    save_file({"embed.weight": model.embed.weight}, path, metadata={"format": "pt"})
    with init_empty_weights():
        empty = Tied()
    empty.head.weight = empty.embed.weight
    device_map = dict(zip(("embed", "head"), places, strict=True))
    loaded = load_checkpoint_and_dispatch(
        empty, path, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    ids = torch.arange(6)
    for _ in range(2):
        assert torch.equal(loaded(ids), model(ids))
