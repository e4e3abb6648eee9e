# SPDX-License-Identifier: Apache-2.0
"""Tensors with shapes and no values, and a mode that sees every operation on them, are in private modules only."""

import importlib

homes = {
    "FakeTensorMode": ("torch", "torch.fx", "torch.export", "torch.utils"),
    "TorchDispatchMode": ("torch", "torch.overrides", "torch.utils"),
}
private = [
    name
    for name, modules in homes.items()
    if not any(hasattr(importlib.import_module(module), name) for module in modules)
]
if private:
    raise SystemExit(f"without a public name: {private}")
