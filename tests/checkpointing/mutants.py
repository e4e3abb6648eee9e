# SPDX-License-Identifier: Apache-2.0
"""Files and folders damaged at random, and calls that must survive them: for the fuzzing programs of this folder."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.checkpointing import manifest as manifests
from accelerate.checkpointing.blocks import BlockIO
from accelerate.commands import checkpoint as command
from accelerate.core.errors import AccelerateError, CheckpointError

MEMORY = 3 << 29  # bytes of address space that a program may take after its start
SECONDS = 20  # of one call

VALUES = [None, True, -1, 2_000_000_000, 2**70, 1.5, "", "x", "../../x", [], {}, [[]], {"$": "tensor"}, {"$": "enum"},
          {"$": "ndarray", "dtype": "<f8", "shape": [2_000_000_000], "b64": ""}, {"$": []}, {"$": "dict", "v": [1]},
          {"$": "tensor", "ref": "no"}, [2_000_000_000, 1], "quint8", {"$": "parameter", "v": 1},
          [0, 10**18]]  # fmt: skip


class _Ran(BaseException):
    """A pickle was run."""


def never(*args: Any, **kwargs: Any) -> Any:
    """Takes the place of `pickle.load`: no format of ours may need it."""
    raise _Ran


def limit_memory() -> None:
    """Let this process take at most MEMORY bytes from now on."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def chances(program: str) -> Iterator[tuple[int, random.Random]]:
    """(number, random generator) of each mutant that the command line asks for: `program ROOT COUNT SEED [ONLY]`."""
    count, seed = int(sys.argv[2]), int(sys.argv[3])
    for number in [int(sys.argv[4])] if len(sys.argv) > 4 else range(count):
        print(program, "mutant", number, flush=True)
        before = len(findings)
        yield number, random.Random(seed * 1_000_003 + number)
        findings[before:] = [f"mutant {number}: {one}" for one in findings[before:]]


# --- one value ------------------------------------------------------------------------------------------------------


def places(value: Any, found: list[tuple[Any, Any]], depth: int = 0) -> list[tuple[Any, Any]]:
    if depth > 20:
        return found
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        places(value[key], found, depth + 1)
    return found


def mutate(value: Any, chance: random.Random) -> Any:
    """A JSON value with one or two entries removed, renamed, nested deep, or replaced."""
    for _ in range(chance.choice([1, 1, 2])):
        found = places(value, [])
        if not found:
            return chance.choice(VALUES)
        at, key = chance.choice(found)
        kind = chance.randrange(5)
        if kind == 0:
            del at[key]
        elif kind == 1 and isinstance(at, dict):
            at[str(chance.choice(VALUES))] = at.pop(key)
        elif kind == 2:
            deep = at[key]
            for _ in range(chance.choice([3, 3000])):
                deep = [deep]
            at[key] = deep
        else:
            at[key] = copy.deepcopy(chance.choice(VALUES))
    return value


