# SPDX-License-Identifier: Apache-2.0
"""The registry of options: each variable that is read has a row, and each row is read as what it is."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelerate
from accelerate.core import env, options
from accelerate.core.errors import ConfigurationError

PACKAGE = Path(accelerate.__file__).parent
KINDS = {
    "get": {"text", "int", "float", "truth", "switch"},
    "raw": {"text", "int", "float", "truth", "switch"},
    "get_flag": {"truth", "switch"},
    "get_int": {"int", "count"},
    "get_float": {"float"},
}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The modules of the package, by their path in it."""
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def reads() -> Iterator[tuple[str, str, str]]:
    """(place, function, variable) of each read of a variable that is written out."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "env"
                and node.func.attr in KINDS
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield f"{path}:{node.lineno}", node.func.attr, node.args[0].value


def test_each_read_has_a_row_of_its_kind() -> None:
    rows = options.variables()
    found = list(reads())
    assert len(found) > 40
    wrong = [
        (place, function, name)
        for place, function, name in found
        if name not in rows or rows[name].kind not in KINDS[function]
    ]
    assert wrong == []


def test_each_name_that_looks_like_a_variable_is_one() -> None:
    ours = re.compile(r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]*[A-Z0-9]")
    rows = options.variables()
    unknown = {
        f"{path}:{node.lineno} {node.value}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ours.fullmatch(node.value)
        if node.value not in rows and node.value not in vars(accelerate.core.constants)
    }
    assert unknown == set()


def test_each_row_is_used() -> None:
    """An option that nothing reads would be accepted and have no effect."""
    registries = {Path("core/options.py"), Path("core/strategy_options.py")}
    used = set()
    for path, tree in trees().items():
        for node in ast.walk(tree) if path not in registries else ():
            match node:
                case ast.Constant(value=str(name)) | ast.Attribute(attr=name):
                    used.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):  # a field of a dataclass that reads its own variables
                    used.add(name)
    # Read in a loop over a prefix: the end of the name says which field or rank it is.
    families = ("fp8_", "ACCELERATE_FP8_", "ACCELERATE_FP8_OVERRIDE_", "parallelism_config_", "fsdp_", "megatron_lm_")
    ranks = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
    unused = []
    for row in [*options.options().values(), *options.VARIABLES, *options.TORCHRUN, *options.FOREIGN]:
        names = {row.name, row.variable}
        names |= {name.removeprefix(family) for name in names for family in families}
        names |= {name.lower() for name in names}
        if not names & used and not row.name.startswith(ranks):
            unused.append(row.name)
    assert unused == []


def test_a_variable_without_a_row_cannot_be_read(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CUP", "true")
    for read in (env.get, env.get_flag, env.get_int, env.get_float, env.raw):
        with pytest.raises(LookupError, match="did you mean ACCELERATE_USE_CPU"):
            read("ACCELERATE_USE_CUP")


def test_names_keys_flags_and_variables_are_used_once() -> None:
    rows = [*options.options().values(), *options.VARIABLES, *options.TORCHRUN, *options.FOREIGN]
    for of in (
        [row.name for row in rows],
        [row.file_key for row in rows if row.file_key],
        [flag for row in options.options().values() for flag in row.spellings],
        [row.variable for row in rows if row.variable],
    ):
        assert [name for name, count in Counter(of).items() if count > 1] == []


def test_an_option_of_one_engine_names_one() -> None:
    """A flag of another engine is reported by this name, so that it must be one of `--engine`."""
    engines = {name: row.engine for name, row in options.options().items() if row.engine}
    assert engines["slurm_options"] == "slurm" and engines["vm"] == "tpu"
    assert set(engines.values()) <= set(options.LAUNCHERS)


def test_defaults_fit_their_own_rows() -> None:
    for row in options.options().values():
        row.convert(row.default, row.name)
        for choice in row.choices:
            assert row.convert(choice.upper(), row.name) == row.convert(choice.lower(), row.name) == choice


NEW_OPTION = """
from accelerate.core import env, options
from accelerate.core.errors import ConfigurationError
from accelerate.core.option import Option

row = Option(
    "warm_up", "int", "Steps of warm-up.", least=0, key="warm_up", variable="ACCELERATE_WARM_UP", question="Warm-up?"
)
options.TRAINING = options.Group(options.TRAINING.title, options.TRAINING.help, (*options.TRAINING.options, row))
options.GROUPS = tuple(options.TRAINING if group.title == "training" else group for group in options.GROUPS)

import os, sys, pathlib, tempfile
from accelerate.commands import launch
from accelerate.commands.config import explain, load_config_from_file
from accelerate.commands.config.questions import _row
from accelerate.config import launch_file
from accelerate.config.launch_settings import given, resolve_settings
from accelerate.core.errors import ConfigurationError
from accelerate.launchers.variables import variables

