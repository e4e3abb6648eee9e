# SPDX-License-Identifier: Apache-2.0
"""The gradient scaler says by its scale alone whether it has skipped a step: not of which of two optimizers."""

import torch

scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
optimizers = []
for gradient in (1.0, float("inf")):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizers.append(torch.optim.SGD([parameter], lr=1.0))
    scaler.scale(parameter.sum() * gradient).backward()
results = [scaler.step(optimizer) for optimizer in optimizers]
if results[0] == results[1] and scaler.get_scale() == 2.0:
    raise SystemExit(f"step returned {results}, and the scale is known after update() only")
