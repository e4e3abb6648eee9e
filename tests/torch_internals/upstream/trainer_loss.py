# SPDX-License-Identifier: Apache-2.0
"""With sp_backend="deepspeed", the only value, Trainer asks DeepSpeed for the ranks of a sequence, not the mesh."""

import sys
from types import SimpleNamespace

import torch
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

asked = []
groups = SimpleNamespace(_get_sequence_parallel_group=lambda: asked.append("deepspeed") or 1 / 0)
sys.modules["deepspeed"] = sys.modules["deepspeed.utils"] = SimpleNamespace(groups=groups)
mesh = {"sp": SimpleNamespace(get_group=lambda: asked.append("mesh") or 1 / 0)}
layout = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
inputs = {"shift_labels": torch.zeros(1, 1)}
try:
    deepspeed_sp_compute_loss(
        SimpleNamespace(torch_device_mesh=mesh),
        lambda **_: SimpleNamespace(loss=torch.ones(())),
        inputs, False, layout,
    )  # fmt: skip
except ZeroDivisionError:
    pass
if asked == ["deepspeed"]:
    raise SystemExit("the ranks of a sequence are asked of DeepSpeed, although there is a mesh")
