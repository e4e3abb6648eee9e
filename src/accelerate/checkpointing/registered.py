# SPDX-License-Identifier: Apache-2.0
"""States of registered objects with DTensors, as of averaged weights of a sharded model: they are saved unsharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path


def unsharded(state: Any) -> Any:
    """The state with full tensors in host memory in place of DTensors. Every rank calls it."""
    return tree_map(lambda value: value.full_tensor().cpu() if _is_sharded(value) else value, state)


def sharded_as(state: Any, present: Any) -> Any:
    """A saved state with this rank's shards where the `present` state of the object has DTensors."""
    if not any(map(_is_sharded, tree_leaves(present))):
        return state
    from ..parallel.materialize import as_dtensor, local_shard

    layouts = {path: value for path, value in tree_flatten_with_path(present)[0] if _is_sharded(value)}

    def shard(path: Any, value: Any) -> Any:
        layout = layouts.get(path)
        if layout is None or not isinstance(value, torch.Tensor) or value.shape != layout.shape:
            return value
        return as_dtensor(local_shard(value, layout).to(layout.to_local().device, copy=True), layout)

    return tree_map_with_path(shard, state)


def _is_sharded(value: object) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")
