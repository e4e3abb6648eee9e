# SPDX-License-Identifier: Apache-2.0
"""What cannot be a pipeline, checked at the start of `prepare`, before anything is changed."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from ...core.imports import is_torch_version
from ...torch_internals.compiled import is_compiled_module

# Options of transformers models that request the outputs of all blocks.
COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")


def check(model: nn.Module, options: PipelineParallelConfig) -> None:
    """Raise PrepareError for what a model or its options cannot have in a pipeline."""
    if is_compiled_module(model):
        raise PrepareError(
            "torch.compile wrapped the model before it was split into stages. Pass the plain "
            "model to prepare and dynamo_plugin=TorchDynamoPlugin(...) to Accelerator"
        )
    schedule = options.schedule_row
    if schedule.implementation is not None:
        if options.loss_reduction is None and options.num_items is None:
            raise PrepareError(
                f"schedule={options.schedule!r} runs the backward pass of each micro-batch's loss and must know how "
                "these losses combine into the loss of the batch: pass "
                'PipelineParallelConfig(loss_reduction="mean") (over samples) or "sum", or num_items=f, a function '
                "of the model's inputs that returns the number of items (labels that count) over which the loss is "
                "a mean. schedule='gpipe' works with any loss"
            )
        if is_torch_version("<", schedule.minimum_torch):
            raise PrepareError(
                f"schedule={options.schedule!r} needs a torch version later than "
                f"{torch.__version__}, whose schedule of this name computes wrong gradients for "
                "some layers (docs/reference/pipeline_schedules.md): use schedule='interleaved' "
                "or '1f1b'"
            )
    inputs = inspect.signature(model.forward).parameters
    takes_any = any(entry.kind is entry.VAR_KEYWORD for entry in inputs.values())
    unknown = sorted(set(options.whole_inputs) - set(inputs))
    if unknown and not takes_any:
        raise PrepareError(
            f"whole_inputs names {', '.join(unknown)}, which the model's forward does not take"
        )
    config = getattr(model, "config", None)
    for flag in COLLECTING:
        if getattr(config, flag, False):
            raise PrepareError(
                f"the model's config has {flag}=True: outputs of the blocks of other stages are not collected"
            )
