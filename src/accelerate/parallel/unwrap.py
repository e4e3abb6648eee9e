# SPDX-License-Identifier: Apache-2.0
"""The user's own model inside of a prepared one, and its methods that a layout has to run otherwise.

`save_pretrained` never writes an incomplete file. Methods other than `forward` that compute with a model (`generate`,
`encode`) do what its forward does: `prepare(forward_methods=...)`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..core import trees
from ..core.errors import PrepareError, suggestion
from ..core.modules import class_name
from ..precision.amp import restore_forward
from ..torch_internals.compiled import is_compiled_module, replace_uncompiled, uncompiled

if TYPE_CHECKING:
    from .prepared import PreparedModel

# What wrappers around a module (activation checkpointing, compilation, replication) add to the names below it.
_WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_MIXED = "mixed torch.Tensor and DTensor"  # in torch's error about a parameter that is not gathered
# Models with FSDP2 units of which such a method runs: its forwards leave the outermost unit gathered.
running_methods: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@functools.lru_cache(maxsize=1 << 16)
def canonical_name(name: str) -> str:
    """A parameter's name in the plain model."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPER_NAMES)


def named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """(plain name, parameter) of every parameter."""
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=remove_duplicate):
        yield canonical_name(name), parameter


def named_tensors(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """(plain name, tensor) of every parameter and buffer."""
    yield from named_parameters(model, remove_duplicate)
    for name, tensor in model.named_buffers(remove_duplicate=remove_duplicate):
        yield canonical_name(name), tensor


def _wrapper_types() -> tuple[type[torch.nn.Module], ...]:
    """Every wrapper class with the wrapped module as `.module`; those of optional packages if they are loaded."""
    found: list[type[torch.nn.Module]] = [DistributedDataParallel, DataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None:
        found.append(fsdp.FullyShardedDataParallel)
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    if engine is not None:
        found.append(engine)
    return tuple(found)


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """The model inside its parallel wrapper.

    Args:
        model: a prepared model, or any other.
        keep_fp32_wrapper: leave autocast and the fp32 conversion of the outputs on the forward.
        keep_torch_compile: return the compiled model if it, or its regions, are compiled.
        recursive: unwrap submodules too.
    """
    compiled = model if is_compiled_module(model) else None
    inner: Any = model if compiled is None else uncompiled(model)
    wrappers = _wrapper_types()
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        _unwrap_children(inner, wrappers)
    if not keep_torch_compile:
        # `compile_regions` leaves the original model there too.
        inner = uncompiled(inner)
    if not keep_fp32_wrapper:
        restore_forward(uncompiled(inner) if is_compiled_module(inner) else inner)
    if compiled is None or not keep_torch_compile:
        plain: torch.nn.Module = inner
        return plain
    if uncompiled(compiled) is not inner:
        replace_uncompiled(compiled, inner)
    return compiled


def is_peft_model(model: torch.nn.Module) -> bool:
    """Whether the model inside its wrappers is a peft model with adapters."""
    # A package that is not loaded has no objects.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


def _unwrap_children(model: torch.nn.Module, wrappers: tuple[type[torch.nn.Module], ...]) -> None:
    for name, child in model.named_children():
        plain: Any = child
        while isinstance(plain, wrappers):
            plain = plain.module
        if plain is not child:
            setattr(model, name, plain)
        _unwrap_children(plain, wrappers)


def require_state_dict(model: torch.nn.Module) -> None:
    """Make a prepared model's `save_pretrained` (transformers, peft) refuse to run without `state_dict`, and use it.

    Its default is the module's own state: one pipeline stage, which looks like a complete file, or shards of tensors.
    A model that transformers has sharded itself, over its own mesh, is saved by transformers.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if (
        callable(getattr(type(inner), "save_pretrained", None))
        and getattr(inner, "_device_mesh", None) is None
    ):
        # A method and not a closure: a copied model gets its own.
        inner.save_pretrained = MethodType(save_pretrained, inner)  # type: ignore[assignment]
        inner.named_modules = MethodType(named_modules, inner)  # type: ignore[method-assign]


def save_pretrained(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
    """The class's own method, with `state_dict` required.

    Raises:
        PrepareError: no `state_dict` is given.
    """
    original: Callable[..., object] = type(self).save_pretrained  # type: ignore[attr-defined]
    given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    if given.get("state_dict", kwargs.get("state_dict")) is None:
        raise PrepareError(
            f"save_pretrained would write only this process's shard of {type(self).__name__}. "
            "Pass state_dict=accelerator.get_state_dict(model), which every process must call. "
            "transformers.Trainer does this under FSDP with FULL_STATE_DICT; otherwise set "
            "save_strategy='no' and call accelerator.save_model"
        )
    return original(self, *args, **kwargs)


def named_modules(
    self: torch.nn.Module,
    memo: set[torch.nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The class's own method, with the names of the plain model, as `accelerator.get_state_dict` has them.

    peft 0.21 finds an adapter's tensors by these names, also outside of `save_pretrained`. The wrappers of FSDP1 and
    of activation checkpointing add to them: the adapter would have no tensors.
    """
    for name, module in type(self).named_modules(self, memo, prefix, remove_duplicate):
        # Torch enters the model from its wrapper with a prefix, and needs the names as they are.
        yield name if prefix else canonical_name(name), module


def check_names(models: Iterable[nn.Module], names: Iterable[str]) -> None:
    """Raise PrepareError for a name in `forward_methods` that is a method of none of the models."""
    models = list(models)
    for name in names:
        attributes = [getattr(model, name, None) for model in models]
        if any(
            callable(attribute) and not isinstance(attribute, nn.Module) for attribute in attributes
        ):
            continue
        if not models:
            raise PrepareError("forward_methods was passed without a model to prepare")
        known = set[str]().union(*(_public_methods(type(model)) for model in models))
        raise PrepareError(
            f"forward_methods has {name!r}, but {' and '.join(map(class_name, models))} does not "
            f"have this method{suggestion(name, known)}"
        )


def add_forward_methods(prepared: PreparedModel, names: Iterable[str]) -> None:
    """Have methods of the user's model compute as its forward does."""
    model = extract_model_from_parallel(prepared.module, keep_torch_compile=False)
    registered = {name for name in names if hasattr(model, name)}
    if prepared.is_partial and is_generator(model):
        keep_in_step(model)
        registered.add("generate")
    wrapper = uncompiled(prepared.module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded = fsdp is not None and isinstance(model, fsdp.FSDPModule)
    for name in registered:
        prepared.precision.wrap_method(model, name)
        if wrapper is not model:
            run_as_forward(wrapper, model, name)
        elif is_sharded:
            gather_for(model, name)
    if is_sharded:
        explain_others(model, registered)


def is_generator(model: nn.Module) -> bool:
    """Whether a model has the `generate` of transformers, also inside a peft adapter."""
    library: Any = sys.modules.get("transformers.generation.utils")
    is_of_library = library is not None and isinstance(model, library.GenerationMixin)
    return is_of_library or (is_peft_model(model) and hasattr(model, "generate"))


def keep_in_step(model: Any) -> None:
    """Have `generate` of a sharded model take equally many steps on every rank: each step gathers parameters."""
    generate = getattr(model.generate, "__func__", model.generate)

    @functools.wraps(generate)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **{"synced_gpus": True, **kwargs})

    model.generate = MethodType(call, model)


def run_as_forward(wrapper: nn.Module, model: nn.Module, name: str) -> None:
    """Give a wrapper the method of the model inside, which runs as the wrapper's forward.

    So DDP reduces the gradients of its backward, and FSDP1 gathers the outermost unit.
    """

    @functools.wraps(getattr(model, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        former = vars(model).get("forward")

        def restore() -> None:
            vars(model).pop("forward", None)
            if former is not None:
                model.forward = former

        def method(*inputs: Any, **options: Any) -> Any:
            # It may call the model.
            restore()
            return getattr(model, name)(*inputs, **options)

        model.forward = method
        try:
            return wrapper(*args, **kwargs)
        finally:
            restore()

    setattr(wrapper, name, call)


def gather_for(model: nn.Module, name: str) -> None:
    """Gather the outermost FSDP2 unit of a model before one of its methods runs, as before its forward."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, name)
    gathered = getattr(model, name).__func__

    @functools.wraps(gathered)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in running_methods:
            return gathered(self, *args, **kwargs)
        running_methods.add(self)
        output = None
        try:
            output = gathered(self, *args, **kwargs)
            return output
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise PrepareError(
                f"{class_name(self)}.{name} uses parameters of an inner module that FSDP2 shards "
                "separately. Call that module, or change the fsdp_plugin's auto_wrap_policy so "
                "that it belongs to the outermost unit"
            ) from error
        finally:
            running_methods.discard(self)
            if not any(tensor.requires_grad for tensor in trees.leaves(output)):
                # No backward will do it.
                self.reshard()

    setattr(model, name, MethodType(call, model))


def explain_others(model: nn.Module, registered: Iterable[str]) -> None:
    """Have the public methods that are not registered name themselves where they compute with shards."""
    for name in _public_methods(type(model)) - set(registered):
        if name not in vars(model):
            setattr(model, name, MethodType(_explaining(name, getattr(type(model), name)), model))


def _explaining(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise PrepareError(
                f"{class_name(self)}.{name} uses parameters of which this process has only a "
                "shard: FSDP2 gathers them only for forward. Register the method: "
                f"accelerator.prepare(..., forward_methods=[{name!r}])"
            ) from error

    return call


def _public_methods(kind: type) -> set[str]:
    """The methods that the classes of a model add to those of torch, and of every model of transformers."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    inherited = set(dir(nn.Module))
    if library is not None:
        inherited.update(dir(library.PreTrainedModel))
    methods: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("torch."):
            attributes = vars(base).items()
            methods.update(name for name, value in attributes if isinstance(value, FunctionType))
    return {name for name in methods - inherited if not name.startswith("_")}
