# SPDX-License-Identifier: Apache-2.0
"""Operations on many tensors in one call."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from accelerate.torch_internals import foreach


def test_one_call_for_all_tensors() -> None:
    sources = [torch.full((2,), float(number)) for number in range(20)]
    targets = [torch.zeros(2, dtype=torch.bfloat16) for _ in sources]
    with profile(activities=[ProfilerActivity.CPU]) as calls:
        foreach.copy_(targets, sources)
        foreach.mul_(targets, 2.0)
    assert torch.equal(torch.stack(targets).float(), 2 * torch.stack(sources))
    assert {row.key for row in calls.key_averages()} >= {
        "aten::_foreach_copy_",
        "aten::_foreach_mul_",
    }
