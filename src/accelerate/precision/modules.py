# SPDX-License-Identifier: Apache-2.0
"""Modules that compute in another dtype than the rest of their model: `Accelerator(precision_policy=...)`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..config import checks
from ..core.errors import ConfigurationError, PrepareError
from ..core.modules import replace_data
from ..core.trees import convert_to_fp32

# Pattern of module names -> what these modules compute in. The first pattern that matches a name counts.
PrecisionPolicy = Mapping[str, torch.dtype]


def check_policy(policy: Any, mixed_precision: str) -> PrecisionPolicy:
    """A policy with dtypes for names of them. Raises ConfigurationError for what a run of that precision cannot do."""
    if policy and mixed_precision not in ("bf16", "fp16"):
        raise ConfigurationError(
            "precision_policy needs mixed_precision='bf16' or 'fp16', but it is "
            f"{mixed_precision!r}"
            + (
                ", in which each module computes in the dtype of its weights"
                if mixed_precision == "no"
                else ""
            )
        )
    dtypes: dict[str, torch.dtype] = {}
    for pattern, requested in policy.items():
        dtype = checks.dtype(f"precision_policy[{pattern!r}]", requested)
        if dtype not in (torch.float32, torch.bfloat16) and not (
            dtype is torch.float16 and mixed_precision == "fp16"
        ):
            raise ConfigurationError(
                f"precision_policy[{pattern!r}]={requested!r}: use torch.float32 or torch.bfloat16; torch.float16 "
                "needs mixed_precision='fp16', which scales gradients"
            )
        dtypes[pattern] = dtype
    return dtypes


def check_matches(policy: PrecisionPolicy, models: Sequence[nn.Module]) -> None:
    """Raise PrepareError for a pattern that no module inside the models has."""
    names: list[str] = []
    for model in models:
        names += [name for name, _ in model.named_modules() if name]
    for pattern in policy if models else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            kinds = ", ".join(type(model).__name__ for model in models)
            raise PrepareError(
                f"precision_policy: no module of {kinds} has a name that matches {pattern!r}. The "
                "names are those of model.named_modules()"
            )


def find_regions(model: nn.Module, policy: PrecisionPolicy) -> dict[nn.Module, torch.dtype]:
    """The outermost modules that compute in a dtype of the policy, and those inside them with another one.

    What is never called, as `nn.ModuleList`, stands for the modules in it.
    """
    regions: dict[nn.Module, torch.dtype] = {}
    # Of each module by name: what the policy says, and the dtype around it.
    said: dict[str, torch.dtype | None] = {"": None}
    around: dict[str, torch.dtype | None] = {"": None}
    if not policy:
        return regions
    for name, module in model.named_modules():
        if not name:
            continue
        parent = name.rpartition(".")[0]
        dtype = said[parent]
        for pattern, chosen in policy.items():
            if fnmatchcase(name, pattern):
                dtype = chosen
                break
        said[name] = dtype
        around[name] = around[parent]
        is_called = type(module).forward is not nn.Module.forward
        if dtype is not None and dtype != around[parent] and is_called:
            around[name] = dtype
            regions[module] = dtype
    return regions


def computing_in(dtype: torch.dtype, device_type: str, module: nn.Module, forward: Any) -> Any:
    """A module's forward in a dtype; in fp32 its inputs, parameters and buffers of half precision are cast."""
    is_wide = dtype is torch.float32
    if is_wide:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if tensor.dtype in (torch.float16, torch.bfloat16):
                replace_data(tensor, tensor.detach().float())

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_wide:
            args, kwargs = convert_to_fp32((args, kwargs))
            autocast = torch.autocast(device_type, enabled=False)
        else:
            autocast = torch.autocast(device_type, dtype=dtype)
        with autocast:
            return forward(*args, **kwargs)

    return run
