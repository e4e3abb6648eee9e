# SPDX-License-Identifier: Apache-2.0
"""What DDP refuses: of a model before it is wrapped, and in a step what it would not reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ...core.errors import PrepareError
from ...runtime.channel import backends_of


def check_device(model: nn.Module) -> None:
    """Raise PrepareError for a model on a device whose tensors the processes cannot send."""
    assert dist.group.WORLD is not None
    kinds = backends_of(dist.group.WORLD)
    elsewhere = next(
        (p.device for p in model.parameters() if p.device.type not in {*kinds, "meta"}), None
    )
    if elsewhere is not None:
        raise PrepareError(
            f"{type(model).__name__} is on {elsewhere}, and the processes of this run communicate on "
            f"{', '.join(sorted(kinds))} devices: move it to accelerator.device before prepare, or leave out "
            "device_placement=False. With cpu=True the run is on the CPU."
        )


def check_frozen(frozen: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Raise PrepareError for a parameter that trains since `prepare`: DDP would not average its gradient."""
    name = next((name for name, p in frozen.items() if p.requires_grad), None)
    if name is not None:
        raise PrepareError(
            f"{name} was frozen when {type(model).__name__} was prepared, and DDP would not average its "
            "gradient. Unfreeze it before prepare and freeze it again after (with find_unused_parameters=True of "
            "DistributedDataParallelKwargs), or prepare the model and its optimizer again"
        )


def second_backward(model: nn.Module) -> PrepareError:
    """The error for a backward that reaches a model without a forward since the last one."""
    return PrepareError(
        f"DDP reduces one backward for each forward, and {type(model).__name__} had no forward since the "
        "last backward, or only under no_sync: the gradients would be those of this rank. Add the losses of its "
        "forwards and call backward once, or use accelerator.trigger_sync_in_backward"
    )


def late_sync() -> PrepareError:
    """The error for a model of FSDP2 within `no_sync` whose backward shall reduce gradients nevertheless."""
    return PrepareError(
        "trigger_sync_in_backward inside of no_sync works with DDP. FSDP decides in the backward: call "
        "accelerator.backward outside of the no_sync block"
    )


def check_joined(models: Iterable[object]) -> list[Any]:
    """The models of a `join_uneven_inputs`. Raises PrepareError for what torch cannot join."""
    from torch.distributed.algorithms.join import Joinable

    joined = list(models)
    for model in joined:
        if not isinstance(model, Joinable):
            raise PrepareError(
                f"join_uneven_inputs takes prepared models, and this {type(model).__name__} is not one"
            )
    return joined


def check_turn(
    joined: Sequence[object], turns: Iterator[object], replica: nn.Module, _: object
) -> None:
    """Raise PrepareError for models that do not send their messages one after the other, as `Join` answers them."""
    if any(getattr(model, "expects_backward", False) for model in joined) or replica is not next(
        turns
    ):
        names = ", ".join(type(getattr(model, "module", model)).__name__ for model in joined)
        raise PrepareError(
            f"join_uneven_inputs([{names}]): a process that has finished answers the messages of one model after the "
            f"other, and here {type(replica.module).__name__} runs before the backward of another one, or not in its "
            "turn. Call forward and backward of each model in the order of the list, make one module of them, or use "
            "even_batches=True"
        )
