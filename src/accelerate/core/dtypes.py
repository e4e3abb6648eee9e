# SPDX-License-Identifier: Apache-2.0
"""Dtypes by their names in safetensors files, and by torch's own names."""

from __future__ import annotations

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
BY_NAME = {name: dtype for dtype, name in NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without its prefix, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: object) -> torch.dtype:
    """Any dtype of torch by its name. Raises ValueError where there is none."""
    if isinstance(name, str):
        found = getattr(torch, name, None)
    else:
        found = None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{str(name)[:80]!r} is not a dtype of this torch")
    return found


def tensor_dtype(name: object) -> torch.dtype:
    """The dtype of a tensor in a document. Torch ends the process for tensors of some dtypes that it cannot read."""
    found = torch_dtype(name)
    if found not in NAMES:
        raise ValueError(f"tensors of dtype {name} are not saved")
    return found
