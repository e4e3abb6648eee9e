# SPDX-License-Identifier: Apache-2.0
"""Tied parameters: found, tied again, kept on one device, saved once."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate.placement.tied import (
    check_tied_parameters_on_same_device,
    clean_state_dict_for_safetensors,
    find_tied_parameters,
    retie_parameters,
)


def tied_model():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def test_find_tied_parameters():
    model = tied_model()
    assert find_tied_parameters(model) == [["0.weight", "2.weight"]]
    assert find_tied_parameters(nn.Linear(2, 2)) == []
    # A module under two names ties all it holds; the order is that of the model.
    shared = nn.Linear(2, 2)
    assert find_tied_parameters(nn.ModuleDict({"b": shared, "a": shared})) == [
        ["a.weight", "b.weight"],
        ["a.bias", "b.bias"],
    ]
    with torch.device("meta"):
        assert find_tied_parameters(tied_model()) == [["0.weight", "2.weight"]]
    with pytest.raises(TypeError, match="prefix"):
        find_tied_parameters(model, prefix="x")


def test_retie_takes_the_one_that_holds_data():
    model = tied_model()
    weight = model[0].weight
    model[0].weight = nn.Parameter(weight.to("meta"))
    retie_parameters(model, [["0.weight", "2.weight"]])
    assert model[0].weight is weight and model[2].weight is weight
    retie_parameters(model, [[]])
    with pytest.raises(ValueError, match="weigth"):
        retie_parameters(model, [["0.weigth"]])


def test_warns_of_tied_parameters_that_are_apart(caplog):
    groups = [["0.weight", "2.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(groups, {"": 0})
        check_tied_parameters_on_same_device(groups, {"0": 1, "2": 1, "1": 0})
        assert not caplog.records
        check_tied_parameters_on_same_device(groups, {"0": 0, "2": "cpu"})
    assert "'0.weight': 0, '2.weight': 'cpu'" in caplog.text
    with pytest.raises(ValueError, match=r"does not contain the module 2\.weight"):
        check_tied_parameters_on_same_device(groups, {"0": 0})


def test_clean_state_dict_loses_nothing(tmp_path, caplog):
    rows = torch.arange(12.0).view(4, 3)
    state = {
        "b": rows[2:],
        "a": rows[:2],
        "again": rows[:2],
        "turned": rows.t().clone().t(),
        "empty": torch.zeros(0, 3),
        "nothing": torch.zeros(0),
    }
    with caplog.at_level(logging.WARNING):
        cleaned = clean_state_dict_for_safetensors(state)
    # One name of the tensor that is there twice goes; views of one matrix are different tensors and both stay.
    assert "{'again'}" in caplog.text and "'b'" not in caplog.text
    save_file(cleaned, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == {"a", "b", "turned", "empty", "nothing"}
    for name, value in loaded.items():
        assert torch.equal(value, state[name])
    assert set(state) == {
        "a",
        "b",
        "again",
        "turned",
        "empty",
        "nothing",
    }  # the argument is left as it is
    model = tied_model()
    assert list(clean_state_dict_for_safetensors(model.state_dict())) == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]
