# SPDX-License-Identifier: Apache-2.0
"""What DDP refuses: of a model before it is wrapped, and in a step what it would not reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def check_renormalized(model: nn.Module) -> None:
    """Raise PrepareError for an embedding whose forward changes the rows that this process reads."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise PrepareError(
                f"{name or 'the model'} ({type(module).__name__}) has max_norm={module.max_norm}: its forward changes "
                "the rows that a process reads, so that the processes would train different models. Leave max_norm "
                "out, and limit the norms after each step"
            )


def check_frozen(model: nn.Module) -> None:
    """Raise PrepareError for a model without DDP, since nothing trained in `prepare`, that trains now."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            raise PrepareError(
                f"all of {type(model).__name__} was frozen when it was prepared, and {name} is not any more: the "
                "processes may have different values of it. Prepare the model and its optimizer again"
            )


def unanswered(model: nn.Module) -> PrepareError:
    """The error for gradients that are not reduced by DDP itself, in a block of `join_uneven_inputs`."""
    return PrepareError(
        f"join_uneven_inputs: a process that has finished answers one backward for each forward of "
        f"{type(model).__name__}, of the parameters that trained in prepare. Here a second backward, one after a "
        "forward under no_sync, or an unfrozen parameter needs more messages. Use even_batches=True"
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
