# SPDX-License-Identifier: Apache-2.0
"""A module does not say which of its buffers are not persistent; its state dict does not tell, as hooks change it."""

import torch
from torch import nn


def without_mean(_, state, prefix, metadata):
    state.pop("mean")


module = nn.Module()
module.register_buffer("mask", torch.ones(2), persistent=False)
module.register_buffer("mean", torch.ones(2))
# As quantized layers do, which save their values under other names.
module.register_state_dict_post_hook(without_mean)
missing = set(dict(module.named_buffers())) - set(module.state_dict())
public = [name for name in dir(module) if "persistent" in name and not name.startswith("_")]
if missing != {"mask"} and not public:
    raise SystemExit(f"not persistent: mask; not in the state dict: {sorted(missing)}")
