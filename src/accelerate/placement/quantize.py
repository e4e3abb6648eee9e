# SPDX-License-Identifier: Apache-2.0
"""Linear layers with quantised weights: with bitsandbytes, which are replaced, by what, and where they may go."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.quantization import BnbQuantizationConfig
from ..core.availability import is_4bit_bnb_available, is_8bit_bnb_available
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from . import logger
from .device_map import check_device_map, plan_device_map
from .dispatch import dispatch
from .load import load_checkpoint_in_model
from .names import is_within, join
from .sizes import Dtype, named_module_tensors
from .tensors import QUANTIZED, main_device, set_module_tensor_to_device
from .tied import find_tied_parameters

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` has 4-bit bitsandbytes weights."""
    # If the package is not loaded, no module is an instance of its classes.
    layers = sys.modules.get("bitsandbytes.nn")
    if layers is None:
        return False
    return any(isinstance(module, layers.Linear4bit) for module in model.modules())


def require_bitsandbytes(config: BnbQuantizationConfig) -> None:
    """Raise ImportError if the package is missing or too old for `config`."""
    if config.load_in_8bit and not is_8bit_bnb_available():
        raise ImportError(
            "quantizing to 8 bits needs bitsandbytes >= 0.37.2: pip install bitsandbytes"
        )
    if config.load_in_4bit and not is_4bit_bnb_available():
        raise ImportError(
            "quantizing to 4 bits needs bitsandbytes >= 0.39: pip install bitsandbytes"
        )


def tied_modules(model: nn.Module) -> set[str]:
    """The modules that share a parameter with another one."""
    names = itertools.chain.from_iterable(find_tied_parameters(model))
    return {name.rpartition(".")[0] for name in names}


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Modules that keep their precision by default: the output layer, and modules that share its weights.

    A model that is itself the body of a larger one has no output layer: all of it may be quantized.
    """
    tied = tied_modules(model)
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    children = [name for name, _ in model.named_children()]
    return sorted({*children[-1:], *tied})


def linear_layers(model: nn.Module, skip: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers of `model` that can be quantized, by name, but for those within `skip`."""
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        # The attention of torch reads the weight of this one past its forward.
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue
        skipped = any(is_within(name, part) or f".{part}." in f".{name}." for part in skip if part)
        if isinstance(module, nn.Linear) and not skipped:
            layers[name] = module
    return layers


