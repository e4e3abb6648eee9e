# SPDX-License-Identifier: Apache-2.0
"""The plain module inside a compiled one."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.parallel.compile import compile_regions
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.torch_internals.compiled import (
    has_compiled_regions,
    is_compiled_in_place,
    is_compiled_module,
)


def test_the_plain_module_of_a_compiled_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    assert is_compiled_module(compiled) and not is_compiled_module(model)
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    regional = compile_regions(nn.Sequential(nn.ModuleList([model])), backend="eager")
    assert has_compiled_regions(regional) and not has_compiled_regions(model)
    model[0].compile(backend="eager")
    assert is_compiled_in_place(model[0]) and has_compiled_regions(model)
