# SPDX-License-Identifier: Apache-2.0
"""A flattened state cannot be loaded into an optimizer with a group that has no parameters."""

import torch
from torch.distributed.checkpoint import state_dict

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}])
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
saved = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
try:
    state_dict.set_optimizer_state_dict(model, optimizer, saved, options=options)
except IndexError as error:
    raise SystemExit(f"IndexError: {error}") from None
