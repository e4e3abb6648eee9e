# SPDX-License-Identifier: Apache-2.0
"""Where a model is cut for training, what travels beside, who uses which tensor: decided alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from .flow import Flow, observe
from .order import MisfitError, StagePlan, decide
from .remedy import remedy
from .split import Unit, computing_units, measure
from .stage import StagedModel

logger = logging.getLogger(__name__)


def plan(model: nn.Module, options: PipelineParallelConfig, stages: int, device: torch.device) -> StagePlan:
    """Decide how a model is cut into `stages` (all of all ranks). All ranks call it.

    The order in which units compute, and what they use of each other, are seen in a forward on the first rank: on
    example inputs, else on those that a model of transformers makes up. Raises PrepareError for what does not fit.
    """
    units = computing_units(model)
    names = [unit.name for unit in units]
    flow: Flow | None = None
    if options.example_inputs is not None:
        flow = _of_first_rank(model, lambda: observe(model, names, (), options.example_inputs or {}), device)
    elif _is_transformers_model(model):
        flow = _of_first_rank(model, lambda: _observe_dummies(model, names), device)

    def seconds(units: list[Unit]) -> list[float]:
        return _of_first_rank(model, lambda: measure(model, units, options.example_inputs or {}), device)

    try:
        return decide(model, options, stages, units, flow, seconds if options.balance == "time" else None)
    except MisfitError as error:
        assert flow is not None
        raise PrepareError(f"{error} {remedy(model, options, stages, units, flow, seen=True)}") from error


def remedy_of(
    staged: StagedModel, options: PipelineParallelConfig, stages: int, units: Sequence[Unit]
) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """What a staged model says about a call that does not fit its cut. `units` are those of the whole model."""

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        try:
            with staged.observed() as forward:
                names = [unit.name for unit in units]
                flow = observe(staged.model, names, args, kwargs, fake_only=True, forward=forward)
        except Exception as error:
            logger.debug("the forward was not seen without content: %s", error)
            return (
                "Give `example_inputs`, keyword arguments of the forward: prepare then runs it once, and sees the "
                "order in which modules compute and what they use of each other. (Here it could not be tried.)"
            )
        return remedy(staged.model, options, stages, units, flow, seen=False)

    return find


def _is_transformers_model(model: nn.Module) -> bool:
    return all(hasattr(model, name) for name in ("dummy_inputs", "config", "main_input_name"))


def _observe_dummies(model: Any, names: list[str]) -> Flow | None:
    """The forward of a model of transformers on inputs of its own; None where it does not take them."""
    try:
        weight = next(model.parameters())
        given = {name: value.to(weight.device) for name, value in model.dummy_inputs.items()}
        tokens = given.get("input_ids", torch.ones(2, 4, dtype=torch.long, device=weight.device))
        config, kind = model.config, model.main_input_name
        if kind == "pixel_values":
            given = {kind: weight.new_zeros(2, config.num_channels, config.image_size, config.image_size)}
        elif kind == "input_features":
            frames = 2 * config.max_source_positions
            given = {kind: weight.new_zeros(len(tokens), config.num_mel_bins, frames)}
        if config.is_encoder_decoder:
            given.setdefault("decoder_input_ids", tokens)
        flow = observe(model, names, (), given, fake_only=True)
    except Exception as error:
        logger.debug("%s does not run on its dummy inputs: %s", type(model).__name__, error)
        return None
    return flow if flow.called else None


def _of_first_rank(model: nn.Module, find: Callable[[], Any], device: torch.device) -> Any:
    """What the first rank finds out, on all of them."""
    told: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told = [find()]
        except Exception as caught:
            # The others wait to be told.
            error, told = caught, [f"{type(caught).__name__}: {caught}"]
    dist.broadcast_object_list(told, src=0, device=device)
    if isinstance(told[0], str):
        raise PrepareError(f"could not run {type(model).__name__} with example_inputs: {told[0]}") from error
    return told[0]
