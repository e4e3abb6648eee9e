# SPDX-License-Identifier: Apache-2.0
"""Training in fp8 through torchao: linear layers whose matrix products run in float8."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from ..core.availability import torchao_required

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

# float8 matrix units take both dimensions of a weight in multiples of this
MULTIPLE = 16


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and the last linear layer of `model`, in the order in which it registers them."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: nn.Module, fqn: str, first_layer_name: str | None = None, last_layer_name: str | None = None
) -> bool:
    """Whether the layer `module`, called `fqn`, should compute in float8.

    True for a linear layer whose two dimensions are multiples of 16 and which is neither the first nor the last one:
    those two carry most of the error that float8 brings.
    """
    if not isinstance(module, nn.Linear) or fqn in (first_layer_name, last_layer_name):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


@torchao_required
def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether the layer called `fqn` of the model `module` should compute in float8: the default filter.

    Handed as `module_filter_func` it sees each layer's own model, so that the first and the last layer are known.
    """
    layer = module if isinstance(module, nn.Linear) else module.get_submodule(fqn)
    return filter_linear_layers(layer, fqn, *find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether some layer of `model` is one of torchao's float8 linear layers."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(layer, Float8Linear) for layer in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Replace, in place, the linear layers of `model` that the filter takes by torchao's float8 layers.

    `module_filter_func(layer, name)` decides for each layer; the default takes those whose dimensions are multiples
    of 16, without the first and the last. The layers are new objects, their parameters are the same ones.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if module_filter_func is None or module_filter_func is filter_first_and_last_linear_layers:
        first, last = find_first_last_linear_layers(model)

        def module_filter_func(layer: nn.Module, name: str) -> bool:
            return filter_linear_layers(layer, name, first, last)

    convert_to_float8_training(model, config=config or Float8LinearConfig(), module_filter_fn=module_filter_func)
