# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer under sequence parallelism, which it knows as that of DeepSpeed only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from . import Internal

TRAINER_BATCHES = Internal(
    name="trainer_batches",
    what="get_sp_size and get_cp_size of the transformers Trainer",
    versions="transformers 5.24",
    upstream="not reported",
    needed_by="an unchanged Trainer with sp_size (docs/layouts/context.md)",
    without="Trainer plans sp_size times as many steps as there are batches, so the learning rate falls too slowly",
    test="tests/torch_internals/test_transformers_trainer.py::test_batches_of_a_split_loader",
)

TRAINER_LOSS = Internal(
    name="trainer_loss",
    what="deepspeed_sp_compute_loss of transformers.trainer",
    versions="transformers 5.24",
    upstream="not reported",
    needed_by="an unchanged Trainer with sp_size (docs/layouts/context.md)",
    without="the first step raises, because Trainer asks DeepSpeed for the ranks of a sequence",
    test="tests/torch_internals/test_transformers_trainer.py::test_loss_over_the_mesh",
)


def count_full_batches(splits_heads: Callable[[Any], bool]) -> None:
    """Have Trainer count the batches of a split loader once. It is changed once in a process.

    It assumes that a split loader has sp_size times as many batches as the prepared one: with DeepSpeed the ranks of a
    sequence read different batches and compute on each in turn. Here they read the same ones, as under cp_size.
    Trainers of other layouts behave as before.

    Args:
        splits_heads: whether the layout of an accelerator has sp_size.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    sp_size = getattr(trainer, "get_sp_size", None)
    cp_size = getattr(trainer, "get_cp_size", None)
    if sp_size is None or cp_size is None or not TRAINER_BATCHES.is_on:
        return
    if sp_size.__module__ == __name__:
        return

    def get_sp_size(self: Any) -> Any:
        if splits_heads(self.accelerator):
            return 1
        return sp_size(self)

    def get_cp_size(self: Any) -> Any:
        if splits_heads(self.accelerator):
            return self.accelerator.parallelism_config.sp_size
        return cp_size(self)

    trainer.get_sp_size, trainer.get_cp_size = get_sp_size, get_cp_size  # type: ignore[union-attr]


@contextlib.contextmanager
def loss_over_the_mesh() -> Iterator[None]:
    """A block in which Trainer takes the ranks of a sequence from the mesh, as for backends other than DeepSpeed."""
    library: Any = sys.modules.get("transformers.trainer")
    former = getattr(library, "deepspeed_sp_compute_loss", None)
    if former is None or not TRAINER_LOSS.is_on:
        yield
        return

    def compute_loss(
        accelerator: object, model: object, inputs: object, return_outputs: bool, layout: Any
    ) -> object:
        layout = SimpleNamespace(sp_backend="torch", sp_size=layout.sp_size)
        return former(accelerator, model, inputs, return_outputs, layout)

    library.deepspeed_sp_compute_loss = compute_loss
    try:
        yield
    finally:
        library.deepspeed_sp_compute_loss = former
