# SPDX-License-Identifier: Apache-2.0
"""What is changed in a recorded run: a reference has no layout of its own and joins the batches of data shards."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ..core.errors import ConfigurationError
from ..core.trees import map_leaves
from ..data_loader.batch_source import altered
from ..data_loader.loader import PreparedLoader
from ..logging import MultiProcessAdapter, get_logger
from ..parallel.gradients import local
from ..run.resolve import Request
from ..state import AcceleratorState
from ..torch_internals.compiled import uncompiled
from .joined import ShardGenerators, join_shards
from .layouts import FIELDS, text_of
from .settings import Settings

logger: MultiProcessAdapter = get_logger(__name__)

# Arguments of `Accelerator` that lay a run out.
_LAYOUT = (
    "deepspeed_plugin",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
    "strategy",
)
# The ends of names of functions of dropout.
_DROPOUTS = ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d")


class NoDropout(TorchFunctionMode):
    """A mode of the forward of modules, in which functions of dropout return their input."""

    def __init__(self) -> None:
        super().__init__()
        self._depths = threading.local()

    def watch(self, module: nn.Module) -> None:
        """Enter the mode in the forward of a module, also where a backward computes it again."""
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        depth = getattr(self._depths, "depth", 0)
        if depth == 0:
            self.__enter__()
        self._depths.depth = depth + 1

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depths.depth -= 1
        if self._depths.depth == 0:
            self.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, without dropout."""
        arguments = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name.endswith(_DROPOUTS):
            values = [*args, *arguments.values()]
            return values[0]
        if func is functional.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        if "dropout_p" in arguments:
            arguments["dropout_p"] = 0.0
        return func(*args, **arguments)


class Changes:
    """The changes of a run.

    Args:
        settings: how it is recorded.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._dtype: torch.dtype | None = None
        if settings.dtype is not None:
            self._dtype = getattr(torch, settings.dtype)
        # Shared by all loaders of the process.
        self._generators = ShardGenerators(settings.shards)

    def begin(self, request: Request) -> Request:
        """Change the process and what its script has requested."""
        changes: dict[str, Any] = {}
        if self.settings.shards:
            changes = dict.fromkeys(_LAYOUT)
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
            changes["mixed_precision"] = "no"
            changes["precision_policy"] = None
        return dataclasses.replace(request, **changes)

    def check(self, request: Request, state: AcceleratorState) -> None:
        """Raise ConfigurationError where options of the script give another layout than the one to compare."""
        if self._dtype is not None:
            logger.warning(f"--dtype {self.settings.dtype}: mixed precision is off")
        names = [name for name in _LAYOUT if getattr(request, name) is not None]
        expected = self.settings.layout
        if not names or expected is None:
            return
        sizes = {"ddp": state.num_processes}
        if state.distributed_type.value in ("FSDP", "DEEPSPEED"):
            sizes = {"fsdp": state.num_processes}
        if state.parallelism_config is not None:
            size_of = state.parallelism_config.sizes
            sizes = {name: size_of[field] for name, field in FIELDS.items()}
        actual = text_of(sizes)
        if actual != expected:
            raise ConfigurationError(
                f"--layouts {expected}: the script passes {', '.join(names)} to Accelerator, "
                f"which makes it {actual}. Remove that from the script, or use --layouts {actual}"
            )

    def model(self, model: nn.Module) -> None:
        """Change a model before it is laid out."""
        if self._dtype is not None:
            model.to(self._dtype)
        if self.settings.perturb:
            perturb(model)

    def source(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A loader with batches of the type of the models, from one that is not prepared."""
        if self._dtype is None or isinstance(loader, PreparedLoader):
            return loader
        collate = functools.partial(_collated, loader.collate_fn, self._dtype)
        return altered(loader, collate_fn=collate)

    def data_shards(self, shards: int) -> int:
        """The shards of the data in a layout with so many."""
        return self.settings.shards or shards

    def loader(self, loader: DataLoader[Any], data_shards: int) -> DataLoader[Any]:
        """A prepared loader; in a reference with one data shard, one of all shards of the layout."""
        if data_shards == 1 and self.settings.shards > 1:
            return join_shards(loader, self._generators)
        return loader


def _collated(collate: Callable[[Any], Any], dtype: torch.dtype, samples: Any) -> Any:
    """A batch, whose floating-point tensors have another type."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    return map_leaves(cast, collate(samples))


def remove_dropout(model: nn.Module) -> None:
    """Set the attributes of modules that are probabilities of dropout to 0, and leave functions of dropout out."""
    mode = NoDropout()
    is_compiled = uncompiled(model) is not model
    for module in model.modules():
        if not is_compiled:
            mode.watch(module)
        is_dropout = "Drop" in type(module).__name__
        for name, value in vars(module).items():
            is_named = "drop" in name.lower() or (name == "p" and is_dropout)
            if is_named and isinstance(value, float) and 0 < value < 1:
                setattr(module, name, 0.0)


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Move each element of parameters that train by one unit in the last place, up or down. Zeros stay."""
    for number, parameter in enumerate(model.parameters()):
        values = local(parameter.detach())
        is_trained = parameter.requires_grad and values.is_floating_point()
        if values.is_meta or not is_trained:
            continue
        direction = _signs(values, number) * torch.inf
        moved = torch.nextafter(values, direction)
        # What begins at zero, such as half of an adapter, has no unit in the last place.
        values.copy_(moved.where(values != 0, values))


def perturb_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Move what each module returns by the rounding of a dtype in training: a layout may compute in another order."""
    for number, module in enumerate(model.modules()):
        hook = functools.partial(_perturb_output, number, dtype)
        module.register_forward_hook(hook)


def _perturb_output(
    number: int, dtype: torch.dtype, module: nn.Module, args: Any, output: Any
) -> Any:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return tensor
        values = tensor.detach()
        signs = _signs(values, number)
        # The gradient passes.
        return tensor + values * signs * _unit(values, dtype)

    if torch.compiler.is_compiling():
        return None
    return map_leaves(move, output)


@torch.no_grad()
def perturb_gradients(gradients: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Move the elements of gradients by the rounding of their sums, which have another order in a layout.

    Args:
        gradients: changed in place. Zeros stay: such an element may have no gradient.
        dtype: in which they are computed.
    """
    for number, gradient in enumerate(gradients):
        values = local(gradient)
        count = max(values.numel(), 1)
        size = torch.linalg.vector_norm(values) / count**0.5
        moves = size * _unit(values, dtype) * _signs(values, number)
        values.add_(moves * (values != 0))


def _unit(values: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest relative rounding of values that are computed in a dtype: half a unit in the last place."""
    unit = max(torch.finfo(dtype).eps, torch.finfo(values.dtype).eps)
    return unit / 2


def _signs(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of 1 and -1. Replicas have the same ones, whatever the shapes of the other shards."""
    generator = torch.Generator().manual_seed(seed)
    ups = torch.randint(0, 2, values.shape, generator=generator)
    signs = 2 * ups - 1
    return signs.to(values.device, values.dtype)
