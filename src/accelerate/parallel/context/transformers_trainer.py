# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer under sp_size: it would use DeepSpeed for what this library does itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from .patching import Wrapper

_TRAINER = "transformers.trainer"


def hooks() -> dict[tuple[str, str], Wrapper]:
    """Functions that are replaced while a loader splits batches: (module, name) -> wrapper."""
    return {(_TRAINER, "deepspeed_sp_compute_loss"): _on_the_mesh}


def _on_the_mesh(former: Any) -> Any:
    """Has the loss over a sequence's ranks use the group of the mesh, as for backends other than DeepSpeed."""

    def compute_loss(accelerator: Any, model: Any, inputs: Any, return_outputs: bool, layout: Any) -> Any:
        layout = SimpleNamespace(sp_backend="torch", sp_size=layout.sp_size)
        return former(accelerator, model, inputs, return_outputs, layout)

    return compute_loss


def count_whole_batches() -> None:
    """Have Trainer count the batches of a split loader once. It is patched once in a process.

    It assumes that a split loader has sp_size times as many batches as the prepared one: with DeepSpeed the ranks of a
    sequence read different batches and compute on each in turn. Here they read the same ones, as under cp_size.
    Trainers of other layouts behave as before.
    """
    trainer = getattr(sys.modules.get(_TRAINER), "Trainer", None)
    former = getattr(trainer, "get_sp_size", None), getattr(trainer, "get_cp_size", None)
    if None in former or getattr(former[0], "__module__", "") == __name__:
        return

    def get_sp_size(self: object) -> Any:
        return 1 if _splits_heads(self) else former[0](self)  # type: ignore[misc]

    def get_cp_size(self: Any) -> Any:
        return self.accelerator.parallelism_config.sp_size if _splits_heads(self) else former[1](self)  # type: ignore[misc]

    trainer.get_sp_size, trainer.get_cp_size = get_sp_size, get_cp_size  # type: ignore[union-attr]


def _splits_heads(trainer: object) -> bool:
    strategy = getattr(getattr(trainer, "accelerator", None), "strategy", None)
    sequence = getattr(strategy, "sequence", None)
    return sequence is not None and sequence.layout.size == "sp_size"
