# SPDX-License-Identifier: Apache-2.0
"""Gradients between two backwards of an accumulation window: set aside, added, saved and restored.

A parameter that FSDP2 does not shard has them in `.grad`. For one that it shards, what is already reduced is in
`.grad` of the shard. The rest is kept with the unsharded parameter, in its dtype or in that of the reduction.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple, TypedDict

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..core.errors import CheckpointError
from ..torch_internals import dtensor
from ..torch_internals.fsdp2 import (
    module_parameter,
    sharded_parameter,
    shards_of,
    unsharded_parameter,
    waiting_gradients,
)
from .gradients import local
from .unwrap import named_parameters

# By the name of the place.
Gradients = dict[str, torch.Tensor]


class SavedShard(TypedDict):
    """The gradient of a DTensor: its local shard, and the `str` of each placement."""

    local: torch.Tensor
    placements: list[str]


class _Place(NamedTuple):
    """A gradient is `owner.attribute`, of the shape and layout of `like`."""

    name: str
    owner: object
    attribute: str
    like: torch.Tensor


class AccumulatedGradients:
    """A model's gradients on this rank, of an unfinished accumulation window.

    Args:
        model: a model that is laid out.
        roots: the modules that contain the FSDP2 units; None for the model itself.
    """

    def __init__(self, model: nn.Module, roots: Iterable[nn.Module] | None = None) -> None:
        roots = list(roots or [model])
        units: dict[FSDPModule, None] = {}
        for root in roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    units[module] = None
        self._units = list(units)
        # While no unit is gathered the model shows shards.
        names = {parameter: name for name, parameter in named_parameters(model)}
        self._sharded = []
        # Modules of one unit, and roots inside of each other, have the same shards.
        shards = {id(shard): shard for shard in shards_of(roots)}
        for shard in shards.values():
            name = names.pop(module_parameter(shard))
            self._sharded.append((name, shard))
        self._plain = [(name, parameter) for parameter, name in names.items()]
        self._all_places: list[_Place] = []

    def _places(self) -> list[_Place]:
        if self._all_places:
            return self._all_places
        places = [_Place(name, parameter, "grad", parameter) for name, parameter in self._plain]
        is_complete = True
        for name, sharded in self._sharded:
            unsharded = unsharded_parameter(sharded)
            if unsharded is None:
                is_complete = False
                continue
            shard = sharded_parameter(sharded)
            places.append(_Place(f"{name} (shard)", shard, "grad", shard))
            places.append(_Place(f"{name} (unsharded)", unsharded, "grad", unsharded))
            places.append(_Place(f"{name} (sum)", sharded, "unsharded_accumulated_grad", unsharded))
        if is_complete:
            self._all_places = places
        return places

    def of_parameters(self, parameters: Container[int]) -> list[torch.Tensor]:
        """This rank's gradients of the parameters with these ids."""
        gradients = []
        for _, parameter in self._plain:
            if id(parameter) in parameters:
                gradients.append(parameter.grad)
        for _, sharded in self._sharded:
            shard = sharded_parameter(sharded)
            unsharded = unsharded_parameter(sharded)
            if id(shard) in parameters or id(unsharded) in parameters:
                gradients.append(shard.grad)
                for owner, attribute in waiting_gradients(sharded):
                    gradients.append(getattr(owner, attribute))
        return [local(gradient) for gradient in gradients if gradient is not None]

    def take(self) -> Gradients:
        """Remove and return all gradients."""
        gradients: Gradients = {}
        for name, owner, attribute, _ in self._places():
            gradient = getattr(owner, attribute)
            if gradient is not None:
                gradients[name] = gradient
                setattr(owner, attribute, None)
        return gradients

    def add(self, gradients: Gradients) -> None:
        """Add gradients that `take` returned to the present ones."""
        if not gradients:
            return
        for name, owner, attribute, _ in self._places():
            gradient = gradients.get(name)
            present = getattr(owner, attribute)
            if present is None:
                setattr(owner, attribute, gradient)
            elif gradient is not None:
                present.add_(gradient)

    def state_dict(self) -> dict[str, torch.Tensor | SavedShard]:
        """This rank's gradients by the name of their place; a DTensor's local shard comes with its placements."""
        saved = {}
        for name, owner, attribute, _ in self._places():
            gradient = getattr(owner, attribute)
            if gradient is not None:
                saved[name] = _saved(gradient)
        return saved

    def check_state_dict(self, state: Mapping[str, torch.Tensor | SavedShard]) -> None:
        """Raise CheckpointError for places that this rank lacks, or other shapes. Every rank calls it.

        Before the first forward nothing is known of some places. Their gradients have the shapes of the model.
        """
        if self._all_places:
            self._laid_out(state)

    def load_state_dict(self, state: Mapping[str, torch.Tensor | SavedShard]) -> None:
        """Replace all gradients by those of `state_dict`; every rank calls it. Raises as `check_state_dict`."""
        if state and not self._all_places:
            # Some are kept with the unsharded parameters, which a model has from its first forward on.
            for unit in self._units:
                unit.unshard()
                unit.reshard()
        loaded = self._laid_out(state)
        for place in self._places():
            setattr(place.owner, place.attribute, loaded.get(place.name))

    def _laid_out(
        self, state: Mapping[str, torch.Tensor | SavedShard]
    ) -> Mapping[str, torch.Tensor]:
        places = {place.name: place for place in self._places()}
        strange = [name for name in state if name not in places]
        if strange:
            raise CheckpointError(
                f"the saved window contains gradients of {', '.join(strange[:5])}, which this "
                "rank does not have"
            )
        return {name: _loaded(name, value, places[name].like) for name, value in state.items()}


def _saved(gradient: torch.Tensor) -> torch.Tensor | SavedShard:
    if not isinstance(gradient, DTensor):
        return gradient.detach()
    return {
        "local": gradient.to_local().detach(),
        "placements": list(map(str, gradient.placements)),
    }


def _loaded(name: str, value: torch.Tensor | SavedShard, like: torch.Tensor) -> torch.Tensor:
    is_plain = isinstance(value, torch.Tensor)
    if isinstance(value, torch.Tensor):
        local = value
    else:
        local = value["local"]
    if is_plain is isinstance(like, DTensor) or (is_plain and local.shape != like.shape):
        raise CheckpointError(
            f"the saved gradient of {name} has shape {list(local.shape)}, not {list(like.shape)}"
        )
    local = local.to(like.device)
    if isinstance(value, torch.Tensor) or not isinstance(like, DTensor):
        return local
    placements = [_placement(text, like) for text in value["placements"]]
    return dtensor.as_dtensor(local, like, placements)


def _placement(text: str, like: DTensor) -> Placement:
    """Parse the `str` of a placement."""
    for placement in like.placements:
        if text == str(placement):
            return placement
    if text == "R":
        return Replicate()
    kind, _, inside = text.removesuffix(")").partition("(")
    if kind not in ("S", "P"):
        raise CheckpointError(f"a saved gradient has the layout {text}, which cannot be restored")
    if kind == "S":
        return Shard(int(inside))
    return Partial(inside)
