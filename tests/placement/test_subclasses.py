# SPDX-License-Identifier: Apache-2.0
"""Models that a library quantised to 8 or 4 bits stay where they are, and are refused where they cannot be trained."""

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.placement import subclasses

MARKS = ["is_loaded_in_8bit", "is_loaded_in_4bit"]


class Immovable(nn.Linear):
    """A layer that fails when it is moved, as transformers' 8-bit models do."""

    def __init__(self, mark, device_map=None):
        super().__init__(2, 2)
        setattr(self, mark, True)
        if device_map is not None:
            self.hf_device_map = device_map

    def to(self, *args, **kwargs):
        raise ValueError("`.to` is not supported for 4-bit or 8-bit bitsandbytes models")


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("device_map", [None, {"": 0}, {"": torch.device("cpu")}])
def test_never_moved(mark, device_map):
    model = Immovable(mark, device_map)
    assert Accelerator(cpu=True).prepare(model) is model


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("device_map", [{"": "disk"}, {"a": "cpu", "b": "disk"}])
def test_offloaded_modules_are_refused_for_training_alone(mark, device_map):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"offloads modules to .*disk, .*trained"):
        accelerator.prepare(Immovable(mark, device_map))
    model = Immovable(mark, device_map)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def test_the_cpu_trains_with_bitsandbytes_alone(monkeypatch):
    model, cpu = Immovable(MARKS[0], {"": "cpu"}), torch.device("cpu")
    monkeypatch.setattr(subclasses, "is_available", lambda name: True)
    assert subclasses.check_quantized(model, cpu, training=True)
    monkeypatch.setattr(subclasses, "is_available", lambda name: False)
    with pytest.raises(ValueError, match="offloads modules to cpu"):
        subclasses.check_quantized(model, cpu, training=True)


@pytest.mark.parametrize("place", [0, torch.device("cpu")])
def test_another_device_is_refused(place):
    with pytest.raises(ValueError, match="trains on cuda:1, "):
        subclasses.check_quantized(
            Immovable(MARKS[1], {"": place}), torch.device("cuda", 1), training=True
        )
    assert subclasses.check_quantized(
        Immovable(MARKS[1], {"": 1}), torch.device("cuda", 1), training=True
    )


def test_other_models_are_moved():
    assert not subclasses.check_quantized(nn.Linear(2, 2), torch.device("cpu"), training=True)
