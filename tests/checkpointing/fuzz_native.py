# SPDX-License-Identifier: Apache-2.0
"""Program `ROOT COUNT SEED`: native checkpoints edited by hand, their checksums made to match, and files of weights.

Each mutant is loaded, or refused in one error that names the file.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutants import attempt, chances, damaged_bytes, finish, fresh_copy, limit_memory, mutate, never, seal, verify

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.checkpointing.manifest import MANIFEST


class Registered:
    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"array": np.zeros(3, [("a", "i4"), ("b", "f8", (2,))]), "set": {1, 2}, "t": torch.ones(90)}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


root = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 3))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 6)), batch_size=2)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
accelerator.register_for_checkpointing(Registered())
for (batch,) in loader:
    model(batch).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
accelerator.save_state(root / "good")
accelerator.save_model(model, root / "weights", max_shard_size=700)
plain = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 3))
pickle.load = pickle.loads = never
limit_memory()

loaded = 0
folder = root / "mutant"
for number, chance in chances("native"):
    is_weights = number % 4 == 3
    fresh_copy(root / ("weights" if is_weights else "good"), folder)
    if number % 4 == 2:
        seal(folder, functools.partial(mutate, chance=chance))
    else:
        path = chance.choice([path for path in sorted(folder.iterdir()) if path.name != MANIFEST])
        if chance.random() < 0.05:
            path.unlink()
            os.mkfifo(path)
        else:
            path.write_bytes(damaged_bytes(path, chance))
            if not is_weights:
                seal(folder)
    if is_weights:
        device_map = chance.choice([None, {"": "cpu"}])
        loaded += attempt(
            "weights",
            root,
            functools.partial(load_checkpoint_in_model, plain, folder, device_map=device_map),
            ValueError,
        )
    else:
        attempt("verify", root, lambda: verify(folder))
        loaded += attempt("load", root, lambda: accelerator.load_state(folder))
print("loaded", loaded)
finish()