def dump(value: Any) -> bytes:
    """JSON, nested deeper than Python's writer goes by itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(30000)
    try:
        return json.dumps(value).encode()
    finally:
        sys.setrecursionlimit(limit)


# --- one file -------------------------------------------------------------------------------------------------------


def damaged_bytes(path: Path, chance: random.Random) -> bytes:
    """The content of a file, changed in the way of its format, or at a random place."""
    raw = path.read_bytes()
    if chance.random() < 0.3:
        return _cut_or_flipped(raw, chance)
    if path.suffix == ".safetensors":
        length = int.from_bytes(raw[:8], "little")
        text = dump(mutate(json.loads(raw[8 : 8 + length]), chance))
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]
    if path.suffix == ".json":
        if chance.random() < 0.1:
            return chance.choice([b"", b"[" * 100000, b"\xff\xfe", raw[:-3], b"NaN", b'{"$": 1, "$": 2}'])
        return dump(mutate(json.loads(raw), chance))
    if zipfile.is_zipfile(path):
        return _damaged_archive(path, raw, chance)
    return _damaged_pickle(raw, chance)


def _cut_or_flipped(raw: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return raw[: chance.randrange(len(raw) + 1)]
    if kind == 1:
        return chance.choice([b"", b"\0" * len(raw), (2**60).to_bytes(8, "little") + raw[8:], raw + raw])
    changed = bytearray(raw)
    for _ in range(chance.choice([1, 1, 8, 64])):
        # Headers and indices stand at the ends of files.
        at = chance.choice([chance.randrange(len(raw)), chance.randrange(min(len(raw), 256))])
        changed[at if chance.random() < 0.7 else -1 - at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _damaged_archive(path: Path, raw: bytes, chance: random.Random) -> bytes:
    """A zip archive of torch.save whose members are other ones, or whose index gives them another size."""
    with zipfile.ZipFile(path) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()}
    names = list(members)
    kind = chance.randrange(4)
    if kind == 0:
        at = raw.index(b"PK\1\2") + chance.choice([20, 24])  # a size in the first entry of the index
        return raw[:at] + chance.choice([1 << 31, 0, 0xFFFFFFFF]).to_bytes(4, "little") + raw[at + 4 :]
    if kind == 1:
        del members[chance.choice(names)]
    elif kind == 2:
        one, other = chance.choice(names), chance.choice(names)
        members[one], members[other] = members[other], members[one]
    else:
        pickled = next(name for name in names if name.endswith("data.pkl"))
        members[pickled] = _damaged_pickle(members[pickled], chance)
    made = path.with_name(path.name + ".made")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if chance.random() < 0.2 else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    content = made.read_bytes()
    made.unlink()
    return content


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("echo a pickle was run >&2; kill -9 $PPID",)


def _damaged_pickle(raw: bytes, chance: random.Random) -> bytes:
    """A pickle with a number of another size, a name of another class, or another value instead."""
    kind = chance.randrange(5)
    if kind == 0:
        return pickle.dumps(chance.choice([*VALUES, {1: 2}, {"a": object}, [1] * 5, {"model": 1}]), protocol=2)
    if kind == 1:
        return pickle.dumps({"x": _Runs()}, protocol=2)
    if kind == 2:
        # K: a number of one byte; J: of four. Shapes, strides and offsets are such.
        found = [at for at in range(len(raw) - 4) if raw[at : at + 1] in (b"K", b"J", b"M")]
        at = chance.choice(found or [0])
        if chance.random() < 0.5:
            return raw[:at] + b"J" + (2_000_000_000).to_bytes(4, "little") + raw[at + 2 :]
        return raw[: at + 1] + bytes([chance.randrange(256)]) + raw[at + 2 :]
    if kind == 3:
        for word in chance.sample([b"FloatStorage", b"torch\n", b"Size", b"Tensor", b"float32", b"offsets"], 6):
            if word in raw:
                return raw.replace(word, word[::-1])
    return _cut_or_flipped(raw, chance)


def replace(path: Path, chance: random.Random) -> None:
    """Something else in the place of a file: nothing, a pipe, a folder, a link."""
    kind = chance.randrange(7)
    content = path.read_bytes()
    path.unlink()
    if kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to("/dev/zero")
    elif kind == 5:
        path.with_name(chance.choice(["x" + path.name, "other.safetensors", ".hidden"])).write_bytes(content)
    elif kind == 6:
        path.symlink_to("../" * 20 + "etc/hostname")


def damage(folder: Path, chance: random.Random, sealed: bool) -> None:
    """Change a file of a folder; with `sealed` its manifest's checksums are made to match, or the manifest goes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != manifests.MANIFEST]
    path = chance.choice(files)
    if chance.random() < 0.2:
        replace(path, chance)
    else:
        path.write_bytes(damaged_bytes(path, chance))
    if not sealed:
        (folder / manifests.MANIFEST).unlink(missing_ok=True)
    elif (folder / manifests.MANIFEST).exists():
        seal(folder)


def seal(folder: Path, change: Callable[[Any], Any] | None = None) -> None:
    """Write the present files' sizes and checksums into the manifest, or change the manifest's content."""
    path = folder / manifests.MANIFEST
    data = json.loads(path.read_bytes())
    body = data["manifest"]
    with BlockIO() as io:
        for name in body["files"]:
            if (folder / name).is_file() and "/dev/" not in os.path.realpath(folder / name):
                body["files"][name] = io.record(folder / name).to_json()
    if change is not None:
        body = data["manifest"] = change(body)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(30000)
    try:
        data["crc32"] = manifests._checksum(body)
        path.write_text(json.dumps(data))
    finally:
        sys.setrecursionlimit(limit)


def fresh_copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


# --- one call -------------------------------------------------------------------------------------------------------

findings: list[str] = []
last_error = ""


def found(name: str, what: str) -> None:
    """Note what is wrong with this mutant, with the traceback where an error is being handled."""
    findings.append(f"{name}: {what}"[:2000])
    print("FOUND", findings[-1], flush=True)
    if sys.exc_info()[0] is not None:
        traceback.print_exc(file=sys.stdout)


def attempt(name: str, root: Path, call: Callable[[], Any], *documented: type[BaseException]) -> bool:
    """Whether the call succeeds. Anything is noted but an error of this library's, or one of `documented`, that names
    a file below `root`; as are calls that take longer than SECONDS, and those that ask for too much memory."""
    global last_error
    signal.alarm(SECONDS)
    try:
        call()
        return True
    except (AccelerateError, *documented) as error:
        last_error = traceback.format_exc()
        if str(root) not in str(error):
            found(name, f"no file is named: {error}")
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                found(name, f"too much memory was requested: {cause!r}")
                break
            cause = cause.__cause__ or cause.__context__
    except BaseException as error:
        found(name, f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    return False


def verify(folder: Path) -> None:
    """`accelerate checkpoint verify` and `list`, whose exit code is 0 or 1."""
    for action in ("verify", "list"):
        try:
            command.main([action, str(folder)])
        except SystemExit as end:
            if end.code not in (0, 1):
                raise CheckpointError(f"{folder} has no checkpoint") from None


def finish() -> None:
    """The end of a program: exit code 1 where something was found."""
    sys.exit("\n".join(findings) or 0)
