# SPDX-License-Identifier: Apache-2.0
"""One kernel for many tensors has no public name; a loop calls one kernel for each."""

import torch
from torch.profiler import ProfilerActivity, profile

tensors = [torch.ones(2) for _ in range(20)]
with profile(activities=[ProfilerActivity.CPU]) as calls:
    for tensor in tensors:
        tensor.mul_(2.0)
count = sum(row.count for row in calls.key_averages() if row.key == "aten::mul_")
public = [name for name in dir(torch) if "foreach" in name and not name.startswith("_")]
if count == len(tensors) and not public:
    raise SystemExit(f"{count} kernels; torch._foreach_mul_ calls one, and has no public name")
