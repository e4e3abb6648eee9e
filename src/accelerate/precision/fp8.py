# SPDX-License-Identifier: Apache-2.0
"""fp8 training: linear layers in float8 through torchao or Transformer Engine, the rest under bf16 autocast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.availability import torchao_required
from ..core.enums import FP8BackendType
from ..core.errors import ConfigurationError, PrepareError
from ..logging import MultiProcessAdapter, get_logger
from . import fp8_te
from .amp import MixedPrecision
from .base import Repoint

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

    from ..config.precision import AORecipeKwargs, AutocastKwargs, TERecipeKwargs

logger: MultiProcessAdapter = get_logger(__name__)


class Float8Precision(MixedPrecision):
    """Converts the layers of each model before it is laid out; `converted` has the names of float8 layers."""

    backend = FP8BackendType.NO

    def __init__(self, device_type: str, options: AutocastKwargs | None = None) -> None:
        super().__init__("fp8", torch.bfloat16, device_type, options)
        self.converted: list[str] = []
        self.left: list[str] = []

    @property
    def computes_in(self) -> str:  # type: ignore[override]
        """The converted layers, for `explain`."""
        total = len(self.converted) + len(self.left)
        layers = f"{len(self.converted)} of {total} linear layers in float8 ({self.backend.value})"
        text = f"bfloat16 under autocast, {layers}"
        if self.left:
            text += f"; not: {', '.join(self.left[:8])}"
        return text

    def convert(self, model: nn.Module, repoint: Repoint) -> None:
        """Replace layers of the model in place. Raises PrepareError where there is none to replace."""
        former = dict(model.named_parameters())
        linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        converted = self.replace_layers(model)
        if not converted:
            raise PrepareError(
                f"mixed_precision='fp8': none of the {len(linear)} linear layers of "
                f"{type(model).__name__} was converted. Both dimensions of a layer must be "
                "multiples of 16, and by default the first and last layers are not converted "
                "(AORecipeKwargs(module_filter_func=...) chooses others)."
            )
        self.converted += converted
        self.left += [name for name in linear if name not in converted]
        logger.info(f"fp8 in {type(model).__name__}: {self.computes_in}")
        present = dict(model.named_parameters())
        repoint(
            [
                (former[name], now)
                for name, now in present.items()
                if name in former and former[name] is not now
            ]
        )

    def replace_layers(self, model: nn.Module) -> list[str]:
        """Convert in place; the names of the converted layers."""
        raise NotImplementedError


class TorchaoPrecision(Float8Precision):
    """torchao's float8 linear layers."""

    backend = FP8BackendType.AO

    def __init__(
        self,
        device_type: str,
        options: AutocastKwargs | None,
        recipe: AORecipeKwargs,
        gathers: bool = False,
    ) -> None:
        super().__init__(device_type, options)
        self.recipe = recipe
        config = recipe.config
        if not gathers and config.enable_fsdp_float8_all_gather:
            # Nobody gathers: the wrapper around the weights would only be in the way of checkpoints.
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
        self.config = config

    def replace_layers(self, model: nn.Module) -> list[str]:
        """Convert to torchao's layers; the names of those converted."""
        from torchao.float8.float8_linear import Float8Linear

        before = {id(layer) for layer in model.modules() if isinstance(layer, Float8Linear)}
        convert_model_to_fp8_ao(
            model, config=self.config, module_filter_func=self.recipe.module_filter_func
        )
        return [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, Float8Linear) and id(layer) not in before
        ]

    def after_layout(self, model: nn.Module) -> None:
        """Have each forward begin with the scales of the weights that are gathered in float8."""
        if self.config.enable_fsdp_float8_all_gather:
            # FSDP2's own hook, which gathers, is the first so far.
            model.register_forward_pre_hook(torch.compiler.disable(_scale_weights), prepend=True)


