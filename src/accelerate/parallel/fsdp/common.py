# SPDX-License-Identifier: Apache-2.0
"""What both versions of FSDP share: the mixed-precision policy, checks, and parameters that FSDP does not shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...core.errors import ConfigurationError, PrepareError
from ...placement.subclasses import is_quantized_tensor
from ...precision.base import Precision
from ..gradients import GradientReducer, all_reduce, buckets, gradients_of, local
from ..prepared import CommunicationVolume
from ..report.memory import local_bytes
from .units import find_modules


def fill_policy(plugin: FullyShardedDataParallelPlugin, version: int, precision: Precision) -> bool:
    """Set the run's mixed-precision policy on a plugin without one; returns whether outputs are converted to fp32.

    They are, as under the other strategies, unless the user gave a policy.
    Raises ConfigurationError for a plugin of the other version.
    """
    if plugin.fsdp_version != version:
        raise ConfigurationError(f"fsdp_version={plugin.fsdp_version} is not FSDP{version}")
    full_outputs = precision.native_amp and (plugin.mixed_precision_policy is None or plugin.policy_is_filled)
    if precision.native_amp and plugin.mixed_precision_policy is None:
        plugin.set_mixed_precision(precision.name)
        plugin.policy_is_filled = True
    return full_outputs


def keep_unpacked(model: torch.nn.Module) -> None:
    """Have 4-bit layers of bitsandbytes leave their weights as they are.

    On processors with AVX512 a forward without gradients rearranges them in place. Under FSDP it would do so in the
    gathered weights, of which only the note in the layer stays: from the second forward on, outputs would be wrong.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def refuse_unshardable(model: torch.nn.Module, layout: str, ignored: Any) -> None:
    """Raise PrepareError for modules and parameters that torch's FSDP cannot shard, or whose gradients it loses."""
    skipped = {id(parameter) for module in find_modules(model, ignored) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        # A tensor with this method describes its own sharding, as the fp8 weights of training do.
        shards_itself = hasattr(parameter, "fsdp_pre_all_gather")
        if is_quantized_tensor(parameter) and not shards_itself and id(parameter) not in skipped:
            raise PrepareError(
                f"{name} is a {type(parameter).__name__}, quantized by torchao, which {layout} does not shard. For "
                "inference use prepare_model(model, evaluation_mode=True), which keeps the full model on each "
                "process, or a device map; or put its module into ignored_modules"
            )
    for name, module in model.named_modules():
        if all(id(parameter) in skipped for parameter in module.parameters()):
            continue
        what = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise PrepareError(
                f"{what} is compiled by torch.jit, and {layout} does not shard it. Give the module from which it was "
                "made (torch.compile works), or put it into ignored_modules"
            )
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise PrepareError(
                f"{what} has max_norm={module.max_norm}: its forward changes the rows that it reads, and {layout} "
                "would lose the change. Leave max_norm out, and limit the norms after each step"
            )
        if module.sparse and module.weight.requires_grad:
            raise PrepareError(
                f"{what} gives sparse gradients, which {layout} does not reduce. Build it with sparse=False"
            )


def added_parameter(name: str, model: str, layout: str) -> PrepareError:
    """The error for a trainable parameter that `layout` does not know, since `model` has it only after prepare."""
    return PrepareError(
        f"{name} was added or replaced after {model} was prepared, and {layout} shards a model once. Add adapters and "
        "replace layers before prepare, or build the model again, load its state (get_state_dict) and prepare that"
    )


def other_parameters(name: str, module: str, layout: str) -> PrepareError:
    """The error for a forward with other tensors than the parameters of a module."""
    return PrepareError(
        f"{name} of {module} is another tensor in this forward, as inside of torch.func.functional_call, or was "
        f"replaced, and {layout} would compute with its own shards instead. Use DDP for such a model, or tp_size"
    )


class UnreducedGradients(GradientReducer):
    """Averages gradients that no backward reduces over `group` (None: all), as of parameters FSDP does not shard."""

    def __init__(self, group: dist.ProcessGroup | None, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.group = group
        self.parameters: list[nn.Parameter] = list(parameters)

    def communication_volume(self) -> list[CommunicationVolume]:
        """What averaging sends in an optimizer step."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        found = buckets(map(local, trained))
        sent = local_bytes(trained)
        what = "all-reduce of gradients of unsharded parameters"
        return [CommunicationVolume(what, len(found), sent)] if found else []

    def finish(self) -> None:
        """Average the gradients over the group."""
        if dist.get_world_size(self.group) > 1:
            all_reduce(map(local, gradients_of(self.parameters)), self.group, average=True)
