# SPDX-License-Identifier: Apache-2.0
"""One line where the default way of sharing data makes samples count differently from a run of one process."""

from __future__ import annotations

from typing import Any


def uneven_epoch(loader: Any) -> str | None:
    """What the defaults do to the last batches of an epoch of `loader`, and the option that does better; else None.

    Args:
        loader: the prepared loader that is being trained on.
    """
    plan = loader.plan()
    if plan.cut.exact:
        return None
    try:
        total = plan.total()
    except TypeError:
        # A stream without a length: nothing is known before its end.
        return None
    left = total % plan.stride
    if plan.cut.shards > 1 and plan.cut.even and left and not plan.drop_last:
        return (
            f"each epoch repeats {plan.stride - left} of its {total} {plan.unit}, so that all {plan.cut.shards} "
            "processes get as many; Accelerator(exact=True) counts each once"
        )
    if plan.cut.shards > 1 and not plan.cut.even and left and not plan.drop_last:
        return (
            f"the last step of each epoch has {left} of {plan.stride} {plan.unit}, which not all processes share; "
            "Accelerator(exact=True) lets all take part, each sample counting once"
        )
    return None


def uneven_window(loader: Any, steps: int) -> str | None:
    """What dividing each loss by the steps does to an epoch's last accumulation window, and the remedy; else None.

    Args:
        loader: the prepared loader that is being trained on. steps: batches of an accumulation window.
    """
    try:
        batches = len(loader)
    except TypeError:
        return None
    if steps > 1 and batches % steps and not loader.plan().cut.exact and uneven_epoch(loader) is None:
        return (
            f"the last accumulation window of each epoch has {batches % steps} of {steps} batches, and each still "
            f"weighs 1/{steps}; backward(loss, num_items=...) makes every window a mean over its own items"
        )
    return None
