# SPDX-License-Identifier: Apache-2.0
"""A compiled module has other names in its state dict, and no public way back to the plain module."""

import torch
from torch import nn

model = nn.Linear(2, 2)
compiled = torch.compile(model)
public = [name for name in dir(compiled) if not name.startswith("_")]
reachable = any(getattr(compiled, name) is model for name in public)
if list(compiled.state_dict()) != list(model.state_dict()) and not reachable:
    raise SystemExit(
        f"names are {list(compiled.state_dict())}, and no public attribute is the plain module"
    )
