# SPDX-License-Identifier: Apache-2.0
"""Seed random number generators, and synchronize them between ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..core import devices
from ..core.enums import RNGType
from ..core.errors import ConfigurationError
from ..runtime.mesh import data_shard
from ..state import AcceleratorState, PartialState
from . import tensors


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of `random`, `numpy` and `torch`, on every device.

    Args:
        seed: the seed.
        device_specific: add this process's index to the seed, so that ranks draw different numbers. With a
            `ParallelismConfig`, the index of its data shard is added: ranks that read the same samples draw the same.
        deterministic: also make torch raise an error for operations without a deterministic algorithm.

    Raises:
        ValueError, TypeError: the seed is not an integer from 0 to 2**32 - 1. No generator is changed.

    Example:
        set_seed(42)
    """
    if device_specific:
        state = PartialState()
        layout = AcceleratorState._shared_state.get("parallelism_config")
        index = state.process_index
        if layout is not None:
            index, _ = data_shard(layout, index)
        seed += index
    # It takes integers from 0 to 2**32 - 1 only.
    np.random.seed(seed)
    random.seed(seed)
    # Seeds the CPU and, where they are used, all accelerators.
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: RNGType | None = None, generator: torch.Generator | None = None
) -> None:
    """Copy rank 0's state of one random number generator to every rank. Does nothing without a type."""
    if rng_type is not None:
        synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Copy rank 0's random number generator states to every rank, in one message.

    Args:
        rng_types: the kinds of generators: "torch", "cuda", "generator", ...
        generator: the generator that "generator" means.

    Raises:
        ValueError: an unknown type.
        ConfigurationError: a type whose device is not present, or "generator" without a generator.

    Example:
        synchronize_rng_states(["torch"])
        order = torch.randperm(len(dataset))  # the same on every rank
    """
    generators = [_access(RNGType(rng_type), generator) for rng_type in rng_types]
    states = [read() for read, _ in generators]
    if not states or not PartialState().use_distributed:
        return
    tensors.broadcast_nested(states)
    for (_, write), state in zip(generators, states, strict=True):
        write(state)


def sync_rng_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Copy the states of the first rank's generators, of the CPU and of `device`, to all ranks of a group."""
    modules: list[Any] = [torch]
    if device.type != "cpu":
        modules.append(devices.generator_module(device.type))
    for module in modules:
        state = module.get_rng_state().to(device)
        dist.broadcast(state, group=group, group_src=0)
        module.set_rng_state(state.cpu())


def _access(
    rng_type: RNGType, generator: torch.Generator | None
) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """What returns the state of a generator, and what sets it."""
    if rng_type is RNGType.GENERATOR:
        if generator is None:
            raise ConfigurationError(
                'rng_types: "generator" needs a generator whose seed to synchronize: pass one'
            )
        return generator.get_state, generator.set_state
    if rng_type is RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if rng_type is RNGType.XLA:
        import torch_xla.core.xla_model as xla

        def read() -> Tensor:
            return torch.tensor(xla.get_rng_state())

        def write(state: Tensor) -> None:
            xla.set_rng_state(int(state))

        return read, write
    if devices.accelerator_type() != rng_type.value:
        raise ConfigurationError(
            f"rng_types: this machine does not have a {rng_type.value} device whose seed could be "
            "synchronized"
        )
    module = devices.generator_module(rng_type.value)
    return module.get_rng_state, module.set_rng_state
