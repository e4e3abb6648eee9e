# SPDX-License-Identifier: Apache-2.0
"""Imported by a script: DDP and torch's optimizers do not import torch's compiler, half of what a short process costs.

They import it to mark their functions as not to be compiled, to ask for its settings for DDP and to clear its caches.
In a process that compiles nothing none of this has an effect. Only for scripts that test something else: launches,
failures, restarts.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch

if "torch._dynamo" not in sys.modules:
    compiler = ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    compiler.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
    compiler.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # type: ignore[attr-defined]
    compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = torch._dynamo = compiler  # type: ignore[assignment]
