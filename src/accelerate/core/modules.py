# SPDX-License-Identifier: Apache-2.0
"""Properties of a torch module: its children in order, its classes, whether it is compiled or sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from .errors import PrepareError


def require_module(model: object, function: str) -> None:
    """Raises TypeError if what a public function got as its model is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, not {model!r:.80} (of type {type(model).__name__})")


def class_name(module: object) -> str:
    """The name of a model's class; of a class that FSDP2 has derived from it, that of the user's class."""
    kinds = type(module).__mro__
    return kinds[2 if kinds[1].__name__ == "FSDPModule" else 0].__name__


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """All modules of `model`, each after its children, the model last; with `return_fqns` as (name, module)."""
    require_module(model, "get_module_children_bottom_up")
    named = list(named_bottom_up(model))
    return named if return_fqns else [module for _, module in named]


def named_bottom_up(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Named modules, children before parents, siblings in order: the order in which constructors initialize."""
    for child_name, child in module.named_children():
        yield from named_bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def move_module(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a model, whose parameters stay the same objects: optimizers have them, and tied layers share them.

    `Module.to` replaces the parameters if it moves them to a device whose tensors torch counts as another kind: those
    of backends outside of torch, such as `xla` and `npu`.

    Raises:
        PrepareError: something refers weakly to a parameter, which prevents that.
    """
    if moves_in_place(model, device):
        return model.to(device)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise PrepareError(
            f"{type(model).__name__} cannot be moved to {device} with its parameters as the same objects: {error} "
            f"({error.__cause__}). Move it by model.to(accelerator.device) before its optimizer is made"
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def moves_in_place(model: nn.Module, device: torch.device | str) -> bool:
    """Whether a parameter can get its data on `device` by an assignment to `data`."""
    empty = torch.empty(0, device=device)
    return all(torch._has_compatible_shallow_copy_type(parameter, empty) for parameter in model.parameters())


def move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter or buffer, which stays the same object; see `move_module`."""
    moved = tensor.detach().to(device)
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    else:
        kept = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
        torch.utils.swap_tensors(tensor, kept)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class called `name` of some module in `module` (itself included), or None where there is none."""
    require_module(module, "get_module_class_from_name")
    return next((type(found) for found in module.modules() if type(found).__name__ == name), None)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `module` is what `torch.compile` returned for one."""
    # The class is loaded with the compiler; where that is not loaded, nothing is compiled.
    import sys

    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether submodules of `module` are compiled, as wrapped modules or in place."""
    require_module(module, "has_compiled_regions")
    original = getattr(module, "_orig_mod", None) if is_compiled_module(module) else None
    inner = (child for child in module.modules() if child is not module and child is not original)
    return any(is_compiled_module(child) or child._compiled_call_impl is not None for child in inner)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether some parameter of `model` is a DTensor: sharded or replicated over a device mesh."""
    require_module(model, "model_has_dtensor")
    return any(is_dtensor(parameter) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """The tensor parallel size that the model declares, or None."""
    size = getattr(model, "tp_size", None)
    if size is None:
        # transformers from 5.9 on has it in the configuration: an object, or a dict if that came from a file.
        layout = getattr(getattr(model, "config", None), "distributed_config", None)
        size = layout.get("tp_size") if isinstance(layout, dict) else getattr(layout, "tp_size", None)
    return None if size is None else int(size)


def is_dtensor(parameter: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor. The class takes long to import; where it is not loaded, there is none."""
    import sys

    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)
