# SPDX-License-Identifier: Apache-2.0
"""Damaged files of formats without checksums: a load succeeds or names the file, and runs nothing from it."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.checkpointing import Options, load_run, save_run
from accelerate.checkpointing.layout import MANIFEST
from accelerate.core.errors import CheckpointError
from accelerate.placement.offload import OffloadedWeightsLoader, offload_state_dict


class Runs:
    def __reduce__(self):
        return os.abort, ()


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped at the start": lambda path: path.write_bytes(
        bytes(b ^ 1 for b in path.read_bytes()[:40])
    ),
    "longer": lambda path: path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:]),
    "code": lambda path: path.write_bytes(pickle.dumps({"x": Runs()}, protocol=2)),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["compat", "bin", "weights", "pickled", "offload"])
def test_it_is_loaded_or_named(kind, damage, tmp_path, small_run, process, capfd):
    run, made = small_run(), tmp_path / "made"
    run.step()

    def write():
        if kind in ("compat", "bin"):
            options = Options(layout="compat", safe_serialization=kind == "compat")
            save_run(run.bundle(), made, process=process, options=options)
            (made / MANIFEST).unlink()
        elif kind == "offload":
            offload_state_dict(made, run.model.state_dict())
        else:
            Accelerator(cpu=True).save_model(
                run.model, made, max_shard_size=200, safe_serialization=kind == "weights"
            )

    def load():
        if kind in ("compat", "bin"):
            load_run(run.bundle(), made, process=process)
        elif kind == "offload":
            weights = OffloadedWeightsLoader(save_folder=made)
            for name in weights:
                weights[name].sum()
        else:
            load_checkpoint_in_model(run.model, made)

    write()
    for name in sorted(path.name for path in made.iterdir()):
        before = (made / name).read_bytes()
        DAMAGES[damage](made / name)
        try:
            load()
        except (CheckpointError, ValueError, FileNotFoundError) as error:
            assert str(made) in str(error), (name, error)
        (made / name).unlink(missing_ok=True)
        (made / name).write_bytes(before)
    load()
    assert all(torch.isfinite(value).all() for value in run.weights())