def replace_linear_layers(
    model: nn.Module, config: BnbQuantizationConfig, skip: Sequence[str]
) -> int:
    """Replace the linear layers of `model`, but for those within `skip`, by quantizing ones; how many there were.

    The weights are taken over as they are: they are quantized when they reach the device they run on.
    """
    layers = linear_layers(model, skip)
    layers.pop("", None)
    for name, layer in layers.items():
        model.set_submodule(name, _quantizing(layer, config))
    if not layers:
        logger.warning(
            "No linear modules were found to quantize. GPT-2, for example, has Conv1D layers instead."
        )
    return len(layers)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model with bitsandbytes layers.

    They quantize their weights when they are moved to their device.

    Args:
        model: changed in place.
        bnb_quantization_config: the kind of quantization.
        modules_to_not_convert: names of modules that keep their layers.

    Returns:
        The model.
    """
    require_bitsandbytes(bnb_quantization_config)
    replace_linear_layers(model, bnb_quantization_config, modules_to_not_convert or ())
    return model


def _quantizing(layer: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    import bitsandbytes

    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    new: Any
    with torch.device("meta"):
        if config.load_in_8bit:
            new = bitsandbytes.nn.Linear8bitLt(
                *shape, has_fp16_weights=False, threshold=config.llm_int8_threshold
            )
        else:
            new = bitsandbytes.nn.Linear4bit(
                *shape,
                compute_dtype=config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
    # The class and options of the new weight, the data of the old one.
    new.weight = type(new.weight)(layer.weight.data, requires_grad=False, **vars(new.weight))
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.data, requires_grad=False)
    made: nn.Module = new.train(layer.training)
    return made


def offloaded_places() -> tuple[str, ...]:
    """Entries of a device map that are not run where they are kept. The CPU is one where there is an accelerator."""
    if main_device().type == "cpu":
        return ("disk",)
    return ("cpu", "disk")


def quantized_device_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    skip: Sequence[str],
    device_map: str | Mapping[str, Any] | None,
    max_memory: MutableMapping[int | str, int | str] | None,
    no_split_module_classes: Sequence[str] | None,
) -> dict[str, Any]:
    """The device map of a quantized model: the given one, a planned one, or all on the main device.

    Raises ConfigurationError where a plan would offload 4-bit layers, which cannot be kept elsewhere.
    """
    if device_map is None:
        device_map = {"": main_device()}
        logger.info(f"The device_map was not initialized. Setting device_map to {device_map}.")
    if isinstance(device_map, str):
        special: dict[str, Dtype] = {}
        for name, _ in model.named_parameters():
            if _mentions(name, config.keep_in_fp32_modules or []):
                special[name] = torch.float32
            elif _mentions(name, skip):
                special[name] = config.torch_dtype
        device_map = plan_device_map(
            model, device_map, max_memory, no_split_module_classes, config.target_dtype, special
        )
    offloaded = [
        name
        for name, device in device_map.items()
        if device in offloaded_places() and not any(is_within(name, part) for part in skip)
    ]
    if offloaded and config.load_in_4bit:
        raise ConfigurationError(
            f"{', '.join(name or 'the entire model' for name in offloaded)} would be offloaded, "
            "but 4-bit layers cannot be. Use a `max_memory` or a device with enough memory for "
            "the quantized model, or name these modules in your own `device_map`: they then stay "
            "in `torch_dtype`."
        )
    if offloaded:
        logger.info(
            "Some modules are offloaded to the CPU or the disk. They are also converted to 8 bits."
        )
    return dict(device_map)


def _mentions(name: str, fragments: Sequence[str]) -> bool:
    return any(part in name for part in fragments)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig | AOBaseConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: MutableMapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
    *,
    skip_modules: Sequence[str] | None = None,
) -> nn.Module:
    """Quantize the linear layers of `model` with bitsandbytes or torchao, as configured, and return the model.

    A model on the meta device gets the weights at `weights_location`, each quantized when it reaches its device in
    `device_map` (default: the accelerator in use, or the CPU). A model with weights is quantized on that device.
    Offloaded 8-bit layers are stored quantized; 4-bit layers can be offloaded only by a custom map, and then stay in
    `torch_dtype`.

    A torchao configuration, such as `Int8WeightOnlyConfig()`, quantizes with torchao: only weights, in the dtype of
    the model, on any device that torchao supports; offloaded weights are stored quantized. `skip_modules` stay
    unquantized (default: the output layer), and so do layers with tied weights.

    Raises ImportError without bitsandbytes, RuntimeError for a meta model without `weights_location`,
    ConfigurationError if torchao cannot quantize a weight on its device.
    """
    config = bnb_quantization_config
    if not isinstance(config, BnbQuantizationConfig):
        if not is_torchao_config(config):
            raise ConfigurationError(
                f"{config!r}: load_and_quantize_model takes a BnbQuantizationConfig or a torchao "
                "configuration, such as torchao.quantization.Int8WeightOnlyConfig()"
            )
        _require_weights(model, weights_location)
        left_out = get_keys_to_not_convert(model)
        if skip_modules is not None:
            left_out = [*skip_modules, *tied_modules(model)]
        return load_quantized(
            model,
            config,
            weights_location,
            device_map,
            no_split_module_classes,
            max_memory,
            offload_folder,
            offload_state_dict,
            left_out,
        )
    if skip_modules is not None:
        raise ConfigurationError(
            "skip_modules is for torchao: use BnbQuantizationConfig(skip_modules=...) instead"
        )
    require_bitsandbytes(config)
    skip = get_keys_to_not_convert(model)
    if config.skip_modules is not None:
        skip = list(config.skip_modules)
    skip += config.keep_in_fp32_modules or []
    if config.load_in_4bit and isinstance(device_map, Mapping) and len(device_map) > 1:
        skip += [name for name, device in device_map.items() if device in offloaded_places()]
    on_meta = _require_weights(model, weights_location)
    model.is_loaded_in_4bit = config.load_in_4bit  # type: ignore[assignment]
    model.is_loaded_in_8bit = config.load_in_8bit  # type: ignore[assignment]
    replace_linear_layers(model, config, skip)
    if not on_meta:
        return _quantize_in_place(model, config)
    places = quantized_device_map(
        model, config, skip, device_map, max_memory, no_split_module_classes
    )
    assert weights_location is not None
    is_offloaded = any(device in offloaded_places() for device in places.values())
    load_checkpoint_in_model(
        model,
        weights_location,
        places,
        dtype=config.torch_dtype,
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
        offload_8bit_bnb=config.load_in_8bit and is_offloaded,
    )
    check_device_map(model, places)
    dispatch(model, places, offload_dir=offload_folder)
    return model


def _require_weights(model: nn.Module, weights_location: str | os.PathLike[str] | None) -> bool:
    """Whether the model is on the meta device, where it needs weights."""
    on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
    if on_meta and weights_location is None:
        raise RuntimeError(
            "`weights_location` needs to be the folder path containing the weights of the model, but we found "
            f"{weights_location} "
        )
    return on_meta


def _quantize_in_place(model: nn.Module, config: BnbQuantizationConfig) -> nn.Module:
    """Convert a model that holds its weights, and move it to the main device, where the new layers quantise."""
    logger.warning(
        "The model to quantize is already loaded. Create it under `init_empty_weights()` to save "
        "memory."
    )
    full = config.keep_in_fp32_modules or []
    for name, tensor in list(named_module_tensors(model, recurse=True)):
        if tensor.is_floating_point() and type(tensor).__name__ not in QUANTIZED:
            dtype = config.torch_dtype
            if any(f"{part}." in name for part in full):
                dtype = torch.float32
            set_module_tensor_to_device(model, name, tensor.device, dtype=dtype)
    return model.to(main_device())


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
        self.names: set[str] = {join(name, "weight") for name in linear_layers(model, skip)}
        if not self.names:
            raise ConfigurationError(
                f"{type(model).__name__} does not have a linear layer to quantize with "
                f"{type(config).__name__}: there are none, or all are in "
                f"skip_modules={list(skip)!r}"
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
