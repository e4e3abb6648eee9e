# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors and modules, the largest layer, sizes written as text."""

import pytest
import torch
from torch import nn

from accelerate.core.enums import CustomDtype
from accelerate.placement.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
    named_module_tensors,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.linear1.weight
        self.register_buffer("mask", torch.zeros(7), persistent=False)


@pytest.mark.parametrize(
    "dtype, size",
    [
        (torch.float64, 8),
        (torch.bfloat16, 2),
        ("float16", 2),
        ("torch.float32", 4),
        (torch.float8_e4m3fn, 1),
        (torch.complex64, 8),
        (torch.uint16, 2),
        (torch.bool, 1 / 8),
        (torch.uint4, 1 / 2),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 1 / 2),
        (CustomDtype.INT2, 1 / 4),
    ],
)
def test_dtype_byte_size(dtype, size):
    assert dtype_byte_size(dtype) == size


@pytest.mark.parametrize(
    "text, size",
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("5gib", 5 * 2**30),
        ("1.5MB", 1_500_000),
        ("2MiB", 2**21),
        ("10KB", 10_000),
        ("2KIB", 2048),
        ("1 GB", 10**9),
        ("10Kb", 1250),
        ("5Gb", 625_000_000),
        ("5gb", 5_000_000_000),
        ("8Gib", 8 << 30),
        ("1.5gib", 3 << 29),
        (12, 12),
        (0, 0),
    ],
)
def test_convert_file_size(text, size):
    assert convert_file_size_to_int(text) == size


def test_module_sizes_count_a_tied_tensor_once():
    sizes = compute_module_sizes(Model())
    parameters = {"linear1": 4 * 12 + 16, "linear2": 4 * 20 + 20, "tied": 16}
    assert {name: sizes[name] for name in parameters} == parameters
    assert sizes["batchnorm"] == 4 * 16 + 8  # four vectors of four, one counter
    assert sizes["mask"] == 28 and sizes["linear1.weight"] == 48 and sizes["tied.weight"] == 0
    assert sizes[""] == 64 + 100 + 16 + 72 + 28


def test_module_sizes_in_another_dtype():
    model = Model()
    half = compute_module_sizes(model, dtype=torch.float16)
    assert half["linear1"] == 32 and half["batchnorm"] == 2 * 16 + 8  # the counter is an integer
    # Nothing grows: a wider dtype leaves the weights as they are.
    assert compute_module_sizes(model, dtype=torch.float64) == compute_module_sizes(model)
    special = compute_module_sizes(
        model, dtype="float16", special_dtypes={"linear1.weight": torch.float32}
    )
    assert special["linear1"] == 48 + 8 and special["linear2"] == half["linear2"]
    assert compute_module_sizes(model, dtype=CustomDtype.INT4)["linear2"] == 12.5
    assert compute_module_sizes(model, buffers_only=True)[""] == 28 + 2 * 16 + 8
    with torch.device("meta"):
        assert compute_module_sizes(Model()) == compute_module_sizes(model)


def test_named_module_tensors():
    model = Model()
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    assert names[:2] == ["linear1.weight", "linear1.bias"] and "tied.weight" not in names
    assert names.index("linear2.weight") < names.index("mask")  # parameters, then buffers
    assert "mask" not in dict(named_module_tensors(model, recurse=True, remove_non_persistent=True))
    assert [name for name, _ in named_module_tensors(model)] == ["mask"]
    assert not list(named_module_tensors(model, include_buffers=False))


def test_largest_layer():
    model = nn.Sequential(Model(), Model(), nn.Linear(2, 2))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (
        100,
        ["0.linear2", "1.linear2"],
    )
    assert get_max_layer_size(list(model.named_children()), sizes, ["Model"]) == (280, ["0", "1"])
    assert get_max_layer_size(list(model.named_children()), sizes, [{"Model"}]) == (280, ["0", "1"])
    assert calculate_maximum_sizes(model) == (584, (100, ["0.linear2", "1.linear2"]))
    model._no_split_modules = {"Model"}
    assert calculate_maximum_sizes(model) == (584, (280, ["0", "1"]))
