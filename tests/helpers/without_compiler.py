# SPDX-License-Identifier: Apache-2.0
"""Imported by a script: DDP and torch's optimizers do not import torch's compiler, half of what a short process costs.

They import it to mark their functions as not to be compiled, to ask for its settings for DDP and to clear its caches.
In a process that compiles nothing none of this has an effect. Only for scripts that test something else: launches,
failures, restarts. A program that is run as it stands gets it from `start/sitecustomize.py`.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace


class WithoutCompiler:
    """Finds a stand-in where torch's compiler is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch._dynamo" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(
            disable=lambda function, *_, **__: function,
            graph_break=lambda *_, **__: None,
            utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
            trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
        )


sys.meta_path.insert(0, WithoutCompiler())  # type: ignore[arg-type]
