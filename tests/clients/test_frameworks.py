# SPDX-License-Identifier: Apache-2.0
"""Other frameworks: a Keras model on its torch backend, and batches of JAX and tf.data."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator

os.environ["KERAS_BACKEND"] = "torch"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)
TARGETS = INPUTS.sum(1, keepdim=True)


def keras_model():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model(INPUTS[:1])
    return model


def train(model, optimizer, loader, backward):
    for inputs, targets in loader:
        backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_keras_model_trains_as_in_plain_torch(tmp_path):
    data = TensorDataset(INPUTS, TARGETS)
    plain = keras_model()
    assert isinstance(plain, torch.nn.Module)
    expected = train(
        plain, torch.optim.Adam(plain.parameters()), DataLoader(data, 4), torch.Tensor.backward
    )
    accelerator, model = Accelerator(cpu=True), keras_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters()), DataLoader(data, 4)
    )
    found = train(model, optimizer, loader, accelerator.backward)
    assert all(map(torch.equal, found, expected))
    accelerator.save_state(tmp_path)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    accelerator.load_state(tmp_path)
    assert all(map(torch.equal, model.parameters(), expected))


def test_jax_batches():
    """They pass through, or become tensors by DLPack in the collate function."""
    jax = pytest.importorskip("jax")
    rows = [jax.numpy.arange(3.0) + number for number in range(4)]
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, 2, collate_fn=jax.numpy.stack))
    assert [type(batch) for batch in loader] == [type(rows[0])] * 2
    loader = Accelerator(cpu=True).prepare(
        DataLoader(rows, 2, collate_fn=lambda rows: torch.from_dlpack(jax.numpy.stack(rows)))
    )
    found = torch.cat([batch + 0 for batch in loader])
    assert torch.equal(found, torch.arange(3.0) + torch.arange(4.0)[:, None])


def test_tf_data_batches():
    tf = pytest.importorskip("tensorflow")

    class Batches(IterableDataset):
        def __iter__(self):
            data = tf.data.Dataset.from_tensor_slices(INPUTS.numpy()).batch(4)
            return ({"x": torch.from_dlpack(batch)} for batch in data)

    loader = Accelerator(cpu=True).prepare(DataLoader(Batches(), batch_size=None))
    assert torch.equal(torch.cat([batch["x"] for batch in loader]), INPUTS)
    assert loader.end_of_dataloader
