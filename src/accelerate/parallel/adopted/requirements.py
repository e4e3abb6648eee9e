# SPDX-License-Identifier: Apache-2.0
"""What is refused of models that are sharded already: one table, run before their layout is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...core.errors import PrepareError
from ...core.imports import is_torch_version
from ...core.modules import class_name
from ...torch_internals import dtensor
from .sharing import Ranks, parameters_of, ranks_of


def _no_values(models: Sequence[nn.Module]) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise PrepareError(
                    f"{name} of {class_name(model)} is on the meta device, but the model is "
                    "already sharded: call model.to_empty(device=...) and initialize it, or load "
                    "its weights, before prepare"
                )


def _unknown_dimensions(models: Sequence[nn.Module]) -> None:
    """Refuse mesh dimensions of which it is unknown whether their ranks read the same samples."""
    unknown: dict[Ranks, tuple[str, DeviceMesh, str | int]] = {}
    split: set[Ranks] = set()
    for model in models:
        for name, parameter, sharing in parameters_of(model):
            if not isinstance(parameter, DTensor):
                continue
            mesh = parameter.device_mesh
            for dimension, placement in enumerate(parameter.placements):
                ranks = ranks_of(mesh, dimension)
                if len(ranks) == 1 or ranks in sharing.averaged:
                    continue
                if placement.is_replicate():
                    label = (mesh.mesh_dim_names or range(mesh.ndim))[dimension]
                    unknown.setdefault(ranks, (name, mesh, label))
                else:
                    split.add(ranks)
    for ranks, (name, mesh, label) in unknown.items():
        if ranks not in split:
            raise PrepareError(
                f"{name} is a DTensor on {mesh}, but no parameter is sharded over its dimension "
                f"{label!r} (ranks {list(ranks)}), so whether these ranks read the same samples "
                "is unknown. Call parallelize_module with the slice of the mesh over which "
                "layers are split, and call fully_shard with the other dimensions or leave them "
                "to prepare"
            )


REQUIREMENTS: tuple[Callable[[Sequence[nn.Module]], None], ...] = (
    _no_values,
    _unknown_dimensions,
)


def check(models: Sequence[nn.Module]) -> None:
    """Raises PrepareError for models that are not known to train as those of one process. They are resharded."""
    for requirement in REQUIREMENTS:
        requirement(models)


def check_device(model: nn.Module, device: torch.device) -> None:
    """Raises PrepareError for a model on a mesh of another device than that of the run."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:
            raise PrepareError(
                f"{name} of {class_name(model)} is a DTensor on {parameter.device_mesh}, but this "
                f"run is on {device}: shard the model on a mesh of that device, or let "
                "Accelerator use the device of the mesh"
            )
        if is_torch_version("<", "2.12") and dtensor.is_packed(parameter):
            raise PrepareError(
                f"torch {torch.__version__} cannot gather packed layers such as {name}, so "
                "checkpoints could not be saved: use torch 2.12 or later"
            )
