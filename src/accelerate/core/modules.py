# SPDX-License-Identifier: Apache-2.0
"""Properties of a torch module: its children in order, its classes, its device, whether it is sharded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import messages
from .errors import PrepareError, suggestion
from .objects import flat_list


def class_name(module: object) -> str:
    """The name of a model's class; of a class that FSDP2 has derived from it, that of the user's class."""
    kinds = type(module).__mro__
    return kinds[2 if kinds[1].__name__ == "FSDPModule" else 0].__name__


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """All modules of `model`, each after its children; with `return_fqns` as (name, module)."""
    named = list(named_bottom_up(model))
    if return_fqns:
        return named
    return [module for _, module in named]


def direct_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module without those of its submodules, under all their names.

    Models override `parameters` and `named_parameters` with fewer arguments, so torch's own method is called.
    """
    return dict(nn.Module.named_parameters(module, recurse=False, remove_duplicate=False))


def direct_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module without those of its submodules, under all their names."""
    return dict(nn.Module.named_buffers(module, recurse=False, remove_duplicate=False))


def direct_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module without those of its submodules, under all their names."""
    return {**direct_parameters(module), **direct_buffers(module)}


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
            f"{type(model).__name__} cannot be moved to {device} while keeping its parameter "
            f"objects: {error} ({error.__cause__}). Move it with model.to(accelerator.device) "
            "before creating its optimizer"
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def moves_in_place(model: nn.Module, device: torch.device | str) -> bool:
    """Whether a parameter can get its data on `device` by an assignment to `data`."""
    parameters = (parameter for parameter in model.parameters() if not is_lazy(parameter))
    parameter = next(parameters, torch.empty(0)).detach()
    try:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)
    except RuntimeError:
        return False
    return True


def replace_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Replace what is in a parameter or buffer, which stays the same object, by data of any dtype and device."""
    # An assignment to `data` leaves the tensors inside of a subclass as they were.
    if not is_wrapper_subclass(tensor):
        # a device whose tensors torch counts as another kind
        with contextlib.suppress(RuntimeError):
            tensor.data = data
            return
    is_parameter = isinstance(tensor, nn.Parameter)
    torch.utils.swap_tensors(
        tensor, nn.Parameter(data, tensor.requires_grad) if is_parameter else data
    )


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class with the name `name` among the modules in `module` (including itself), or None."""
    return next((type(found) for found in module.modules() if type(found).__name__ == name), None)


def class_names(model: nn.Module, option: str, classes: Any) -> list[str]:
    """The names of classes in an option, given as one or in any container.

    Published lists are for several families of models, so a name that no module has is not an error. If that are all
    names, and the model does not list them itself (`_no_split_modules`), there is a warning.
    """
    names = flat_list(classes)
    present = {type(module).__name__ for module in model.modules()}
    if names and not present.intersection(names):
        declared = flat_list(
            [getattr(module, "_no_split_modules", None) for module in model.modules()]
        )
        if not set(declared).issuperset(names):
            near = suggestion(names[0], present)
            messages.warn(
                f"{option}: {type(model).__name__} does not contain a {' or '.join(names)}{near}"
            )
    return names


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter of `model` is a DTensor: sharded or replicated over a device mesh."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """The tensor parallel size that the model declares, or None."""
    size = getattr(model, "tp_size", None)
    if size is None:
        # transformers from 5.9 on has it in the configuration: an object, or a dict if that came from a file.
        layout = getattr(getattr(model, "config", None), "distributed_config", None)
        if isinstance(layout, dict):
            size = layout.get("tp_size")
        else:
            size = getattr(layout, "tp_size", None)
    if size is None:
        return None
    return int(size)


def is_dtensor(parameter: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor. The class takes long to import; where it is not loaded, there is none."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def is_wrapper_subclass(tensor: object) -> bool:
    """Whether a tensor is a subclass that consists of other tensors and tells torch which, as torch.compile needs."""
    kind = type(tensor)
    protocol = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return protocol and isinstance(tensor, torch.Tensor)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled code calls as it is: collectives inside an autograd function are not traced."""
    if "torch._dynamo" in sys.modules:
        function = torch.compiler.disable(function)
    return function
