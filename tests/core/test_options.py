# SPDX-License-Identifier: Apache-2.0
"""The registry of options: each variable that is read has a row, and each row is read as what it is."""

from __future__ import annotations

import ast
import functools
import re
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
    "value": {"int", "float", "truth", "switch"},
}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The modules of the package, by their path in it."""
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


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
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and ours.fullmatch(node.value)
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
                case ast.AnnAssign(
                    target=ast.Name(id=name)
                ):  # a field of a dataclass that reads its own variables
                    used.add(name)
    # Read in a loop over a prefix: the end of the name says which field or rank it is.
    families = (
        "fp8_",
        "ACCELERATE_FP8_",
        "ACCELERATE_FP8_OVERRIDE_",
        "parallelism_config_",
        "fsdp_",
        "megatron_lm_",
    )
    ranks = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
    unused = []
    for row in [
        *options.options().values(),
        *options.VARIABLES,
        *options.TORCHRUN,
        *options.FOREIGN,
    ]:
        names = {row.name, row.variable}
        names |= {name.removeprefix(family) for name in names for family in families}
        names |= {name.lower() for name in names}
        if not names & used and not row.name.startswith(ranks):
            unused.append(row.name)
    assert unused == []


def test_a_variable_without_a_row_cannot_be_read(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CUP", "true")
    for read in (env.get, env.get_flag, env.get_int, env.value, env.raw):
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
    assert {name for text in engines.values() for name in text.split(" or ")} <= set(
        options.LAUNCHERS
    )


def test_defaults_fit_their_own_rows() -> None:
    for row in options.options().values():
        row.convert(row.default, row.name)
        for choice in row.choices:
            assert (
                row.convert(choice.upper(), row.name)
                == row.convert(choice.lower(), row.name)
                == choice
            )


@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf61", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductr", "inductor"),
        ("ACCELERATE_FP8_BACKEND", "x", "ao, te, msamp"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "gpu", "none, cpu, nvme"),
        ("ACCELERATE_GRADIENT_CLIPPING", "much", "not a number"),
        ("FSDP_SHARDING_STRATEGY", "FULL", "FULL_SHARD"),
        ("FSDP_RESHARD_AFTER_FORWARD", "perhaps", "size of the groups"),
        ("FSDP_USE_ORIG_PARAMS", "2", "true, false"),
        ("MEGATRON_LM_TP_DEGREE", "0", "1 or more"),
        ("PARALLELISM_CONFIG_PP_SCHEDULE", "2f2b", "1f1b"),
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
        ("ACCELERATE_DYNAMO_BACKEND", "hpu_backend"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
        ("ACCELERATE_GRADIENT_CLIPPING", "auto"),
        ("FSDP_SHARDING_STRATEGY", "1"),
        ("FSDP_SHARDING_STRATEGY", "_HYBRID_SHARD_ZERO2"),
        ("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD"),
        ("FSDP_STATE_DICT_TYPE", "3"),
        ("OMP_NUM_THREADS", "4,2"),
        ("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "kernels-community/flash-attn2"),
    ],
)
def test_every_spelling_of_a_word_is_accepted(monkeypatch, name, text) -> None:
    monkeypatch.setenv(name, text)
    env.check_run()
