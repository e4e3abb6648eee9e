# SPDX-License-Identifier: Apache-2.0
"""What cannot be a pipeline: one table, run once at the start of `prepare`, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from ...core.imports import is_torch_version

# Options of transformers models that request the outputs of all blocks.
COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class Request:
    """A model and the options of its pipeline."""

    model: nn.Module
    options: PipelineParallelConfig

    @property
    def inputs(self) -> dict[str, inspect.Parameter]:
        """The parameters of the model's forward."""
        return dict(inspect.signature(self.model.forward).parameters)


class Requirement(NamedTuple):
    """`violated` returns what is wrong with a request (empty: nothing), which stands for {} in the message."""

    violated: Callable[[Request], str]
    message: str


def _unknown_inputs(request: Request) -> str:
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in request.inputs.values())
    if takes_any:
        return ""
    return ", ".join(sorted(set(request.options.whole_inputs) - set(request.inputs)))


def _collected(request: Request) -> str:
    config = getattr(request.model, "config", None)
    return next((flag for flag in COLLECTING if getattr(config, flag, False)), "")


def _schedule(request: Request, violated: bool) -> str:
    if violated and request.options.schedule_row.implementation:
        return str(request.options.schedule)
    return ""


REQUIREMENTS = (
    Requirement(
        lambda request: _schedule(
            request, request.options.loss_reduction is None and request.options.num_items is None
        ),
        "schedule={!r} computes the backward of each micro-batch's loss and has to know how these make that of the "
        'batch: give PipelineParallelConfig(loss_reduction="mean") (over samples) or "sum", '
        "or num_items=f, a function of the model's inputs that returns the number of items (labels that count) "
        "that the loss is a mean over. schedule='gpipe' takes any loss",
    ),
    Requirement(
        lambda request: _schedule(
            request, is_torch_version("<", request.options.schedule_row.minimum_torch)
        ),
        f"schedule={{!r}} needs a later torch than {torch.__version__}, whose schedule of that name computes "
        "wrong gradients for some layers (docs/reference/pipeline_schedules.md): use schedule='interleaved' or '1f1b'",
    ),
    Requirement(_unknown_inputs, "whole_inputs names {}, which the model's forward does not take"),
    Requirement(
        lambda request: (
            "labels" if request.options.loss_fn is not None and "labels" in request.inputs else ""
        ),
        "loss_fn is given, and the model's forward takes {} itself: give one of the two",
    ),
    Requirement(
        _collected,
        "the model's config has {}=True: outputs of the blocks of other stages are not collected",
    ),
)


def check(model: nn.Module, options: PipelineParallelConfig) -> None:
    """Raise PrepareError for the first requirement that a model or its options violate."""
    request = Request(model, options)
    for requirement in REQUIREMENTS:
        problem = requirement.violated(request)
        if problem:
            raise PrepareError(requirement.message.format(problem))
