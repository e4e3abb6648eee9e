# SPDX-License-Identifier: Apache-2.0
"""What the words, numbers and objects of an FSDP plugin mean to torch."""

from __future__ import annotations

from typing import Any

from ..core import env
from ..core.errors import ConfigurationError, suggestion

# What the words of FSDP1's sharding strategies mean to FSDP2, which knows one switch: reshard after the forward.
_RESHARD_WORDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


def member(kind: Any, value: Any, field: str) -> Any:
    """A member of a torch enum from itself, its name in any case, or its number (as text or not)."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value in [one.value for one in kind]:
            return kind(value)
    elif isinstance(value, str):
        # torch's enum has _HYBRID_SHARD_ZERO2 for the API's HYBRID_SHARD_ZERO2.
        for name in (value.upper(), f"_{value.upper()}"):
            if name in kind.__members__:
                return kind[name]
    choices = [name.lstrip("_") for name in kind.__members__]
    raise ConfigurationError(
        f"{field}={value!r} is not one of {choices}{suggestion(str(value).upper(), choices)}"
    )


def reshards(requested: Any, origin: str) -> bool | int:
    """What a value means to FSDP2: True, False, or the size of the groups to reshard to."""
    if origin == "sharding_strategy":
        from torch.distributed.fsdp import ShardingStrategy

        # Its numbers are FSDP1's, no sizes.
        requested = member(ShardingStrategy, requested, origin)
    word = getattr(requested, "name", requested)
    if isinstance(word, str) and word.isdigit() and int(word) > 1:
        return int(word)
    if isinstance(word, str):
        if word.upper() == "NO_SHARD":
            raise ConfigurationError(
                f"{origin}={word}: FSDP2 always shards. For unsharded parameters on each rank (DDP) leave FSDP out."
            )
        if word.upper().startswith("HYBRID_SHARD"):
            raise ConfigurationError(
                f"{origin}={word}: FSDP2 takes hybrid sharding from the layout. Give the Accelerator "
                "parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
            )
        found = _RESHARD_WORDS.get(word.upper())
        if found is None:
            requested = env.parse_bool(word, where=origin)
        else:
            requested = found
    if not isinstance(requested, bool) and not (isinstance(requested, int) and requested > 1):
        raise ConfigurationError(
            f"{origin}={requested!r}: FSDP2 takes True, False or the size of the groups to reshard to (2 or more)"
        )
    return requested


def names(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names; None stays None."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def state_dict_configs(kind: str) -> tuple[Any, Any]:
    """Return torch's configurations of model and optimizer state for a kind of state dict; None for others."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
    )

    if kind == "FULL_STATE_DICT":
        return (
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        )
    if kind == "SHARDED_STATE_DICT":
        return ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(
            offload_to_cpu=True
        )
    return None, None
