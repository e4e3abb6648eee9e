# SPDX-License-Identifier: Apache-2.0
"""peft's models: which tensors are the adapters, under peft's names, and the files that `from_pretrained` reads.

What depends on a version of peft is in this file.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import PrepareError
from .unwrap import canonical_name, extract_model_from_parallel, is_peft_model

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"

# By adapter: {name in peft's file: name in the model's state dict}.
AdapterNames = dict[str, dict[str, str]]


def adapter_names(module: nn.Module) -> AdapterNames | None:
    """The tensors of each adapter of a model of peft.

    None if a model without them is not complete when its base is loaded again: it is not a peft model, trains or
    changes other tensors too, or peft computes what it saves (prompts, AdaLoRA), of which FSDP2 has shards.
    """
    model: Any = extract_model_from_parallel(module, keep_torch_compile=False)
    if not is_peft_model(module):
        return None
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        return None
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            state[canonical_name(name)] = torch.empty(value.shape, device="meta")
    names = {id(value): name for name, value in state.items()}
    saved_names: AdapterNames = {}
    saved: set[str] = set()
    for adapter in model.peft_config:
        entries = sys.modules["peft"].get_peft_model_state_dict(
            model,
            state_dict=state,
            adapter_name=adapter,
            save_embedding_layers=_saves_embedding(model),
        )
        if not entries or any(id(value) not in names for value in entries.values()):
            return None
        saved_names[adapter] = {key: names[id(value)] for key, value in entries.items()}
        saved.update(saved_names[adapter].values())
    trained = {canonical_name(name) for name, p in model.named_parameters() if p.requires_grad}
    buffers = {canonical_name(name) for name, _ in model.named_buffers()} & state.keys()
    if trained and trained | buffers <= saved:
        return saved_names
    return None


def _saves_embedding(model: Any) -> bool:
    """Whether peft saves the weights of embeddings too: one has an adapter, or another size than that of the base.

    peft itself asks the model hub for the size. Here it is that of the files from which the base was loaded.
    """
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Embedding):
            return True
    config: Any = getattr(model.get_base_model(), "config", None)
    source = getattr(config, "name_or_path", None)
    if not source or not hasattr(config, "vocab_size"):
        return False  # it was not loaded from files
    try:
        loaded = type(config).from_pretrained(source, local_files_only=True)
    except OSError:
        return False
    return bool(loaded.vocab_size != config.vocab_size)


def base_name(name: str) -> str:
    """A frozen parameter's name in the model without adapters."""
    words = name.removeprefix("base_model.model.").split(".")
    return ".".join(
        word for word in words if word not in ("base_layer", "original_module", "token_adapter")
    )


def adapter_folder(adapter: str) -> str:
    """Where `PeftModel.save_pretrained` writes an adapter, below its folder."""
    if adapter == "default":
        return ""
    return f"{adapter}/"


def config_text(module: nn.Module, adapter: str) -> bytes:
    """The content of an adapter's `adapter_config.json`, as `PeftModel.save_pretrained` writes it."""
    model: Any = extract_model_from_parallel(module, keep_torch_compile=False)
    base = model.get_base_model()
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = (
        config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    )
    mapping = None
    if config.task_type is None:
        # FSDP2 derives a class from the model's.
        kinds = type(base).__mro__
        kind = kinds[2 if kinds[1].__name__ == "FSDPModule" else 0]
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / CONFIG_FILE).read_bytes()


def is_merged(module: nn.Module) -> bool:
    """Whether a module of a base has adapters, or is trained beside its original, as peft decides when it merges."""
    return hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")


def original_module(module: Any) -> nn.Module:
    """The module of the base inside one with adapters, with the names and shapes of the merged tensors."""
    original: nn.Module
    if hasattr(module, "original_module"):
        original = module.original_module
    else:
        original = module.get_base_layer()
    if is_merged(original):
        return original_module(original)
    return original


def merged_module(module: Any) -> nn.Module:
    """The module of the base with the active adapters added to it, in place."""
    merged: nn.Module
    if hasattr(module, "unload_and_optionally_merge_module"):
        merged = module.unload_and_optionally_merge_module(
            merge=True, safe_merge=True, adapter_names=None
        )
    else:
        module.merge(safe_merge=True, adapter_names=None)
        merged = module.get_base_layer()
    return merged


def adapted_plan(
    model: nn.Module, plan: Mapping[str, Any], wildcard: Callable[[str], re.Pattern[str]]
) -> dict[str, Any]:
    """The styles of a base's tensor-parallel plan by names in a peft model: of layers, and of their LoRA matrices.

    Of a layer that is split by columns, LoRA's B is split too, and of one that is split by rows A is. The other matrix
    has equal inputs and gradients on all ranks.

    Raises:
        PrepareError: a layer that is split has another kind of adapter.
    """
    patterns = [(wildcard(pattern), style) for pattern, style in plan.items()]
    modules = dict(model.named_modules())
    adapters: Mapping[str, Any] = model.peft_config  # type: ignore[assignment]
    prefix = "base_model.model."
    if any(config.is_prompt_learning for config in adapters.values()):
        # No tuner lies between peft's model and the base.
        prefix = "base_model."
    found: dict[str, Any] = {}
    for name, module in modules.items():
        if hasattr(module, "base_layer") and hasattr(module, "parameter_name"):
            raise PrepareError(
                f"{name} adapts parameters of experts (target_parameters), which tensor "
                "parallelism does not split: remove target_parameters, or shard the model with "
                "FSDP2"
            )
        inside = name.removeprefix(prefix)
        inside = re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)$", "", inside)
        style = next((style for pattern, style in patterns if pattern.fullmatch(inside)), None)
        if style is None or is_merged(module) or "token_adapter" in name.split("."):
            continue
        found[name] = style
        outer, _, word = name.rpartition(".")
        if word != "base_layer" or isinstance(module, nn.Embedding):
            continue
        layer: Any = modules[outer]
        others = {config.peft_type.value for config in adapters.values()} - {"LORA"} or {
            type(variant).__name__.removesuffix("LinearVariant")
            for variant in layer.lora_variant.values()
        }
        if others:
            raise PrepareError(
                f"tensor parallelism splits {outer}, whose adapter is {' and '.join(others)}, but "
                "it can split only LoRA matrices. Remove the layer from target_modules, or shard "
                "the model with FSDP2"
            )
        if str(style).startswith("colwise"):
            matrix = "lora_B"
        else:
            matrix = "lora_A"
        found.update({f"{outer}.{matrix}.{adapter}": style for adapter in getattr(layer, matrix)})
    return found