# the parser and its help
parser = launch.launch_command_parser()
args = parser.parse_args(["--warm-up", "7", "script.py"])
assert given(args) == {"warm_up": 7} and "--warm_up N" in parser.format_help()
# the processes
assert variables(resolve_settings(given(args)))["ACCELERATE_WARM_UP"] == "7"
assert "ACCELERATE_WARM_UP" not in variables(resolve_settings({}))
# the configuration file, its checks and the API's object
folder = pathlib.Path(tempfile.mkdtemp())
path = launch_file.write(folder / "c.yaml", {"warm_up": 5})
settings = resolve_settings({}, launch_file.read(path))
assert settings["warm_up"] == 5 and settings.origin("warm_up") == f"{path}:1"
assert load_config_from_file(path).to_dict()["warm_up"] == 5
assert "warm_up" in explain(settings)
(folder / "wrong.yaml").write_text("debug: false\\nwarm_up: some\\n")
for read in (lambda: launch_file.read(folder / "wrong.yaml"), lambda: resolve_settings({"warm_up": -1})):
    try:
        read()
    except ConfigurationError as error:
        assert "warm_up" in str(error) and "0 or more" in str(error), error
    else:
        raise AssertionError
# the questions
assert _row("warm_up").text == "Warm-up?"
# the variable: read, and checked at the start of a run
os.environ["ACCELERATE_WARM_UP"] = "3"
assert env.get_int("ACCELERATE_WARM_UP") == 3 and resolve_settings({})["warm_up"] == 3
os.environ["ACCELERATE_WARM_UP"] = "soon"
try:
    env.check_run()
except ConfigurationError as error:
    assert str(error) == "ACCELERATE_WARM_UP='soon' is not an integer: use 0 or more"
else:
    raise AssertionError
assert "torch" not in sys.modules
"""


def test_a_new_option_is_one_row() -> None:
    """The row of an option is all that the parser, the file, the questions, the processes and the checks need."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        [sys.executable, "-c", NEW_OPTION], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf61", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductr", "inductor"),
        ("ACCELERATE_DYNAMO_MODE", "fast", "max-autotune"),
        ("ACCELERATE_LOG_LEVEL", "loud", "WARNING"),
        ("ACCELERATE_FP8_BACKEND", "x", "ao, te, msamp"),
        ("ACCELERATE_FP8_FORMAT", "E3M4", "E4M3"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "gpu", "none, cpu, nvme"),
        ("ACCELERATE_GRADIENT_CLIPPING", "much", "not a number"),
        ("FSDP_SHARDING_STRATEGY", "FULL", "FULL_SHARD"),
        ("FSDP_SHARDING_STRATEGY", "6", "FULL_SHARD"),
        ("FSDP_RESHARD_AFTER_FORWARD", "perhaps", "size of the groups"),
        ("FSDP_STATE_DICT_TYPE", "DICT", "SHARDED_STATE_DICT"),
        ("FSDP_AUTO_WRAP_POLICY", "WRAP", "NO_WRAP"),
        ("FSDP_BACKWARD_PREFETCH", "PRE", "BACKWARD_PRE"),
        ("FSDP_USE_ORIG_PARAMS", "2", "true, false"),
        ("MEGATRON_LM_RECOMPUTE_METHOD", "some", "uniform, block"),
        ("MEGATRON_LM_TP_DEGREE", "0", "1 or more"),
        ("MEGATRON_LM_ATTENTION_BACKEND", "flush", "true, false"),
        ("PARALLELISM_CONFIG_PP_SCHEDULE", "2f2b", "1f1b"),
        ("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "ring", "allgather, alltoall"),
        ("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "eager", "sdpa"),
    ],
)
def test_a_wrong_word_is_named_with_the_choices(monkeypatch, name, text, choices) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError) as caught:
        env.check_run()
    for part in (name, text, choices):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ACCELERATE_MIXED_PRECISION", "BF16"),
        ("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER"),
        ("ACCELERATE_DYNAMO_BACKEND", "hpu_backend"),
        ("ACCELERATE_LOG_LEVEL", "debug"),
        ("ACCELERATE_FP8_BACKEND", "TE"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
        ("ACCELERATE_GRADIENT_CLIPPING", "auto"),
        ("ACCELERATE_GRADIENT_CLIPPING", "1e-1"),
        ("FSDP_SHARDING_STRATEGY", "1"),
        ("FSDP_SHARDING_STRATEGY", "hybrid_shard"),
        ("FSDP_SHARDING_STRATEGY", "_HYBRID_SHARD_ZERO2"),
        ("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD"),
        ("FSDP_RESHARD_AFTER_FORWARD", "4"),
        ("FSDP_RESHARD_AFTER_FORWARD", "False"),
        ("FSDP_STATE_DICT_TYPE", "3"),
        ("FSDP_BACKWARD_PREFETCH", "no_prefetch"),
        ("FSDP_VERSION", "2"),
        ("OMP_NUM_THREADS", "4,2"),
        ("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "kernels-community/flash-attn2"),
    ],
)
def test_every_spelling_of_a_word_is_accepted(monkeypatch, name, text) -> None:
    monkeypatch.setenv(name, text)
    env.check_run()
