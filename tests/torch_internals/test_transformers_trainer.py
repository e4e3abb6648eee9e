# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with split sequences: the batches that it counts, and the ranks that share its loss."""

from types import SimpleNamespace

import pytest

from accelerate.torch_internals import transformers_trainer


@pytest.fixture
def library():
    return pytest.importorskip("transformers.trainer")


def trainer(library, splits):
    layout = SimpleNamespace(sp_size=2, cp_size=1)
    accelerator = SimpleNamespace(parallelism_config=layout, splits=splits)
    made = library.Trainer.__new__(library.Trainer)
    made.accelerator = accelerator
    return made


def test_batches_of_a_split_loader(library, monkeypatch):
    for name in ("get_sp_size", "get_cp_size"):
        monkeypatch.setattr(library.Trainer, name, getattr(library.Trainer, name))
    for _ in range(2):
        transformers_trainer.count_full_batches(lambda accelerator: accelerator.splits)
    split, other = trainer(library, True), trainer(library, False)
    assert (split.get_sp_size(), split.get_cp_size()) == (1, 2)
    assert (other.get_sp_size(), other.get_cp_size()) == (2, 1)


def test_loss_over_the_mesh(library, monkeypatch):
    calls = []
    monkeypatch.setattr(library, "deepspeed_sp_compute_loss", lambda *args: calls.append(args))
    former = library.deepspeed_sp_compute_loss
    layout = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
    with transformers_trainer.loss_over_the_mesh():
        library.deepspeed_sp_compute_loss("accelerator", "model", "inputs", False, layout)
    assert library.deepspeed_sp_compute_loss is former
    assert (calls[0][-1].sp_backend, calls[0][-1].sp_size) == ("torch", 2)
