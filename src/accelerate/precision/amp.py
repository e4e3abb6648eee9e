# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision through torch.autocast: bf16, and fp16 with gradient scaling."""

from __future__ import annotations

import contextlib
import functools
import pickle
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..core.devices import accelerator_type
from ..core.enums import DistributedType
from ..core.errors import PrepareError
from ..core.objects import NullContext
from ..core.trees import convert_to_fp32
from ..state import AcceleratorState
from .base import Precision
from .modules import computing_in, find_regions

if TYPE_CHECKING:
    from ..config.precision import AutocastKwargs, GradScalerKwargs


class MixedPrecision(Precision):
    """Forward under `torch.autocast(dtype)`; outputs in fp32 except under FSDP2; the weights stay as they are."""

    native_amp = True

    def __init__(
        self, name: str, dtype: torch.dtype, device_type: str, options: AutocastKwargs | None = None
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.device_type = device_type
        self.options = options

    @property
    def computes_in(self) -> str:  # type: ignore[override]
        """The dtype, for `explain`."""
        return f"{self.name} under autocast"

    def autocast(
        self, options: AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """`torch.autocast` with the run's options or these; nothing where `native_amp` was set to False."""
        if not self.native_amp:
            return NullContext()
        options = options or self.options
        kwargs = {}
        if options is not None:
            kwargs = options.to_kwargs()
        return torch.autocast(self.device_type, dtype=self.dtype, **kwargs)

    def wrap_forward(self, model: torch.nn.Module, full_outputs: bool = True) -> torch.nn.Module:
        """Autocast around the model's forward. The original stays at `model._original_forward`."""
        restore_forward(model)
        for module, dtype in find_regions(model, self.modules).items():
            _replace_forward(
                module, functools.partial(computing_in, dtype, self.device_type, module)
            )
            module.policy_dtype = dtype  # type: ignore[assignment]

        def wrap(forward: Any) -> Any:
            forward = _under_autocast(self, forward)
            if full_outputs:
                return convert_outputs_to_fp32(forward)
            return forward

        _replace_forward(model, wrap)
        return model

    def wrap_method(self, model: torch.nn.Module, name: str) -> None:
        """Autocast around a method of the model."""
        method = getattr(model, name)
        inner = getattr(method, "__func__", method)
        wrapped: Any = convert_outputs_to_fp32(_under_autocast(self, inner))
        if inner is not method:
            wrapped = types.MethodType(wrapped, model)
        setattr(model, name, wrapped)


def _replace_forward(module: torch.nn.Module, wrap: Callable[[Any], Any]) -> None:
    """Put `wrap(forward)` in the place of a module's forward, such that it is that of a copy in a copied module."""
    forward = module.forward
    module._original_forward = forward  # type: ignore[assignment]
    if isinstance(forward, functools.partial) and forward.args == (module,):
        # A hook's: a copy of the module can be made the argument instead.
        hooked = functools.partial(wrap(forward.func), module)
        module.forward = functools.update_wrapper(hooked, forward)
        return
    wrapped = wrap(getattr(forward, "__func__", forward))
    if hasattr(forward, "__func__"):
        module.forward = types.MethodType(wrapped, module)
    else:
        module.forward = wrapped


def _under_autocast(precision: MixedPrecision, forward: Any) -> Any:
    @functools.wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            return forward(*args, **kwargs)

    return autocast_forward


class ScaledPrecision(MixedPrecision):
    """fp16: the loss is scaled so that small gradients do not vanish, the gradients are unscaled before the step."""

    def __init__(
        self,
        device_type: str,
        options: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__("fp16", torch.float16, device_type, options)
        kwargs = {} if scaling is None else scaling.to_kwargs()
        self.scaler: torch.amp.GradScaler | None = scaler or torch.amp.GradScaler(
            device_type, **kwargs
        )

    def wrap_forward(self, model: torch.nn.Module, full_outputs: bool = True) -> torch.nn.Module:
        """As the base class. Raises PrepareError for float16 parameters."""
        half = next(
            (
                name
                for name, p in model.named_parameters()
                if p.requires_grad and p.dtype is torch.float16
            ),
            None,
        )
        if half is not None:
            raise PrepareError(
                f"mixed_precision='fp16' keeps the weights in fp32, but the parameter {half!r} of "
                f"{type(model).__name__} is float16, so its gradients cannot be unscaled. Load "
                "the model in float32 (or bfloat16 with mixed_precision='bf16')."
            )
        return super().wrap_forward(model, full_outputs)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `model_forward` so that every half-precision tensor of its (nested) output is converted to fp32."""

    @functools.wraps(model_forward)
    def forward(*args: object, **kwargs: object) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


class ConvertOutputsToFp32:
    """`convert_outputs_to_fp32` as an object that cannot be pickled.

    Args:
        model_forward: the function whose outputs are converted.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function, and convert what it returns."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "the forward of a model under mixed precision cannot be pickled: pickle "
            "accelerator.unwrap_model(model), which has the original forward"
        )


def restore_forward(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `wrap_forward`, also where something else has wrapped the forward since (a hook, another wrapper)."""
    for module in model.modules():
        if module is not model and module.__dict__.pop("policy_dtype", None) is None:
            continue
        original = module.__dict__.pop("_original_forward", None)
        if original is None:
            continue
        if (
            getattr(original, "__self__", None) is module
            and original.__func__ is type(module).forward
        ):
            module.__dict__.pop("forward", None)
        else:
            module.forward = original
    return model


# What a forward under autocast computes in. Under fp8 it is bfloat16 around the layers that know better.
AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return an autocast context in the precision of the run (AcceleratorState).

    Without `native_amp` it has no effect.
    """
    if not native_amp:
        return contextlib.nullcontext()
    state = AcceleratorState()
    if autocast_kwargs is None:
        options = {}
    else:
        options = autocast_kwargs.to_kwargs()
    if state.mixed_precision in AUTOCAST_DTYPES:
        options.setdefault("dtype", AUTOCAST_DTYPES[state.mixed_precision])
    return torch.autocast(state.device.type, **options)


def get_grad_scaler(
    distributed_type: DistributedType | None = None, **kwargs: Any
) -> torch.amp.GradScaler:
    """A gradient scaler for this machine's device; `kwargs` are those of `torch.amp.GradScaler`.

    For FullyShardedDataParallel, where a rank sees only its shard of a gradient, one whose ranks agree on overflows.
    """
    device = accelerator_type() or "cpu"
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)
