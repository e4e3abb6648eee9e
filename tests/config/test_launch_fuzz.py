# SPDX-License-Identifier: Apache-2.0
"""Mutated configuration files: each is taken, or refused with the key and its line; nothing else ever comes out.

FUZZ=2000 mutates that many files (300 without it), half of them YAML, half JSON.
"""

import copy
import datetime
import json
import os
import random
import re

import pytest
import yaml

from accelerate.commands import to_fsdp2
from accelerate.commands.config import explain
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import prepared
from accelerate.config import launch_file
from accelerate.config.launch_settings import resolve_settings
from accelerate.core import system
from accelerate.core.errors import ConfigurationError
from accelerate.launchers.spec import Program

COUNT = int(os.environ.get("FUZZ", "300"))

BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": True},
    "enable_cpu_affinity": False,
    "fp8_config": {"backend": "TE", "fp8_format": "E4M3", "override_linear_precision": [False, False, True]},
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_min_num_params": 2000,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_version": 2,
    },
    "gpu_ids": "all",
    "log_dir": "logs",
    "machine_rank": 0,
    "main_process_ip": "127.0.0.1",
    "main_process_port": 29511,
    "main_training_function": "main",
    "max_restarts": 0,
    "mixed_precision": "bf16",
    "monitor_interval": 0.5,
    "num_machines": 1,
    "num_processes": 2,
    "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 1},
    "rdzv_backend": "static",
    "same_network": True,
    "stop_timeout": 3.0,
    "tee": "0",
    "tpu_env": [],
    "use_cpu": True,
}


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


VALUES = [
    None, True, False, 0, -1, 3, 65536, 10**30, -(10**400), 0.5, 1e308, float("inf"), float("nan"), "", " ", "é", "😀",
    "no", "yes", "off", "2", "2.0", "1e3", "0x10", "1_000", "all", "null", "nan", "a: b", "x" * 20000, "a\nb",
    "\u2028", "a\0b",
    [], [[]], [1, 2], ["a", None], {}, {"a": 1}, {"a": {"b": {"c": []}}}, {1: 2}, deep(60), datetime.date(2001, 2, 3),
    datetime.datetime(2001, 2, 3, 4, 5), b"\x00\xff", "AMAZON_SAGEMAKER", "DEEPSPEED", "MULTI_GPU", "XLA", "NO", "fp8",
    "c10d", "1:4", "/", "%n", "${HOME}", "'; ls", "Block,Other", "cpu",
]  # fmt: skip
KEYS = [
    "", " ", "é", "😀", "num_procs", "fsdp", "mixed-precision", "NUM_PROCESSES", "use_fsdp", "fp16", "dynamo_backend",
    "use_mps_device", "deepspeed_config", "mpirun_config", "megatron_lm_config", "nnodes", "engine", "config_file",
    "x" * 300, "a.b", "fsdp_config.fsdp_version", "additional_args", "command", "commands", "tpu_name", "__class__",
]  # fmt: skip
# Not for JSON, whose keys are text.
ODD_KEYS = [1, None, True, 2.5, datetime.date(2001, 2, 3), float("nan")]


def mutate_tree(tree, chance, odd):
    """Change one place of the mapping: a value, a key, its depth."""
    inside = [tree, *(value for value in tree.values() if isinstance(value, dict))]
    at = chance.choice(inside)
    if not at:
        at = tree
    key = chance.choice(list(at))
    kind = chance.randrange(8)
    if kind <= 2:
        at[key] = copy.deepcopy(chance.choice(VALUES))
        if not odd and isinstance(at[key], (bytes, datetime.date)):
            at[key] = str(at[key])
    elif kind == 3:
        at[typo(str(key), chance)] = at.pop(key)
    elif kind == 4:
        at[chance.choice(KEYS + (ODD_KEYS if odd else []))] = chance.choice(VALUES[:40])
    elif kind == 5:
        at[key] = chance.choice([[at[key]], {str(key): at[key]}, {"value": at[key]}])
    elif kind == 6:
        chance.choice(inside)[key] = at.pop(key)
    else:
        other = chance.choice(list(tree))
        tree[other], at[key] = at[key], tree[other]
    return tree


def typo(word, chance):
    if not word:
        return "x"
    at = chance.randrange(len(word))
    changed = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word.upper(),
        word.replace("_", "-"),
        word + "s",
        word + " ",
        word[:at] + "\u0430" + word[at + 1 :],
        "",
    ]
    return chance.choice(changed)


PIECES = [
    "{", "}", "[", "]", ":", "#", "&a", "*a", "!", "|", ">", "'", '"', "%", "@", "`", ",", "?", "-", "\t", "\0", "é",
    "~", "<<: *a", "---\n", "...\n", "%YAML 9.9\n", "!!python/object:os.system x", "!!binary x", "!!set {a, b}",
    "!!float x", "!!timestamp x", "? [a, b]\n: c\n", "? {a: b}\n: c\n", "&a [*a]", "\ufeff", "\r", "\x85", "\u2028",
    "\x1b[31m",
    "1e999", "0o9", "0b2", "2001-99-99", "12:30:45", "=", "<<", "\\u00", "\\", "//", "/* */", "NaN", "-Infinity",
]  # fmt: skip


