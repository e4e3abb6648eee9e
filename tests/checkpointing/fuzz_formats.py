# SPDX-License-Identifier: Apache-2.0
"""Program `ROOT COUNT SEED`: damaged shards, files of torch.save, files of weights and offload folders are refused.

Each mutant ends in success or in one error that names the file: nothing hangs, takes much memory or is half loaded.
"""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

import mutants
import torch
from mutants import attempt, chances, damage, finish, found, fresh_copy, limit_memory, mutate, never, seal, verify
from torch import nn

from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.checkpointing import Options, PreparedModel, PreparedOptimizer, RunState, load_run, save_run
from accelerate.checkpointing.merging import merge
from accelerate.checkpointing.weights import load
from accelerate.placement.offload import OffloadedWeightsLoader, offload_state_dict
from accelerate.state import PartialState

root = Path(sys.argv[1])
made = root / "made"
folder = root / "mutant"
output = root / "output"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Counter:
    count = 0

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "values": torch.ones(20)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count = state["count"]


# --- what is damaged ------------------------------------------------------------------------------------------------

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
sharded = Accelerator(cpu=True, fsdp_plugin=plugin)
model = build()
model, optimizer = sharded.prepare(model, torch.optim.AdamW(model.parameters()))
train(model, optimizer)
sharded.save_state(made / "shards")
sharded.save_state(made / "dcp", layout="compat")

plain = build()
plain_optimizer = torch.optim.AdamW(plain.parameters())
train(plain, plain_optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 2)
counter = Counter()
run = RunState(
    [PreparedModel(plain)], [PreparedOptimizer(plain_optimizer)], [scheduler], custom=[counter], progress={"step": 3}
)
# The same without the objects that a run of shards did not save.
bare = RunState(run.models, run.optimizers)
process = PartialState()
save_run(run, made / "compat", process=process, options=Options(layout="compat"))
save_run(run, made / "bin", process=process, options=Options(layout="compat", safe_serialization=False))
sharded.save_model(plain, made / "weights", max_shard_size=700)
sharded.save_model(plain, made / "pickled", max_shard_size=700, safe_serialization=False)
offload_state_dict(made / "offload", plain.state_dict())
pickle.load = pickle.loads = never
limit_memory()


def values(*objects: nn.Module | torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in objects:
        state = one.state_dict() if isinstance(one, nn.Module) else one.state_dict()["state"]
        leaves = torch.utils._pytree.tree_leaves(state)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                found.append((leaf.to_local() if hasattr(leaf, "to_local") else leaf).detach().clone())
    return found


def unchanged(
    name: str,
    call: Callable[[], Any],
    documented: tuple[type[BaseException], ...],
    *objects: nn.Module | torch.optim.Optimizer,
) -> bool:
    """Attempt a load, which changes nothing where it fails."""
    before = values(*objects)
    loaded = attempt(name, root, call, *documented)
    after = values(*objects)
    same = len(before) == len(after) and all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(before, after, strict=True)
    )
    # An object of the user's may refuse what it is given: the error says that the run is partly loaded by then.
    if not (loaded or same or "The run is partly loaded" in mutants.last_error):
        found(name, f"it has failed, and changed the run: {mutants.last_error[-1500:]}")
    return loaded


def merged(safe: bool) -> None:
    shutil.rmtree(output, ignore_errors=True)
    try:
        merge(folder, output, safe)
    except BaseException:
        if list(output.glob("*")):
            found("merge", "it has failed, and left a file")
        raise


def offloaded() -> None:
    weights = OffloadedWeightsLoader(save_folder=folder)
    for name in weights:
        weights[name].sum()


def weights_into(device_map: dict[str, str] | None, dispatch: bool) -> bool:
    shutil.rmtree(output, ignore_errors=True)
    target = build()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(0.25)
    load = load_checkpoint_and_dispatch if dispatch else load_checkpoint_in_model
    documented = (ValueError, FileNotFoundError)
    call = functools.partial(load, target, folder, device_map=device_map, offload_folder=output)
    return unchanged(load.__name__, call, documented, target)


loaded = 0
KINDS = ("shards", "dcp", "compat", "bin", "weights", "pickled", "offload")
MAPS = (None, {"": "cpu"}, {"0": "cpu", "1": "cpu", "2": "disk"})
for number, chance in chances("formats"):
    kind = KINDS[number % len(KINDS)]
    fresh_copy(made / kind, folder)
    if kind == "dcp" and chance.random() < 0.5:
        # As the API's own folders are: everything is in torch's format, and nothing has a checksum.
        (folder / "optimizer_0" / "options.json").unlink()
        (folder / "checkpoint_manifest.json").unlink()
    has_manifest = kind in ("shards", "dcp", "compat", "bin")
    if (folder / "checkpoint_manifest.json").exists() and chance.random() < 0.1:
        seal(folder, functools.partial(mutate, chance=chance))
    else:
        damage(folder, chance, sealed=chance.random() < 0.7)
    if has_manifest:
        attempt("verify", root, lambda: verify(folder))
    if kind in ("shards", "dcp"):
        safe = chance.random() < 0.5
        loaded += attempt("merge", root, lambda safe=safe: merged(safe))
        loaded += unchanged("sharded", lambda: sharded.load_state(folder), (), model, optimizer.optimizer)
        loaded += unchanged("unsharded", lambda: load_run(bare, folder, process=process), (), plain, plain_optimizer)
    elif has_manifest:
        loaded += unchanged("plain", lambda: load_run(run, folder, process=process), (), plain, plain_optimizer)
        for path in sorted(folder.glob("*.bin")):
            attempt("load", root, lambda path=path: load(path), FileNotFoundError)
    elif kind == "offload":
        loaded += attempt("offload", root, offloaded, FileNotFoundError)
    else:
        loaded += weights_into(chance.choice(MAPS), dispatch=chance.random() < 0.4)
print("loaded", loaded)
sharded.end_training()
finish()
