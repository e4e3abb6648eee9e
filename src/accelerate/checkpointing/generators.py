# SPDX-License-Identifier: Apache-2.0
"""The random number generators of a process: Python's, NumPy's, torch's on the CPU and on each accelerator."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from ..core.devices import accelerator_type, module_of
from .run_state import StateDict

_HOST = ("python", "numpy", "torch")


class GlobalGenerators:
    """The generators of this process, as an object with a state."""

    def state_dict(self) -> StateDict:
        """Return the states by generator; a list with one state per device for an accelerator."""
        state: StateDict = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        kind = accelerator_type()
        if kind is not None:
            module = module_of(kind)
            if hasattr(module, "get_rng_state_all"):
                state[kind] = list(module.get_rng_state_all())
            elif hasattr(module, "get_rng_state"):
                state[kind] = [module.get_rng_state()]
        return state

    def load_state_dict(self, state: StateDict) -> list[str]:
        """Restore the generators. Returns a note for each kind of generator that this machine does not have."""
        if "seed" in state:
            random.seed(state["seed"])
            np.random.seed(state["seed"])
            torch.manual_seed(state["seed"])  # on all devices
            return []
        random.setstate(_python_state(state["python"]))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        kind = accelerator_type()
        notes = []
        for name in accelerators(state):
            if name != kind:
                notes.append(
                    f"the state of the {name} generators was not used: this machine has no {name} device"
                )
                continue
            module = module_of(name)
            if hasattr(module, "set_rng_state_all"):
                # As many as are here: the saving process may have seen more devices than this one.
                present = int(torch.accelerator.device_count())
                module.set_rng_state_all(state[name][:present])
            else:
                module.set_rng_state(state[name][0])
        return notes


def seeded(state: StateDict, rank: int) -> StateDict:
    """A state for a rank whose own was not saved: a seed made from the number of the rank and from that of rank 0."""
    digest = hashlib.blake2b(
        state["torch"].cpu().numpy().tobytes() + rank.to_bytes(4, "little"), digest_size=4
    )
    return {"seed": int.from_bytes(digest.digest(), "little")}


def accelerators(state: Mapping[str, object]) -> list[str]:
    """The device types whose generators are in a state."""
    return [name for name in state if name not in _HOST]


def check_generators(state: StateDict) -> None:
    """Try the saved states on new generators, and raise their errors. The generators of the process are unchanged."""
    random.Random().setstate(_python_state(state["python"]))
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"].cpu())
    for name in accelerators(state):
        if not isinstance(state[name], list) or not all(
            isinstance(one, torch.Tensor) for one in state[name]
        ):
            raise ValueError(f"rng.{name} is not a list of tensors")


def _python_state(state: Sequence[Iterable[object]]) -> tuple[object, ...]:
    return (state[0], tuple(state[1]), state[2])
