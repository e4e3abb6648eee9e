# SPDX-License-Identifier: Apache-2.0
"""A model's state without storage: names, shapes and ties, for layouts whose modules do not have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .materialize import canonical_name


def without_storage(state: Mapping[str, object]) -> dict[str, Any]:
    """A state under plain names whose tensors have shapes only; tied ones are one tensor still."""
    metas: dict[int, Any] = {}

    def on_meta(value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # ZeRO-3 replaces a parameter by an empty tensor with its shape as an attribute.
        shape = getattr(value, "ds_shape", value.shape)
        return metas.setdefault(id(value), torch.empty(shape, dtype=value.dtype, device="meta"))

    return {canonical_name(name): on_meta(value) for name, value in state.items()}


def skeleton(name: str, state: Mapping[str, object]) -> nn.Module:
    """A module of a class called `name` whose `state_dict()` is `state`."""
    kind: type[nn.Module] = type(name, (nn.Module,), {"state_dict": lambda self, *args, **kwargs: dict(state)})
    return kind()


def complete(state: Mapping[str, object], light: Mapping[str, object]) -> dict[str, Any]:
    """A state that has tied tensors under one name, with all the names of `light`; foreign names are left out."""
    present = {id(light[name]): value for name, value in state.items() if name in light}
    known = {name: id(meta) for name, meta in light.items() if id(meta) in present}
    return {name: state.get(name, present[key]) for name, key in known.items()}
