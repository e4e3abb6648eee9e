# SPDX-License-Identifier: Apache-2.0
"""Which errors say that memory has run out, and what gives memory back."""

import gc
import weakref

import pytest
import torch

from accelerate.core.devices import clear_device_cache, release_memory, should_reduce_batch_size


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("XPU out of memory. Tried"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
        (torch.OutOfMemoryError("anything"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("a", "CUDA out of memory."), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_which_errors_are_about_memory(error, expected):
    assert should_reduce_batch_size(error) is expected


def test_the_cpu_itself_says_it_as_expected():
    with pytest.raises(RuntimeError) as told:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert should_reduce_batch_size(told.value)


def test_an_error_of_a_pipeline_stage_is_about_memory_if_its_cause_is():
    for cause, expected in (
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("shapes"), False),
    ):
        with pytest.raises(RuntimeError) as told:
            raise RuntimeError("[Stage 0] failed to run forward") from cause
        assert should_reduce_batch_size(told.value) is expected


def test_release_memory_gives_nones_and_collects():
    class Node:
        pass

    node = Node()
    node.self, gone = node, weakref.ref(node)
    other = torch.ones(1)
    gc.disable()
    try:
        node, other = release_memory(node, other)
        assert node is None and other is None and gone() is not None
        clear_device_cache(garbage_collection=True)
        assert gone() is None
    finally:
        gc.enable()
    assert release_memory() == []
