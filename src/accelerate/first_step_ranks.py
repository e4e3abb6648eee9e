# SPDX-License-Identifier: Apache-2.0
"""What the first-step checks compare between the ranks: batches, parameters and gradients."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .core.modules import is_dtensor
from .core.trees import leaves
from .parallel.prepared import PreparedModel
from .runtime.agreement import Round, pauses
from .runtime.calls import ranks_in_words

# What is compared: parameters of an optimizer, and elements of each tensor.
_PARAMETERS, _ELEMENTS = 32, 1024
# Values that are equal on all ranks differ by no more than rounding on different devices.
_TOLERANCE = 1e-5
# Seconds that rank 0 waits for the other ranks' values.
_PATIENCE = 2.0

# {rank: what `findings` returned for each optimizer, with the line of its step, its type, and its local gradient}
Rows = Mapping[int, Sequence[Mapping[str, Any]]]


def checksum(inputs: Iterable[Any], start: int = 0) -> int:
    """A checksum of the shapes and first elements of all tensors in a model's arguments."""
    found = start
    for tensor in leaves(inputs):
        found = zlib.crc32(f"{tensor.shape}{tensor.dtype}".encode(), found)
        # A tensor inside of a transform of torch.func has no storage.
        plain = type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if plain and tensor.layout is torch.strided and tensor.device.type != "meta":
            first = tensor.detach().flatten()[:_ELEMENTS].cpu().contiguous()
            found = zlib.crc32(first.view(torch.uint8).numpy().tobytes(), found)
    return found


def numbers(tensors: Sequence[torch.Tensor | None]) -> list[list[float]]:
    """For each tensor two sums over its first elements, by which to compare it; zeros where it has no plain ones."""
    found = []
    # In the mode of a traced step new tensors have no values.
    with _disable_current_modes():
        for tensor in tensors:
            # The sum of a DTensor would communicate.
            if tensor is None or not _is_comparable(tensor) or tensor.layout is not torch.strided:
                found.append(torch.zeros(2, dtype=torch.float64, device="cpu"))
                continue
            values = tensor.detach().flatten()[:_ELEMENTS]
            values = (torch.view_as_real(values) if values.is_complex() else values).double()
            found.append(torch.stack([values.sum(), values.abs().sum()]))
        if not found:
            return []
        device = next((one.device for one in found if one.device.type != "cpu"), torch.device("cpu"))
        rows: list[list[float]] = torch.stack([one.to(device) for one in found]).tolist()
        return rows


def findings(
    models: Sequence[PreparedModel], parameters: Sequence[torch.Tensor], others: Iterable[torch.Tensor]
) -> dict[str, Any]:
    """Parameters of an optimizer and their gradients in numbers.

    Args:
        models: all prepared models.
        parameters: those of the optimizer.
        others: those of all optimizers.

    Returns:
        `inside`: {name: numbers} for parameters of models of which all ranks have the same in full.
        `outside`: that for parameters of no prepared model that have a gradient. There are none where the script has
            sharded such a model: what it does with the others is known to it alone.
    """
    own = {id(parameter): number for number, parameter in enumerate(parameters) if _is_comparable(parameter)}
    inside = {
        name: parameter
        for model in models
        if _is_replicated(model)
        for name, parameter in model.inner.named_parameters()
        if id(parameter) in own
    }
    known = {id(parameter) for model in models for parameter in model.trained_parameters()}
    shards_itself = any(_is_sharded(one) and id(one) not in known for one in others)
    outside = {
        f"{own[id(one)]} {tuple(one.shape)}": one
        for one in parameters
        if not shards_itself and id(one) in own and id(one) not in known and one.grad is not None
    }
    return {"inside": _in_numbers(inside), "outside": _in_numbers(outside)}


def _is_comparable(parameter: torch.Tensor) -> bool:
    return type(parameter) in (nn.Parameter, torch.Tensor) and parameter.device.type != "meta"


def _is_sharded(parameter: torch.Tensor) -> bool:
    # The attribute is that of FSDP1.
    return is_dtensor(parameter) or getattr(parameter, "_fsdp_flattened", False)


def _is_replicated(model: PreparedModel) -> bool:
    """Whether the ranks' parameters are the same: not without synchronization, as under LocalSGD."""
    synchronizes = getattr(model.uncompiled, "require_backward_grad_sync", False)
    return synchronizes and not model.is_partial and not model.saves_shards