def _scale_weights(model: nn.Module, inputs: object) -> None:
    """Compute the scales of all weights of a mesh with one message. Otherwise each gather has one for each weight."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.float8_linear import Float8Linear

    layers: dict[object, nn.ModuleList] = {}
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and hasattr(layer.weight, "device_mesh"):
            mesh = layer.weight.device_mesh
            layers.setdefault(mesh, nn.ModuleList()).append(layer)
    for of_one_mesh in layers.values():
        precompute_float8_dynamic_scale_for_fsdp(of_one_mesh)


class TransformerEnginePrecision(Float8Precision):
    """Transformer Engine's layers, and its fp8 autocast around the forward."""

    backend = FP8BackendType.TE

    def __init__(
        self, device_type: str, options: AutocastKwargs | None, recipe: TERecipeKwargs | None
    ) -> None:
        super().__init__(device_type, options)
        self.recipe = recipe

    def replace_layers(self, model: nn.Module) -> list[str]:
        """Convert to Transformer Engine's layers; the names of the linear ones converted."""
        linear = {}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                linear[name] = layer
        with torch.no_grad():
            fp8_te.convert_model(model)
        converted = []
        for name, layer in model.named_modules():
            if name in linear and layer is not linear[name]:
                converted.append(name)
        return converted

    def wrap_forward(self, model: torch.nn.Module, full_outputs: bool = True) -> torch.nn.Module:
        """bf16 autocast, and inside it the engine's fp8 autocast."""
        model = super().wrap_forward(model, full_outputs)
        return fp8_te.apply_fp8_autowrap(model, self.recipe)


def make_fp8(
    device_type: str,
    options: AutocastKwargs | None,
    backend: FP8BackendType,
    recipe: Any,
    gathers: bool,
) -> Float8Precision:
    """The precision of a backend. `gathers`: the strategy gathers parameters, which torchao can do in float8.

    Raises ConfigurationError for a backend that is not driven, ImportError for one that is not installed.
    """
    if backend is FP8BackendType.TE:
        return TransformerEnginePrecision(device_type, options, recipe)
    if backend is FP8BackendType.AO:
        from ..config.precision import AORecipeKwargs

        return TorchaoPrecision(device_type, options, recipe or AORecipeKwargs(), gathers)
    raise ConfigurationError(
        f"fp8 with {backend.value} is not supported: MS-AMP was last released for torch 2.1 and "
        f"does not run on torch {torch.__version__}. Use AORecipeKwargs (torchao) or "
        "TERecipeKwargs (Transformer Engine)"
    )


# float8 matrix units take both dimensions of a weight in multiples of this
MULTIPLE = 16


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and last linear layers of `model`, in the order in which they are registered."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        return None, None
    return names[0], names[-1]


def filter_linear_layers(
    module: nn.Module, fqn: str, layers_to_filter: Container[str | None]
) -> bool:
    """Whether the layer `module`, called `fqn`, should compute in float8.

    True for a linear layer whose two dimensions are multiples of 16 and whose name is not in `layers_to_filter`. The
    default filter names the first and the last one, which carry most of the error that float8 brings.
    """
    if not isinstance(module, nn.Linear) or fqn in layers_to_filter:
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


@torchao_required
def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether the layer called `fqn` of the model `module` should compute in float8: the default filter.

    Handed as `module_filter_func` it sees each layer's own model, so that the first and the last layer are known.
    """
    layer = module if isinstance(module, nn.Linear) else module.get_submodule(fqn)
    return filter_linear_layers(layer, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` is a torchao float8 linear layer."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(layer, Float8Linear) for layer in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Replace the linear layers of `model` that the filter selects with torchao float8 layers, in place.

    `module_filter_func(layer, name)` decides for each layer; the default takes those whose dimensions are multiples
    of 16, without the first and the last. The layers are new objects, their parameters are the same ones.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if module_filter_func is None or module_filter_func is filter_first_and_last_linear_layers:
        filtered = find_first_last_linear_layers(model)

        def module_filter_func(layer: nn.Module, name: str) -> bool:
            return filter_linear_layers(layer, name, filtered)

    convert_to_float8_training(
        model, config=config or Float8LinearConfig(), module_filter_fn=module_filter_func
    )
