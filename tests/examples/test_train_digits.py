# SPDX-License-Identifier: Apache-2.0
"""The digits example: accuracy on the digits that it was not trained on."""

import importlib.util
import re

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"
)


def test_the_split_holds_a_fifth_of_each_class_out(example):
    train, test = example("train_digits").digits(seed=0)
    assert (len(train), len(test)) == (1437, 360)
    images, labels = test.tensors
    assert images.shape == (360, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert (labels.bincount() >= 34).all()


@pytest.mark.timeout(300)
def test_it_reads_held_out_digits(script, logs_no_mistake):
    (done,) = run_ranks(script("train_digits"), 1, "--epochs", 8, "--cpu", timeout=280)
    logs_no_mistake([done])
    assert "1,437 digits, 8 epochs, 360 steps" in done.stdout
    right, of = re.search(r"\((\d+) of (\d+)\)", done.stdout).groups()
    assert of == "360"
    assert int(right) > 0.97 * 360
