# SPDX-License-Identifier: Apache-2.0
"""Training in fp8 through Transformer Engine: its layers in place of torch's, and its autocast around the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..config.precision import TERecipeKwargs
from ..core.errors import ConfigurationError
from ..core.imports import required

# Transformer Engine's kernels take the dimensions of a weight in multiples of this
MULTIPLE = 16

_needs_engine = functools.partial(required, "transformer_engine")


def _engine() -> Any:
    import transformer_engine.pytorch

    return transformer_engine.pytorch


@_needs_engine
def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace the linear and normalization layers of `model` with Transformer Engine layers, or back, in place.

    Weights, biases, dtypes and devices are kept. A linear layer with a dimension that is not a multiple of 16 stays as
    it is: the engine has no kernel for it. Call it before the optimizer is made.
    """
    replace = _to_engine if to_transformer_engine else _from_engine
    children = []
    for parent in model.modules():
        children += [(parent, name, layer) for name, layer in parent.named_children()]
    for parent, name, layer in children:
        fresh = replace(layer, _convert_linear, _convert_ln)
        if fresh is not None:
            _copy_parameters(layer, fresh)
            setattr(parent, name, fresh)


def _to_engine(layer: nn.Module, linear: bool, norm: bool) -> nn.Module | None:
    engine = _engine()
    if linear and type(layer) is nn.Linear:
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            return None
        converted: nn.Module = engine.Linear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=layer.weight.dtype,
            device=layer.weight.device,
        )
        return converted
    if norm and type(layer) is nn.LayerNorm and layer.weight is not None and layer.bias is not None:
        converted = engine.LayerNorm(
            layer.normalized_shape[0],
            eps=layer.eps,
            params_dtype=layer.weight.dtype,
            device=layer.weight.device,
        )
        return converted
    return None


def _from_engine(layer: nn.Module, linear: bool, norm: bool) -> nn.Module | None:
    engine = _engine()
    if linear and isinstance(layer, engine.Linear):
        return nn.Linear(
            layer.in_features,
            layer.out_features,
            bias=_bias(layer) is not None,
            dtype=layer.weight.dtype,
            device=layer.weight.device,
        )
    if norm and isinstance(layer, engine.LayerNorm):
        return nn.LayerNorm(
            layer.weight.shape,
            eps=layer.eps,
            dtype=layer.weight.dtype,
            device=layer.weight.device,
        )
    return None


def _bias(layer: nn.Module) -> torch.Tensor | None:
    # The engine's layers without a bias have an empty tensor instead.
    bias = getattr(layer, "bias", None)
    if isinstance(bias, torch.Tensor) and bias.numel():
        return bias
    return None


@torch.no_grad()
def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    new = dict(target.named_parameters(recurse=False))
    for name, parameter in source.named_parameters(recurse=False):
        if name in new and parameter.numel():
            new[name].copy_(parameter)
            new[name].requires_grad_(parameter.requires_grad)


@_needs_engine
def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` is a Transformer Engine layer."""
    engine = _engine()
    kinds = (
        engine.LayerNorm,
        engine.Linear,
        engine.LayerNormLinear,
        engine.LayerNormMLP,
        engine.TransformerLayer,
    )
    return any(isinstance(layer, kinds) for layer in model.modules())


def _autocast(engine: Any) -> Callable[[bool, Any], Any]:
    """The engine's autocast, which had another name and other arguments before version 2.8."""
    if hasattr(engine, "autocast"):
        return lambda enabled, recipe: engine.autocast(enabled=enabled, recipe=recipe)
    return lambda enabled, recipe: engine.fp8_autocast(enabled=enabled, fp8_recipe=recipe)


@_needs_engine
def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: object, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wrap `model_forward`, a function of (model, ...), to run under the engine's fp8 autocast.

    On while the model trains, and while it is evaluated only with `use_during_eval`.
    """
    context = _autocast(_engine())
    function: Callable[..., Any] = getattr(model_forward, "__func__", model_forward)
    bound = function is not model_forward

    @functools.wraps(function)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> Any:
        with context(use_during_eval or self.training, fp8_recipe):
            if bound:
                return function(self, *args, **kwargs)
            return function(*args, **kwargs)

    return forward


@_needs_engine
def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Run the forward of `model` under the engine's fp8 autocast.

    The recipe is that of the handler, or the engine's default.
    """
    handler = fp8_recipe_handler or TERecipeKwargs()
    forward = contextual_fp8_autocast(
        model.forward, make_recipe(handler), bool(handler.use_autocast_during_eval)
    )
    model.forward = MethodType(forward, model)
    return model


def make_recipe(handler: TERecipeKwargs) -> Any:
    """The engine's recipe of a handler: delayed scaling, or MXFP8 blocks where `use_mxfp8_block_scaling`.

    The handler's `interval` has no effect any more: the engine computes the scaling at each step.
    """
    from transformer_engine.common import recipe

    both = {"margin": handler.margin, "fp8_format": getattr(recipe.Format, str(handler.fp8_format))}
    if not handler.use_mxfp8_block_scaling:
        both |= {
            "amax_history_len": handler.amax_history_len,
            "amax_compute_algo": handler.amax_compute_algo,
        }
        # Version 2 of the engine has no such argument.
        requested = tuple(handler.override_linear_precision or ())
        if any(requested):
            both["override_linear_precision"] = requested
        return recipe.DelayedScaling(**both)
    meaningless = sorted({"amax_history_len", "amax_compute_algo"} & handler.to_kwargs().keys())
    if meaningless:
        raise ConfigurationError(
            "MXFP8 block scaling does not keep a history of maxima: remove "
            f"{', '.join(meaningless)} from the fp8 recipe"
        )
    return recipe.MXFP8BlockScaling(**both)