def _in_numbers(parameters: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    some = list(parameters.items())[:: max(1, len(parameters) // _PARAMETERS)]
    rows = iter(numbers([tensor for _, parameter in some for tensor in (parameter, parameter.grad)]))
    return {name: next(rows) + next(rows) for name, _ in some}


def collect(which: str, value: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """On rank 0 the values of all ranks, empty where one does not come; the other ranks do not wait."""
    exchange = Round(f"first step, {which}")
    exchange.put(value)
    if exchange.rank != 0:
        return {}
    for waited in pauses():
        if exchange.is_complete():
            return exchange.values()
        if waited > _PATIENCE:
            break
    return {}


def differences(found: Rows) -> list[str]:
    """A message for each optimizer that trains other parameters, or with other gradients, on some ranks."""
    notes = []
    for number, first in enumerate(found.get(0, ())):
        rows = {rank: every[number] for rank, every in found.items() if number < len(every)}
        note = _inside_difference(first, rows) or _outside_difference(first, rows)
        if note is not None:
            notes.append(f"{first['at']}: {note}")
    return notes


def _inside_difference(first: Mapping[str, Any], rows: Mapping[int, Mapping[str, Any]]) -> str | None:
    for name in first["inside"]:
        found = {rank: row["inside"].get(name, first["inside"][name]) for rank, row in rows.items()}
        if odd := _odd_ranks(found, slice(0, 2)):
            return (
                f"parameter {name} has other values on {ranks_in_words(odd)} than on rank 0 after the first step. "
                "It was changed on some processes only, or its gradient was not averaged: look for code that runs "
                "on one rank between prepare and the step, " + _CAUSES
            )
        if odd := _odd_ranks(found, slice(2, 4)):
            return (
                f"parameter {name} has another gradient on {ranks_in_words(odd)} than on rank 0: it was not averaged. "
                "Look " + _CAUSES
            )
    return None


_CAUSES = (
    "for other backwards than accelerator.backward, of which DDP averages only the first after a forward of the "
    "prepared model (add the losses), for a module used twice in checkpoints with use_reentrant=True (set it to "
    "False), or for an nn.Embedding with max_norm, whose forward changes the rows that its process reads"
)


def _outside_difference(first: Mapping[str, Any], rows: Mapping[int, Mapping[str, Any]]) -> str | None:
    """A message for parameters of no prepared model, unless the user averages their gradients."""
    names = first["outside"]
    if not names or any(row["outside"].keys() != names.keys() for row in rows.values()):
        # No copies, but other models, such as the stages of a pipeline.
        return None
    differ = any(_odd_ranks({rank: row["outside"][name] for rank, row in rows.items()}) for name in names)
    # Without a difference each rank may have computed the same, or the gradients were averaged.
    local = [row["local"] for row in rows.values()]
    same = None not in local and any(local[0]) and not _odd_ranks(dict(enumerate(local)))
    if not differ and (not same or _has_wrapper()):
        return None
    effect = "each process trains its own copy, and gradients are not averaged"
    if first["is_prepared"]:
        return (
            f"parameters of the {first['optimizer']} belong to no prepared model: {effect}. Pass every module that it "
            "trains to accelerator.prepare"
        )
    return f"this {first['optimizer']} and its model were not prepared: {effect}. Pass both to accelerator.prepare"


def _odd_ranks(rows: Mapping[int, Sequence[float]], part: slice = slice(None)) -> list[int]:
    return [rank for rank, row in rows.items() if not _is_close(row[part], rows[0][part])]


def _is_close(row: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether pairs of a sum and a sum of absolute values are equal, but for rounding."""
    if len(row) != len(reference):
        return False
    for at in range(0, len(row), 2):
        scale = _TOLERANCE * max(abs(row[at + 1]), abs(reference[at + 1]))
        # Not `<=`: NaN is equal to NaN here.
        if any(abs(row[i] - reference[i]) > scale for i in (at, at + 1)):
            return False
    return True


def _has_wrapper() -> bool:
    """Whether the user has wrapped a model in DistributedDataParallel."""
    # By `type`: `isinstance` runs the `__class__` of lazy objects.
    return any(issubclass(type(found), nn.parallel.DistributedDataParallel) for found in gc.get_objects())
