# SPDX-License-Identifier: Apache-2.0
"""A scheduler cannot be made for an optimizer whose step was replaced by a function."""

import torch

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
step = optimizer.step
optimizer.step = lambda closure=None: step(closure)
try:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
except AttributeError as error:
    raise SystemExit(f"AttributeError: {error}") from None
