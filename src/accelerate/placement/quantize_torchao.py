# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights quantized by torchao: which weights, each as it is loaded, and where they may go."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigurationError
from ..core.imports import is_available
from .device_map import check_device_map, plan_device_map
from .dispatch import dispatch
from .load import load_checkpoint_in_model
from .names import is_within
from .sizes import Dtype
from .tensors import main_device


def is_torchao_config(config: object) -> bool:
    """Whether `config` is one of torchao's, such as `Int8WeightOnlyConfig()`."""
    if not type(config).__module__.startswith("torchao.") or not is_available("torchao"):
        return False
    from torchao.core.config import AOBaseConfig

    return isinstance(config, AOBaseConfig)


class WeightQuantizer:
    """Quantizes weights of linear layers one at a time."""

    def __init__(self, model: nn.Module, config: Any, skip: Sequence[str]) -> None:
        self.config = config
        self.names: set[str] = {
            f"{name}.weight" if name else "weight"
            for name, module in model.named_modules()
            # The attention of torch reads the weight of a NonDynamicallyQuantizableLinear past its forward.
            if isinstance(module, nn.Linear)
            and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
            and not any(
                is_within(name, part) or f".{part}." in f".{name}." for part in skip if part
            )
        }
        if not self.names:
            raise ConfigurationError(
                f"{type(model).__name__} has no linear layer to quantize with {type(config).__name__}: all are in "
                f"skip_modules={list(skip)!r}, or there are none"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A quantized copy of a weight, on the same device. Raises ConfigurationError where torchao cannot."""
        import torchao

        # The weight alone: the layer may not have its other tensors yet.
        layer = nn.Linear(
            weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype
        )
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        try:
            torchao.quantization.quantize_(layer, self.config)
        except (ImportError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"torchao {torchao.__version__} cannot quantize {name} (shape {tuple(weight.shape)}, {weight.dtype}) "
                f"on {weight.device} with {self.config}: {type(error).__name__}: {error}"
            ) from error
        return layer.weight.detach()


def load_quantized(
    model: nn.Module,
    config: Any,
    weights_location: str | os.PathLike[str] | None,
    device_map: str | Mapping[str, Any] | None,
    no_split_module_classes: Sequence[str] | None,
    max_memory: MutableMapping[int | str, int | str] | None,
    offload_folder: str | os.PathLike[str] | None,
    offload_state_dict: bool,
    skip: Sequence[str],
) -> nn.Module:
    """`load_and_quantize_model` with a configuration of torchao's. Weights keep the dtype of the model."""
    quantizer = WeightQuantizer(model, config, skip)
    if device_map is None:
        device_map = {"": main_device()}
    if isinstance(device_map, str):
        # A byte a value: an upper bound for 4 bits.
        special: dict[str, Dtype] = dict.fromkeys(quantizer.names, torch.int8)
        device_map = plan_device_map(
            model, device_map, max_memory, no_split_module_classes, special_dtypes=special
        )
    check_device_map(model, device_map)
    if weights_location is None:
        for name in sorted(quantizer.names):
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.weight = nn.Parameter(quantizer(name, layer.weight), requires_grad=False)  # type: ignore[arg-type]
    else:
        load_checkpoint_in_model(
            model,
            weights_location,
            device_map,
            offload_folder=offload_folder,
            offload_state_dict=offload_state_dict,
            quantizer=quantizer,
        )
    dispatch(model, device_map, offload_dir=offload_folder)
    return model
