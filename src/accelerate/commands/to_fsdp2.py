# SPDX-License-Identifier: Apache-2.0
"""`accelerate to-fsdp2`: a launch configuration for FSDP1 becomes one for FSDP2; each change is reported."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config import launch_file
from ..core import messages
from ..core.errors import ConfigurationError
from ..core.files import check_writable
from .parser import command_parser, exit_on

STRATEGY = "fsdp_sharding_strategy"
RESHARD = "fsdp_reshard_after_forward"
STATES = "fsdp_state_dict_type"
# Whether a strategy of version 1 frees the gathered parameters after the forward pass.
RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
GONE = {
    "fsdp_backward_prefetch": "FSDP2 always prefetches in the backward pass",
    "fsdp_forward_prefetch": "FSDP2 does not have this option",
    "fsdp_sync_module_states": "FSDP2 always gives all ranks the same weights",
    "fsdp_use_orig_params": "FSDP2 always keeps the model's own parameters",
}


def convert(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys of a configuration file for FSDP2, and what was changed, a line each. `data` stays as it is.

    ConfigurationError where it is not a configuration for FSDP.
    """
    kind = data.get("distributed_type")
    if kind != "FSDP" and (kind is not None or "fsdp_config" not in data):
        raise ConfigurationError(
            f"distributed_type is {kind or 'not given'}: only an FSDP configuration can be "
            "converted"
        )
    options = dict(data.get("fsdp_config") or {})
    new = {**data, "fsdp_config": options}
    changes: list[str] = []
    _sharding(new, options, changes)
    for key, why in GONE.items():
        if key in options:
            changes.append(f"{key}: {_word(options.pop(key))} is removed: {why}")
    _states(options, changes)
    # The key takes words and sizes too, so that it is read as text.
    word = str(options.get(RESHARD)).lower()
    if word in ("true", "false"):
        options[RESHARD] = word == "true"
    if str(options.get("fsdp_version", 1)) != "2":
        changes.append("fsdp_version: 2")
    options["fsdp_version"] = 2
    return new, changes


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _sharding(new: dict[str, Any], options: dict[str, Any], changes: list[str]) -> None:
    version_2 = str(options.get("fsdp_version", 1)) == "2"
    given = options.pop(STRATEGY, None)
    if version_2 and RESHARD in options and given is not None:
        changes.append(
            f"{STRATEGY}: {given} is removed: FSDP2 uses {RESHARD}, which is already set"
        )
        return
    # Version 1 takes its strategies under either key.
    if given is None and str(options.get(RESHARD, "")).upper() in RESHARDS:
        given = options[RESHARD]
    if given is None:
        return
    strategy = str(given).upper()
    options[RESHARD] = RESHARDS[strategy]
    changes.append(f"{STRATEGY}: {strategy} is now {RESHARD}: {_word(RESHARDS[strategy])}")
    if strategy == "NO_SHARD":
        changes.append(
            "note: NO_SHARD kept unsharded parameters on every rank; FSDP2 always shards. For "
            "unsharded parameters use distributed_type MULTI_GPU instead"
        )
    if strategy.startswith("HYBRID_SHARD"):
        _hybrid(new, changes)


def _hybrid(new: dict[str, Any], changes: list[str]) -> None:
    """Version 1 shards within a machine and replicates over machines; version 2 takes that from the layout."""
    machines = new.get("num_machines") or 1
    processes = new.get("num_processes")
    if new.get("parallelism_config"):
        changes.append(
            "note: parallelism_config decides hybrid sharding: check its dp_replicate_size"
        )
    elif machines == 1:
        changes.append("note: on one machine hybrid sharding is full sharding")
    elif isinstance(processes, int) and processes > 0 and processes % machines == 0:
        sizes = {"dp_replicate_size": machines, "dp_shard_size": processes // machines}
        new["parallelism_config"] = {
            f"parallelism_config_{name}": size for name, size in sizes.items()
        }
        words = ", ".join(f"{name} {size}" for name, size in sizes.items())
        changes.append(
            f"parallelism_config: {words}: shards within a machine, replicas over machines, as before"
        )
    else:
        changes.append(
            f"note: num_processes {processes} cannot be divided among {machines} machines: for "
            "hybrid sharding set parallelism_config with dp_replicate_size and dp_shard_size"
        )


def _states(options: dict[str, Any], changes: list[str]) -> None:
    kind = options.get(STATES)
    if str(kind).upper() == "LOCAL_STATE_DICT":
        options[STATES] = "SHARDED_STATE_DICT"
        changes.append(
            f"{STATES}: LOCAL_STATE_DICT is now SHARDED_STATE_DICT: FSDP2 does not have a local "
            "format"
        )
    elif kind is None and str(options.get("fsdp_version", 1)) != "2":
        changes.append(
            f"note: without {STATES} FSDP1 saves FULL_STATE_DICT, and FSDP2 saves "
            "SHARDED_STATE_DICT"
        )


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration file for FSDP2."""
    return convert(config)[0]


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate to-fsdp2`, or add it to `subparsers`."""
    description = "Convert a launch configuration file from FSDP1 to FSDP2, and print each change."
    made = command_parser("to-fsdp2", description, to_fsdp2_command, subparsers)
    made.add_argument("--config_file", required=True, help="Configuration file to convert.")
    made.add_argument(
        "--output_file", help="File to write. With --overwrite, the default is the file to convert."
    )
    made.add_argument("--overwrite", action="store_true", help="Overwrite an existing file.")
    return made


# The name that every command has.
parser = to_fsdp2_command_parser


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 2, and writes nothing, where the file cannot be converted."""
    args = to_fsdp2_command_parser().parse_args(argv)
    with exit_on(ConfigurationError, OSError):
        to_fsdp2_command(args)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Run the command with parsed arguments.

    Raises:
        FileNotFoundError: there is no such configuration file.
        FileExistsError: the output exists, and it is not to be overwritten.
        ConfigurationError: the file cannot be converted, or the output cannot be written.
    """
    source = Path(args.config_file).expanduser()
    file = launch_file.read(source)
    target = source
    if args.output_file is not None:
        target = Path(args.output_file).expanduser()
        check_writable(target, "--output_file")
    elif not args.overwrite:
        raise ConfigurationError(
            "add --output_file for the result, or --overwrite to overwrite the file itself"
        )
    if target.exists() and not args.overwrite:
        raise FileExistsError(
            f"--output_file {target} already exists: choose another file, or add --overwrite"
        )
    try:
        data, changes = convert(file.data)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from None
    launch_file.write(target, data)
    for line in [*file.notes, *changes] or [f"{source} is already for FSDP2: nothing to change"]:
        print(line)
    messages.show(f"wrote {target}")
