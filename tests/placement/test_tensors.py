# SPDX-License-Identifier: Apache-2.0
"""One tensor of a module set: device, value, dtype, class and attributes of the parameter, ties."""

import numpy
import pytest
import torch
from torch import nn

from accelerate.placement.tensors import set_module_tensor_to_device


def test_value_and_dtype():
    layer = nn.Linear(3, 4)
    value = torch.randn(4, 3)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert (
        layer.weight.data_ptr() == value.data_ptr() and layer.weight.requires_grad
    )  # nothing is copied
    # By default a value takes the dtype of what it replaces, as with load_state_dict.
    set_module_tensor_to_device(layer, "weight", "cpu", value=value.half())
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, value.half().float())
    set_module_tensor_to_device(layer, "weight", "cpu", value=value, dtype="bfloat16")
    assert layer.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(layer, "weight", "cpu", dtype=torch.float64)
    assert layer.weight.dtype == torch.float64 and torch.equal(
        layer.weight, value.bfloat16().double()
    )
    set_module_tensor_to_device(layer, "weight", "cpu", value=numpy.ones((4, 3)))
    assert torch.equal(layer.weight, torch.ones(4, 3, dtype=torch.float64))
    set_module_tensor_to_device(
        layer, "weight", "cpu", value=torch.ones(4, 3, dtype=torch.int8), dtype=torch.float16
    )
    assert layer.weight.dtype == torch.int8 and not layer.weight.requires_grad


def test_buffers_keep_their_dtype_and_persistence():
    layer = nn.BatchNorm1d(4)
    layer.register_buffer("hidden", torch.zeros(2), persistent=False)
    set_module_tensor_to_device(layer, "num_batches_tracked", "cpu", value=torch.tensor(3.0))
    assert layer.num_batches_tracked == 3 and layer.num_batches_tracked.dtype == torch.int64
    set_module_tensor_to_device(layer, "num_batches_tracked", "cpu", dtype=torch.float16)
    assert layer.num_batches_tracked.dtype == torch.int64
    set_module_tensor_to_device(layer, "hidden", "meta")
    assert layer.hidden.device.type == "meta" and "hidden" not in layer.state_dict()
    assert not isinstance(layer.hidden, nn.Parameter)


def test_to_meta_and_back():
    model = nn.Sequential(nn.Linear(3, 4))
    weight = model[0].weight
    set_module_tensor_to_device(model, "0.weight", "cpu")
    assert model[0].weight is weight  # it is there already
    set_module_tensor_to_device(model, "0.weight", "meta")
    with pytest.raises(ValueError, match=r"0\.weight .*meta device, .*`value` .*cpu"):
        set_module_tensor_to_device(model, "0.weight", "cpu")
    set_module_tensor_to_device(model, "0.weight", "meta", dtype=torch.float16)
    assert model[0].weight.dtype == torch.float16
    set_module_tensor_to_device(model, "0.weight", torch.device("cpu"), value=weight)
    assert torch.equal(model[0].weight, weight.half())


class Marked(nn.Parameter):
    """A parameter whose class cannot be called with data alone."""

    def __new__(cls, data, mark):
        new = torch.Tensor._make_subclass(cls, data, True)
        new.mark = mark
        return new


def test_a_parameter_keeps_its_class_and_attributes():
    layer = nn.Linear(3, 4)
    layer.weight = Marked(layer.weight.data, mark="m")
    layer.bias.sharded = True
    for device, value in (("meta", None), ("cpu", torch.ones(4, 3))):
        set_module_tensor_to_device(layer, "weight", device, value=value)
        assert type(layer.weight) is Marked and layer.weight.mark == "m"
    set_module_tensor_to_device(layer, "bias", "meta")
    assert layer.bias.sharded
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    set_module_tensor_to_device(layer, "weight", "cpu", dtype=torch.float64)
    assert not layer.weight.requires_grad


def test_tied_tensors_share_what_is_on_the_device():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    weight = torch.randn(3, 3)
    copies = {weight.data_ptr(): {}}
    set_module_tensor_to_device(model, "0.weight", "cpu", value=weight, tied_params_map=copies)
    assert copies[weight.data_ptr()] == {torch.device("cpu"): model[0].weight}
    set_module_tensor_to_device(model, "1.weight", "cpu", value=weight, tied_params_map=copies)
    assert model[1].weight is model[0].weight
    other = torch.randn(3, 3)
    set_module_tensor_to_device(model, "1.weight", "cpu", value=other, tied_params_map=copies)
    assert model[1].weight.data_ptr() == other.data_ptr() and list(copies) == [weight.data_ptr()]
