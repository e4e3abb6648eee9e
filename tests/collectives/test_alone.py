# SPDX-License-Identifier: Apache-2.0
"""On one process every operation gives back what it was given, as the API has it."""

from __future__ import annotations

import pytest
import torch

from accelerate import collectives
from accelerate.collectives.metrics import gather_counted, gather_objects_counted
from accelerate.collectives.tensors import (
    TensorInformation,
    get_data_structure,
    initialize_tensors,
    is_tensor_information,
)
from accelerate.core.errors import ConfigurationError


@pytest.mark.parametrize(
    "data", [torch.ones(2), torch.tensor(1.0), {"a": [torch.ones(1)]}, "text", None, [], 5]
)
def test_identity(data):
    assert collectives.gather(data) is data
    assert collectives.broadcast(data, from_process=3) is data
    assert collectives.gather_object(data) is data
    assert collectives.broadcast_object_list(data) is data


def test_reduce():
    data = {"a": torch.tensor([1, 2]), "b": [torch.tensor([1.5])]}
    for reduction in ("mean", "sum"):
        found = collectives.reduce(data, reduction)
        assert torch.equal(found["a"], data["a"]) and torch.equal(found["b"][0], data["b"][0])
        # As from several processes: a change of the result does not reach the argument.
        found["b"][0].zero_()
        assert data["b"][0].tolist() == [1.5]
    assert collectives.reduce(torch.tensor([1.5]), scale=2.0).tolist() == [3.0]
    with pytest.raises(TypeError, match=r"reduce takes tensors.*builtins.str"):
        collectives.reduce("text")
    with pytest.raises(ConfigurationError, match="reduction='avg' is unknown"):
        collectives.reduce(torch.ones(1), "avg")


def test_padding_across_processes():
    data = [torch.ones(2, 3), torch.tensor(1.0)]
    assert all(
        one is other
        for one, other in zip(collectives.pad_across_processes(data), data, strict=True)
    )
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(collectives.CannotPadNestedTensorWarning):
        assert collectives.pad_across_processes(ragged) is ragged


def test_counted_rows():
    data = {"ids": torch.arange(4), "loss": torch.tensor(1.0)}
    found = gather_counted(data, (3,))
    assert found["ids"].tolist() == [0, 1, 2] and found["loss"].tolist() == [1.0]
    assert gather_counted(data, (0,))["loss"].shape == (0,)
    assert gather_objects_counted(["a", "b", "c"], (2,)) == ["a", "b"]
    with pytest.raises(ConfigurationError, match="rank 0 has 5 samples"):
        gather_counted(data, (5,))
    with pytest.raises(ConfigurationError, match="2 counts were passed for 1 ranks"):
        gather_counted(data, (1, 1))


@pytest.mark.parametrize(
    ("size", "parts", "padded"), [(5, 4, 8), (8, 4, 8), (1, 4, 4), (7, 2, 8), (9, 4, 12), (3, 1, 3)]
)
def test_pad_input_tensors(size, parts, padded):
    batch = {"x": torch.ones(size, 2), "n": [torch.arange(size)], "one": torch.tensor(1.0)}
    found = collectives.pad_input_tensors(batch, size, parts)
    assert (
        found["x"].shape == (padded, 2)
        and found["x"][:size].eq(1).all()
        and found["x"][size:].eq(0).all()
    )
    assert found["n"][0].tolist() == list(range(size)) + [0] * (padded - size)
    assert found["one"] is batch["one"]
    assert collectives.pad_input_tensors(torch.ones(2, size), size, parts, dim=1).shape == (
        2,
        padded,
    )


def test_pad_input_tensors_refuses():
    with pytest.raises(
        ConfigurationError,
        match=r"shape \[9\] .*dimension 0 .* 3 padded to 4",
    ):
        collectives.pad_input_tensors(torch.ones(9), 3, 2)


def test_structure():
    data = {"a": torch.ones(2, 3), "b": [torch.tensor(True)], "c": 3}
    outline = get_data_structure(data)
    assert outline == {
        "a": TensorInformation(torch.Size([2, 3]), torch.float32),
        "b": [TensorInformation(torch.Size([]), torch.bool)],
        "c": 3,
    }
    made = initialize_tensors(outline)
    assert (made["a"].shape, made["a"].dtype) == ((2, 3), torch.float32)
    assert (made["b"][0].shape, made["b"][0].dtype) == ((), torch.bool) and made["c"] == 3
    assert is_tensor_information(outline["a"]) and not is_tensor_information(data["a"])
