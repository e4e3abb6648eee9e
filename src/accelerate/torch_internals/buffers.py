# SPDX-License-Identifier: Apache-2.0
"""Buffers of a module that are not part of its state dict."""

from __future__ import annotations

from torch import nn

from . import Internal

NON_PERSISTENT = Internal(
    name="non_persistent_buffers",
    what="nn.Module._non_persistent_buffers_set",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="get_non_persistent_buffers of the API; cpu_offload and disk_offload with offload_buffers=True",
    without="all buffers count as part of the state dict, and a forward looks for values of them that were never "
    "offloaded",
    test="tests/torch_internals/test_buffers.py::test_buffers_outside_of_the_state_dict",
)


def non_persistent(module: nn.Module) -> set[str]:
    """The names of the buffers of the module itself that its state dict does not have."""
    if NON_PERSISTENT.is_on:
        return set(module._non_persistent_buffers_set)
    return set()
