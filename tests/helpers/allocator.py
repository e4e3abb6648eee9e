# SPDX-License-Identifier: Apache-2.0
"""What torch's own allocator on the CPU counts during a step."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def peak_of(step: Callable[[], object], steps: int = 4) -> int:
    """The lowest of the peaks of several steps after the first, in bytes above what was allocated before each."""
    # The allocator counts in all threads, gloo's among them, and not only in the profiled one.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    counts_always = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    counts_always.value = True
    peaks = []
    for _ in range(steps + 1):
        gc.collect()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            step()
        events = _allocations(profile)
        before = events[0].total_allocated - events[0].alloc_size
        peaks.append(max(one.total_allocated for one in events) - before)
    counts_always.value = False
    return min(peaks[1:])


def _allocations(profile: torch.profiler.profile) -> list:
    """The allocations and frees of the profiled thread in order, each with the allocator's count."""
    found, nodes = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if hasattr(node.extra_fields, "total_allocated"):
            found.append(node)
    return [node.extra_fields for node in sorted(found, key=lambda node: node.start_time_ns)]
