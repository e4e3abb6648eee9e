# SPDX-License-Identifier: Apache-2.0
"""Changes that a program makes to an engine's parameters between two steps, which ZeRO alone would undo.

ZeRO's step computes its own fp32 weights and overwrites the model's parameters with them. A parameter that was
clamped, initialised anew or loaded in the meantime is therefore copied into those weights before the step.
"""

from __future__ import annotations

import warnings
from operator import attrgetter

import torch
import torch.distributed as dist

from ...core.errors import PrepareError
from .state import EngineState, has_master

_version = attrgetter("_version")
# Steps before which values are compared as well: a change through `.data` has no version, and loops repeat themselves.
_COMPARED_STEPS = 3


class ParameterChanges:
    """Finds the parameters that were changed since the last step of an engine, and takes their values over.

    Args:
        state: of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        named = state.module.named_parameters()
        stepped = {} if state.is_plain else {name: p for name, p in named if has_master(p)}
        self._names: list[str] = list(stepped)
        self._parameters: list[torch.nn.Parameter] = list(stepped.values())
        self._compared = 0
        self._warned = False
        self._versions: list[int] = []
        self.record()

    def record(self) -> None:
        """Note the parameters as they are: after a step, or after weights were loaded."""
        self._versions = list(map(_version, self._parameters))

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy changed parameters into the fp32 weights of this rank. PrepareError for one that was sharded then."""
        versions = list(map(_version, self._parameters))
        if versions != self._versions:
            changed = [i for i, (new, old) in enumerate(zip(versions, self._versions, strict=True)) if new != old]
            lost = [
                self._names[i]
                for i in changed
                # One that ZeRO-3 shards between its uses.
                if not self._state.take_over(p := self._parameters[i]) and not getattr(p, "ds_persist", True)
            ]
            if lost:
                raise PrepareError(
                    f"{', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''} changed on rank {dist.get_rank()} while "
                    "ZeRO stage 3 had them sharded: the next step would undo it. Call "
                    "deepspeed.utils.safe_set_full_fp32_param(parameter, value) on all ranks instead"
                )
            self._versions = versions
        if self._compared < _COMPARED_STEPS:
            self._compared += 1
            unseen = [i for i, p in enumerate(self._parameters) if self._state.take_over(p)]
            if unseen and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._names[unseen[0]]} and {len(unseen) - 1} other parameters were changed through `.data`. "
                    f"ZeRO's step overwrites parameters with its fp32 weights. The change was copied there, which is "
                    f"done in the first {_COMPARED_STEPS} steps only: change the parameters themselves, under "
                    "torch.no_grad()"
                )
