# SPDX-License-Identifier: Apache-2.0
"""Checkpoints edited by hand, their checksums made to match: a load succeeds, or names the file, in bounded memory.

Mutants are made from a seed. They are loaded in one process whose address space is limited.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import copy, json, os, pickle, random, resource, shutil, signal, sys, zlib
from pathlib import Path
import numpy as np, torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.checkpointing import manifest as manifests
from accelerate.checkpointing.blocks import BlockIO
from accelerate.commands import checkpoint as command
from accelerate.core.errors import AccelerateError, CheckpointError

root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Own:
    state = None
    def state_dict(self):
        return {"array": np.zeros(3, [("a", "i4"), ("b", "f8", (2,))]), "set": {1, 2}, "t": torch.ones(90)}
    def load_state_dict(self, state): self.state = state

def never(*args, **kwargs): raise SystemExit("a pickle was run")

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 3))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 6)), batch_size=2)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
accelerator.register_for_checkpointing(Own())
for (batch,) in loader:
    model(batch).sum().backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()
good = root / "good"
accelerator.save_state(good)
whole = root / "weights"
accelerator.save_model(model, whole, max_shard_size=700)
plain = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 3))
pickle.load = pickle.loads = never

VALUES = [None, True, -1, 2_000_000_000, 2**70, 1.5, "", "x", "../../x", [], {}, [[]], {"$": "tensor"}, {"$": "enum"},
          {"$": "ndarray", "dtype": "<f8", "shape": [2_000_000_000], "b64": ""}, {"$": []}, {"$": "dict", "v": [1]},
          {"$": "tensor", "ref": "no"}, [2_000_000_000, 1], "quint8", {"$": "parameter", "v": 1}, [0, 10**18]]

def places(value, found, depth=0):
    if depth > 20: return found
    if isinstance(value, dict):
        for key in value:
            found.append((value, key)); places(value[key], found, depth + 1)
    elif isinstance(value, list):
        for index in range(len(value)):
            found.append((value, index)); places(value[index], found, depth + 1)
    return found

def mutate(value, chance):
    for _ in range(chance.choice([1, 1, 2])):
        found = places(value, [])
        if not found: return chance.choice(VALUES)
        at, key = chance.choice(found)
        kind = chance.randrange(5)
        if kind == 0: del at[key]
        elif kind == 1 and isinstance(at, dict): at[str(chance.choice(VALUES))] = at.pop(key)
        elif kind == 2:
            deep = at[key]
            for _ in range(chance.choice([3, 3000])): deep = [deep]
            at[key] = deep
        else: at[key] = copy.deepcopy(chance.choice(VALUES))
    return value

def dump(value):
    # Deeper than Python's writer goes.
    limit = sys.getrecursionlimit(); sys.setrecursionlimit(30000)
    try: return json.dumps(value).encode()
    finally: sys.setrecursionlimit(limit)

def damage(path, chance):
    raw = path.read_bytes()
    if path.suffix == ".safetensors":
        length = int.from_bytes(raw[:8], "little")
        if chance.random() < 0.2:
            return chance.choice([raw[:chance.randrange(len(raw))], b"", (2**60).to_bytes(8, "little") + raw[8:]])
        text = dump(mutate(json.loads(raw[8:8 + length]), chance))
        return len(text).to_bytes(8, "little") + text + raw[8 + length:]
    if chance.random() < 0.1:
        return chance.choice([b"", b"[" * 100000, b"\\xff\\xfe", raw[:-3], b"NaN", b'{"$": 1, "$": 2}'])
    return dump(mutate(json.loads(raw), chance))

def seal(folder, body_change=None):
    path = folder / manifests.MANIFEST
    data = json.loads(path.read_bytes()); body = data["manifest"]
    with BlockIO() as io:
        for name in body["files"]:
            if (folder / name).is_file(): body["files"][name] = io.record(folder / name).to_json()
    if body_change: body = data["manifest"] = body_change(body)
    limit = sys.getrecursionlimit(); sys.setrecursionlimit(30000)
    try:
        data["crc32"] = manifests._checksum(body); path.write_text(json.dumps(data))
    finally: sys.setrecursionlimit(limit)

def attempt(name, folder, load):
    signal.alarm(20)
    try:
        load(); return 1
    except (AccelerateError, FileNotFoundError) as error:
        assert str(root) in str(error), f"{name}: no file is named: {error}"
    except ValueError as error:  # the documented error of load_checkpoint_in_model
        assert name == "weights", f"{name}: {error!r}"
    except BaseException as error:
        import traceback; traceback.print_exc()
        raise SystemExit(f"{name}: {type(error).__name__}: {error}"[:2000])
    finally: signal.alarm(0)
    return 0

def verify(folder):
    try: command.main(["verify", str(folder)])
    except SystemExit as end:
        if end.code: raise CheckpointError(f"{folder} is not sound")

size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 29), size + (3 << 29)))
files = [p.name for p in sorted(good.iterdir()) if p.name != manifests.MANIFEST]
shards = [p.name for p in sorted(whole.iterdir())]
loaded = 0
for number in range(count):
    chance = random.Random(seed * 1_000_003 + number)
    kind = number % 4
    folder = root / f"mutant"
    shutil.rmtree(folder, ignore_errors=True)
    print("mutant", number, flush=True)
    if kind == 3:
        shutil.copytree(whole, folder)
        path = folder / chance.choice(shards)
        if chance.random() < 0.05: path.unlink(); os.mkfifo(path)
        else: path.write_bytes(damage(path, chance))
        places_of = chance.choice([None, {"": "cpu"}])
        loaded += attempt("weights", folder, lambda: load_checkpoint_in_model(plain, folder, device_map=places_of))
        continue
    shutil.copytree(good, folder)
    if kind == 2: seal(folder, lambda body: mutate(body, chance))
    else:
        path = folder / chance.choice(files)
        if chance.random() < 0.05: path.unlink(); os.mkfifo(path)
        else:
            path.write_bytes(damage(path, chance)); seal(folder)
    attempt("verify", folder, lambda: verify(folder))
    loaded += attempt("load", folder, lambda: accelerator.load_state(folder))
print("loaded", loaded, "of", count)
"""


def fuzz(tmp_path, count, seed, timeout):
    program = tmp_path / "fuzz.py"
    program.write_text(textwrap.dedent(PROGRAM))
    root = tmp_path / "root"
    root.mkdir()
    done = subprocess.run(
        [sys.executable, str(program), str(root), str(count), str(seed)],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-4000:]


def test_mutants_are_loaded_or_named(tmp_path):
    fuzz(tmp_path, 120, 1, 170)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 5))
def test_more_mutants(tmp_path, seed):
    fuzz(tmp_path, 600, seed, 800)
