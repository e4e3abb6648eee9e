# SPDX-License-Identifier: Apache-2.0
"""What DDP refuses: of a model before it is wrapped, and in a step what it would not reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ...core.errors import PrepareError


def check_frozen(model: nn.Module) -> None:
    """Raise PrepareError for a model without DDP, since nothing trained in `prepare`, that trains now."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            raise PrepareError(
                f"all of {type(model).__name__} was frozen when it was prepared, but {name} no "
                "longer is: the processes may have different values of it. Prepare the model and "
                "its optimizer again"
            )


def unanswered(model: nn.Module) -> PrepareError:
    """The error for gradients that are not reduced by DDP itself, in a block of `join_uneven_inputs`."""
    return PrepareError(
        "join_uneven_inputs: a finished process answers one backward pass for each forward pass "
        f"of {type(model).__name__}, for the parameters that were trainable in prepare. Here a "
        "second backward pass, one after a forward pass under no_sync, or an unfrozen parameter "
        "needs more messages. Use even_batches=True"
    )


def late_sync() -> PrepareError:
    """The error for a model of FSDP2 within `no_sync` whose backward shall reduce gradients nevertheless."""
    return PrepareError(
        "trigger_sync_in_backward inside no_sync works only with DDP. FSDP decides in the "
        "backward pass: call accelerator.backward outside the no_sync block"
    )


def check_turn(
    joined: Sequence[object], turns: Iterator[object], replica: nn.Module, _: object
) -> None:
    """Raise PrepareError for models that do not send their messages one after the other, as `Join` answers them."""
    if any(getattr(model, "expects_backward", False) for model in joined) or replica is not next(
        turns
    ):
        names = ", ".join(type(getattr(model, "module", model)).__name__ for model in joined)
        raise PrepareError(
            f"join_uneven_inputs([{names}]): a finished process answers the messages of one model "
            f"after the other, but here {type(replica.module).__name__} runs before the backward "
            "pass of another one, or out of order. Run the forward and backward pass of each "
            "model in the order of the list, combine them in one module, or use even_batches=True"
        )
