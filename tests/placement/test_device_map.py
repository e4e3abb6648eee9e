# SPDX-License-Identifier: Apache-2.0
"""Device maps: cleaned, checked, and planned within the memory of each device."""

import logging
import random
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.core.enums import CustomDtype
from accelerate.placement import device_map
from accelerate.placement.device_map import (
    check_device_map,
    clean_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from accelerate.placement.names import device_for, is_within
from accelerate.placement.sizes import compute_module_sizes
from accelerate.placement.tied import find_tied_parameters


class Model(nn.Module):
    """236 bytes: linear1 64, batchnorm 72, linear2 100."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


@pytest.mark.parametrize(
    "given, cleaned",
    [
        ({"a.b": 0, "a.c": 0, "d": 1}, {"a": 0, "d": 1}),
        ({"a.b": 0, "a.c": 0, "d": 0}, {"": 0}),
        ({"a.b": 0, "a.c": 0, "a.d.e": 1, "a.d.f": 1}, {"a.b": 0, "a.c": 0, "a.d": 1}),
        ({"a.b": 0, "ab": 1, "a.c": 0, "abc.d": 1}, {"a": 0, "ab": 1, "abc.d": 1}),
        ({"a": 0, "a.b": 1, "a.c": 1}, {"a": 0, "a.b": 1, "a.c": 1}),
        ({"": 0}, {"": 0}),
        ({}, {}),
    ],
)
def test_clean_device_map(given, cleaned):
    assert clean_device_map(given) == cleaned
    assert given == cleaned  # in place


def test_check_device_map_names_what_has_no_device():
    model = Model()
    check_device_map(model, {"": 0})
    check_device_map(
        model, {"linear1": 0, "linear2.weight": "cpu", "linear2.bias": "disk", "batchnorm": 1}
    )
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"following parameters: linear2\.weight, linear2\.bias$"),
    ):
        check_device_map(model, {"linear1": 0, "batchnorm": 0, "linear": 0})
    with pytest.warns(UserWarning, match=r"submodules in the model: \['linear3'\]"):
        check_device_map(model, {"": 0, "linear3": 0})


def test_fills_device_after_device_and_keeps_room_for_the_largest_layer():
    model = Model()
    # Of 200 bytes device 0 keeps 100 free for linear2, which comes to it from the CPU.
    assert infer_auto_device_map(model, {0: 200, 1: 200}) == {
        "linear1": 0,
        "batchnorm": 1,
        "linear2": 1,
    }
    assert infer_auto_device_map(model, {0: 200, 1: 172, 2: 200}) == {
        "linear1": 0,
        "batchnorm": 1,
        "linear2": 1,
    }
    assert infer_auto_device_map(model, {0: 200, 1: 72, 2: 200}) == {
        "linear1": 0,
        "batchnorm": 1,
        "linear2": 2,
    }
    assert infer_auto_device_map(model, {0: "1KB"}) == {"": 0}
    with_offload = infer_auto_device_map(model, {0: 200, "cpu": 50}, offload_buffers=True)
    assert with_offload == {
        "linear1": 0,
        "batchnorm": "disk",
        "linear2": "disk",
    }
    # linear2 is the largest itself: no room is kept for it where it is to stay.
    assert infer_auto_device_map(model, {"cpu": 236}) == {"": "cpu"}
    assert infer_auto_device_map(model, {"cpu": 235}) == {
        "linear1": "cpu",
        "batchnorm": "disk",
        "linear2": "disk",
    }
    assert infer_auto_device_map(model, {0: 0, "cpu": 1000}) == {"": "cpu"}
    assert infer_auto_device_map(model, {0: 200, 1: 200}, clean_result=False) == {
        "linear1": 0,
        "batchnorm": 1,
        "linear2": 1,
    }


def test_half_the_bytes_go_twice_as_far():
    model = Model()
    assert infer_auto_device_map(
        model, {0: 110, 1: 0}, dtype=torch.float16, offload_buffers=True
    ) == {
        "linear1": 0,
        "batchnorm": "disk",
        "linear2": "disk",
    }
    kept = {"linear1.weight": torch.float32, "linear1.bias": torch.float32}
    assert (
        infer_auto_device_map(model, {0: 110, 1: 64}, dtype=torch.float16, special_dtypes=kept)[
            "linear1"
        ]
        == 1
    )
    assert infer_auto_device_map(model, {0: 80}, dtype=CustomDtype.INT4) == {"": 0}


def test_splits_a_module_and_its_own_tensors():
    model = nn.Sequential(Model(), Model())
    model[0].own = nn.Parameter(torch.zeros(10))
    model[0].register_buffer("table", torch.zeros(20))
    plan = infer_auto_device_map(model, {0: 100 + 40 + 64 + 72, 1: 1000})
    assert plan == {
        "0.own": 0,
        "0.linear1": 0,
        "0.batchnorm": 0,
        "0.linear2": 1,
        "0.table": 1,
        "1": 1,
    }
    check_device_map(model, plan)
    whole = infer_auto_device_map(model, {0: 400, 1: 1000}, no_split_module_classes=["Model"])
    assert (
        whole
        == infer_auto_device_map(model, {0: 400, 1: 1000}, no_split_module_classes="Model")
        == {"": 1}
    )


def test_tied_parameters_go_together():
    inner = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    model = nn.Sequential(nn.Embedding(10, 4), *inner, nn.Linear(4, 10))
    model[3].weight = model[0].weight
    # The embedding takes 160 bytes, its twin 40 more for the bias, and room is kept for a layer of 64.
    assert infer_auto_device_map(model, {0: 264, "cpu": 1000}) == {
        "0": 0,
        "3": 0,
        "1": "cpu",
        "2": "cpu",
    }
    # With no room for both, both go to the next device.
    assert infer_auto_device_map(model, {0: 263, "cpu": 1000}) == {"": "cpu"}


def test_fallback_allocation_uses_a_device_that_the_next_module_does_not_fit():
    model = nn.Sequential(
        nn.Linear(20, 20, bias=False), nn.Sequential(nn.ReLU(), nn.Linear(5, 5, bias=False))
    )
    limits = {0: 1600, 1: 150, "cpu": 10_000}
    assert infer_auto_device_map(model, limits) == {"": "cpu"}
    assert infer_auto_device_map(model, limits, fallback_allocation=True) == {"1": 1, "0": "cpu"}


class Block(nn.Module):
    """What must stay whole in the random models."""


def _random_model(rng, depth=3):
    if depth == 0 or rng.random() < 0.3:
        width = rng.randint(1, 9)
        return rng.choice(
            [nn.Linear(width, 3), nn.BatchNorm1d(width), nn.Embedding(width, 3), nn.ReLU()]
        )
    model = rng.choice([Block, nn.Module])()
    for index in range(rng.randint(1, 4)):
        model.add_module(f"c{index}", _random_model(rng, depth - 1))
    if rng.random() < 0.3:
        model.own = nn.Parameter(torch.zeros(rng.randint(1, 20)))
    if rng.random() < 0.3:
        model.register_buffer(
            "table", torch.zeros(rng.randint(1, 20)), persistent=rng.random() < 0.5
        )
    return model


@pytest.mark.parametrize("fallback", [False, True])
def test_no_plan_exceeds_a_device_splits_a_block_or_forgets_a_tensor(fallback):
    for seed in range(60):
        rng = random.Random(seed)
        model = nn.ModuleDict(
            {str(index): _random_model(rng) for index in range(rng.randint(1, 4))}
        )
        owners = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_parameters(recurse=False)
        ]
        if len(owners) > 1 and rng.random() < 0.5:
            (module, name), (other, other_name) = rng.sample(owners, 2)
            setattr(module, name, getattr(other, other_name))
        blocks = [name for name, module in model.named_modules() if type(module) is Block]
        sizes = compute_module_sizes(model)
        limits = {index: rng.randint(0, int(sizes[""])) for index in range(rng.randint(1, 3))}
        limits["cpu"] = rng.randint(0, int(sizes[""]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = infer_auto_device_map(
                model,
                dict(limits),
                ["Block"] if blocks else None,
                clean_result=rng.random() < 0.5,
                fallback_allocation=fallback,
            )
        check_device_map(model, plan)
        first = {group[0]: group for group in find_tied_parameters(model)}
        used = dict.fromkeys([*limits, "disk"], 0)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # A tied parameter takes memory once on every device where it stands.
            for device in {device_for(twin, plan) for twin in first.get(name, [name])}:
                used[device] += tensor.nbytes
        assert all(used[device] <= limit for device, limit in limits.items()), (
            seed,
            plan,
            used,
            limits,
        )
        for block in blocks:
            assert len({device_for(name, plan) for name in sizes if is_within(name, block)}) <= 1, (
                seed,
                block,
                plan,
            )


@pytest.mark.parametrize("budget", ["10KB", "60KB"])
def test_a_budget_that_needs_the_disk_without_a_folder_says_what_is_missing(budget, tmp_path):
    """With the memory that the message names, the model loads."""
    model, path = (
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))),
        tmp_path / "model.safetensors",
    )
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    with init_empty_weights():
        empty = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    size = 4 * 65 * 64
    missing = {"10KB": 8, "60KB": 6}[budget] * size
    with pytest.raises(
        ValueError, match=rf"has {8 * size:,} bytes, of which {missing:,} do not fit"
    ) as error:
        load_checkpoint_and_dispatch(empty, path, device_map="auto", max_memory={"cpu": budget})
    assert all(parameter.is_meta for parameter in empty.parameters())
    needed = int(str(error.value).rpartition("total of ")[2].split()[0].replace(",", ""))
    loaded = load_checkpoint_and_dispatch(
        empty, path, device_map="auto", max_memory={"cpu": needed}
    )
    assert torch.equal(loaded[7].weight, model[7].weight)


# --- memory of devices: what is free, limits given as text, and shares that spread a model


def test_free_memory_with_accelerators(monkeypatch):
    monkeypatch.setattr(device_map.devices, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(device_map.devices, "device_count", lambda kind=None: 3)

    def zeros(size, device):
        if device.index == 1:
            raise RuntimeError("busy")

    monkeypatch.setattr(device_map.torch, "zeros", zeros)
    monkeypatch.setattr(
        device_map.torch.accelerator, "get_memory_info", lambda index: (100 + index, 1000)
    )
    free = get_max_memory()
    assert list(free) == [0, 2, "cpu"] and (free[0], free[2]) == (100, 102)
    monkeypatch.setattr(device_map.devices, "accelerator_type", lambda: "mps")
    assert list(get_max_memory()) == ["mps"]


def test_limits_are_read_and_ordered(caplog):
    given = {"cpu": "2GB", 1: 3, 0: "1GiB", "disk": "1GB"}
    with caplog.at_level(logging.WARNING):
        limits = get_max_memory(given)
    assert list(limits.items()) == [(0, 2**30), (1, 3), ("cpu", 2 * 10**9), ("disk", 10**9)]
    assert given == limits  # callers compare their limits with the answer
    assert get_max_memory({"mps": 5}) == {"mps": 5}


@pytest.mark.parametrize("device", ["foo", "cuda:0", "gpu", True, None])
def test_unknown_devices_are_refused(device):
    with pytest.raises(ValueError, match=f"Device {device} is not recognized"):
        get_max_memory({device: "1GB"})


class Row(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)


def test_shares_are_even_and_leave_room_for_a_block():
    model = nn.ModuleList([Row(10) for _ in range(8)])  # 400 bytes each
    block = 1.25 * 400
    limits = get_balanced_memory(
        model, {0: 10_000, 1: 10_000, "cpu": 10_000}, no_split_module_classes=["Row"]
    )
    assert limits == {0: 1600 + block, 1: 10_000, "cpu": 10_000}
    limits = get_balanced_memory(
        model, {0: 10_000, 1: 900, 2: 10_000, 3: 10_000}, no_split_module_classes="Row"
    )
    assert limits == {0: 800 + block, 1: 900, 2: 800 + block, 3: 10_000}
    # Devices that may hold nothing do not count.
    limits = get_balanced_memory(model, {0: 10_000, 1: 0, 2: 10_000})
    assert limits == {0: 1600 + block, 1: 0, 2: 10_000}
    assert get_balanced_memory(model, {"cpu": 100}) == {"cpu": 100}


def test_low_zero_leaves_device_zero_for_other_work():
    model = nn.ModuleList([Row(10) for _ in range(8)])
    limits = get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000}, low_zero=True)
    assert limits == {0: 0, 1: 1600 + 500, 2: 10_000}
    limits = get_balanced_memory(model, {0: 10_000, 1: 1000, 2: 1000}, low_zero=True)
    assert limits == {0: 1200, 1: 1000, 2: 1000}
