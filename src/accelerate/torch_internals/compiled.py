# SPDX-License-Identifier: Apache-2.0
"""Whether modules are compiled, and the plain module inside of `torch.compile`'s wrapper."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from . import Internal

COMPILED = Internal(
    name="compiled",
    what="the class of the module that torch.compile returns, its _orig_mod, and Module._compiled_call_impl",
    versions="2.11 to 2.14",
    upstream="https://github.com/pytorch/pytorch/issues/101107",
    needed_by="unwrap_model, compile_regions; saved models whose names are those of the plain model",
    without="a compiled model counts as a plain one: its saved names begin with _orig_mod, unwrap_model returns it",
    test="tests/torch_internals/test_compiled.py::test_the_plain_module_of_a_compiled_one",
)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `module` is a module that `torch.compile` returned."""
    # The class is loaded with the compiler; where that is not loaded, nothing is compiled.
    if not COMPILED.is_on or "torch._dynamo.eval_frame" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return COMPILED.is_on and module._compiled_call_impl is not None


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether submodules of `module` are compiled, either wrapped or in place."""
    if is_compiled_module(module):
        original = uncompiled(module)
    else:
        original = module
    inner = (child for child in module.modules() if child is not module and child is not original)
    return any(is_compiled_module(child) or is_compiled_in_place(child) for child in inner)


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` or `compile_regions` got; `module` itself if it is from neither."""
    if COMPILED.is_on:
        original = getattr(module, "_orig_mod", None)
    else:
        original = None
    if isinstance(original, nn.Module):
        return original
    return module


def replace_uncompiled(compiled: nn.Module, module: nn.Module) -> None:
    """Have the wrapper of `torch.compile` call another module."""
    compiled._orig_mod = module


def remember_uncompiled(regional: nn.Module, module: nn.Module) -> None:
    """Keep `module` where `torch.compile` keeps the plain module; it is not a child of `regional`."""
    regional.__dict__["_orig_mod"] = module
