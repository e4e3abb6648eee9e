# SPDX-License-Identifier: Apache-2.0
"""Messages for epochs in which samples have different weights than in a run of one process."""

from __future__ import annotations

from typing import Any


def uneven_epoch(loader: Any) -> str | None:
    """A message if samples of the last step are repeated or dropped, and which option avoids it; else None.

    Args:
        loader: the prepared loader that is being trained on.
    """
    plan = loader.plan()
    if plan.cut.exact:
        return None
    try:
        total = plan.total()
    except TypeError:
        # An iterable dataset without a length.
        return None
    left = total % plan.stride
    if plan.cut.shards > 1 and plan.cut.even and left and not plan.drop_last:
        return (
            f"each epoch repeats {plan.stride - left} of its {total} {plan.unit}, so that all processes "
            "make the same number of steps; Accelerator(exact=True) uses each sample once"
        )
    if plan.cut.shards > 1 and not plan.cut.even and left and not plan.drop_last:
        return (
            f"the last step of each epoch has {left} of {plan.stride} {plan.unit}, so not all processes take part; "
            "with Accelerator(exact=True) all do, and all samples have the same weight"
        )
    return None


def uneven_window(loader: Any, steps: int) -> str | None:
    """A message if the last accumulation window of an epoch is incomplete, and the remedy; else None.

    Args:
        loader: the prepared loader that is being trained on.
        steps: batches in an accumulation window.
    """
    try:
        batches = len(loader)
    except TypeError:
        return None
    if steps > 1 and batches % steps and not loader.plan().cut.exact and uneven_epoch(loader) is None:
        return (
            f"the last accumulation window of each epoch has {batches % steps} of {steps} batches, and each still "
            f"has the weight 1/{steps}; backward(loss, num_items=...) makes every window a mean over its items"
        )
    return None