def mutate_text(text, chance):
    """Change the text without regard to what it means."""
    lines = text.splitlines(keepends=True) or ["\n"]
    at = chance.randrange(len(lines))
    kind = chance.randrange(9)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[chance.randrange(len(lines))])
    elif kind == 2:
        lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
    elif kind == 3:
        place = chance.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:place] + chance.choice(PIECES) + lines[at][place:]
    elif kind == 4:
        lines[at] = f"{lines[at].split(':')[0]}: {chance.choice(PIECES)}\n"
    elif kind == 5:
        lines[at] = "  " * chance.randint(0, 3) + lines[at].lstrip()
    elif kind == 6:
        lines.insert(at, chance.choice(PIECES))
    elif kind == 7:
        return text[: chance.randrange(len(text) + 1)]
    else:
        laughs = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
        deep_text = chance.choice(["[" * 3000, "{a: " * 2000, "- " * 2000, "l0: &l0 [x]\n" + laughs])
        lines.insert(at, deep_text)
    return "".join(lines)


def mutate(suffix, chance):
    """The bytes of a file in which one to three things are wrong, or odd, or only different."""
    odd = suffix == "yaml"
    tree = copy.deepcopy(BASE)
    if chance.random() < 0.65:
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            tree = mutate_tree(tree, chance, odd)
            if not tree:
                break
    text = yaml.dump(tree, allow_unicode=True) if odd else json.dumps(tree, indent=1, ensure_ascii=False)
    if chance.random() < 0.4:
        for _ in range(chance.choice([1, 1, 2])):
            text = mutate_text(text, chance)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.06 and data:
        place = chance.randrange(len(data))
        data = data[:place] + bytes(chance.randrange(256) for _ in range(chance.choice([1, 4]))) + data[place + 1 :]
    if chance.random() < 0.02:
        data = chance.choice([b"", b"\n", b"\x00" * 9, b"\xef\xbb\xbf" + data, text.encode("utf-16"), b"\x7fELF\x02"])
    return data


# What is wrong with a file as a whole, or with its syntax.
WHOLE = ("cannot be read", "the file is empty", "expected `key: value` lines", "nested too deep")


def says_where(message, path, data):
    """Whether a refusal names its place: a syntax error the line and column, a wrong key itself and its line."""
    if str(path) not in message:
        return False
    if any(words in message for words in WHOLE):
        return True
    if re.search(r"not (YAML|JSON)", message):
        return bool(re.search(r":\d+:\d+: not YAML|line \d+ column \d+|not YAML: ", message))
    lines = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", data.decode("utf-8-sig", "replace"))
    for found in re.finditer(re.escape(str(path)) + r":(\d+)", message):
        line = lines[int(found[1]) - 1] if int(found[1]) <= len(lines) else ""
        rest = message.replace(str(path), "")
        line = re.sub(r"\\u([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), line)
        words = re.findall(r"[^\s:'\"{}\[\],?&*!]+", line)
        if any(word[:50] in rest or ascii(word)[1:51] in rest for word in words):
            return True
        # A key of no characters has nothing that could be looked for in its line.
        if re.search(r"(unknown key '(\w+\.)?\s*'|'' is no key|a key of several values)", rest):
            return True
    return False


def use(path):
    """What the commands do with a file, up to the moment at which processes would be started."""
    found = launch_file.read(path)
    settings = resolve_settings({}, found)
    explain(settings, everything=True)
    loaded = load_config_from_file(path)
    loaded.to_dict()
    if not found.is_sagemaker:
        _, launcher = prepared(settings, Program("true", (), "program"))
        if launcher.spec.num_processes <= 8:
            assert launcher.dry_run()
    try:
        to_fsdp2.convert(found.data)
    except ConfigurationError as error:
        assert "distributed_type" in str(error) or "fsdp_sharding_strategy" in str(error)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_mutated_files_are_taken_or_refused_by_key_and_line(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(system, "accelerators", lambda: system.Accelerators("cpu", 0))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    chance = random.Random(COUNT)
    path = tmp_path / f"c.{suffix}"
    taken, refused, wrong = 0, 0, []
    for _ in range(COUNT // 2):
        data = mutate(suffix, chance)
        path.write_bytes(data)
        try:
            use(path)
            taken += 1
        except ConfigurationError as error:
            refused += 1
            if not says_where(str(error), path, data) or len(str(error)) > 2000:
                wrong.append((str(error)[:400], data[:200]))
        except Exception as error:
            wrong.append((repr(error)[:400], data[:300]))
    print(f"{suffix}: {taken} taken, {refused} refused")
    assert not wrong, "\n\n".join(f"{message}\n{data!r}" for message, data in wrong[:30]) + f"\n{len(wrong)} in all"
    assert taken > COUNT // 20 and refused > COUNT // 8
