# SPDX-License-Identifier: Apache-2.0
"""Debug mode: before an operation the ranks compare what they are about to do, and all raise where they differ.

The comparison goes through the run's key-value store, not through a collective: it works whatever the ranks send, also
where one of them calls another operation, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch.distributed as dist

from ..core import env
from ..core.errors import DistributedOperationException
from ..core.objects import ranks_in_words
from ..runtime import hang_watch
from ..runtime.agreement import Round, StoreLostError
from ..runtime.calls import Call, difference, record
from ..state import PartialState
from . import transport

# Seconds for which a rank waits for the others to come to the same operation (variable ACCELERATE_DEBUG_TIMEOUT).
TIMEOUT = 20.0
# Ranks whose calls are listed in a message.
LISTED = 16


def agree(
    operation: str,
    data: object,
    group: dist.ProcessGroup | None = None,
    options: str = "",
    free_dim: int | EllipsisType | None = None,
) -> None:
    """Return when every rank of `group` is about to do the same.

    Sizes along `free_dim` (`...`: along all) may differ. Raises DistributedOperationException, the same on every rank,
    where operation, options, structure, dtypes or shapes differ, and where a rank does not come in time.
    """
    group = transport.group_of(group)
    mine = record(Call(operation, data, options, free_dim))
    limit = env.value("ACCELERATE_DEBUG_TIMEOUT") or TIMEOUT
    turn = Round(f"verify/{group.group_name}", dist.get_process_group_ranks(group))

    def explain(absent: list[int], ended: list[int]) -> str:
        ranks = [rank for rank in turn.ranks if rank not in absent]
        present = turn.values(ranks[:LISTED])
        return difference(present) or _absence(turn, present, absent, ended, limit)

    try:
        outcome = turn.exchange(operation, mine, limit, difference, explain)
    except StoreLostError as error:
        raise DistributedOperationException(
            f"Operation: `accelerate.{operation}` at {mine['at']}: the store of the run is gone, so the process "
            f"that hosts it (rank 0, or the launcher) has ended: {error}"
        ) from error
    verdict = outcome.refused or outcome.result
    if verdict is not None:
        raise DistributedOperationException(verdict)


def _absence(
    turn: Round,
    present: dict[int, dict[str, Any]],
    absent: list[int],
    ended: list[int],
    limit: float,
) -> str:
    """Why the absent ranks will not come."""
    first = next(iter(present.values()))
    ranks = ranks_in_words(ended or absent)
    when = f"within {limit:g} seconds"
    if ended:
        when = "and has ended"
    lines = [
        f"Cannot apply the desired operation: {ranks} did not call it {when}.",
        "",
        f"Operation: `accelerate.{first['operation']}`",
        "Callers:",
    ]
    lines += [f"  - Process {rank}: at {call['at']}" for rank, call in present.items()]
    listed = absent[:LISTED]
    running = [rank for rank in listed if rank not in ended]
    places = hang_watch.request(running)
    for rank in listed:
        line = "has not arrived"
        if rank in ended:
            line = "has ended"
        if rank in places:
            status = hang_watch.status_line(places[rank])
            line += f"; it {status}"
        last = turn.former_value(rank)
        if last is not None:
            line += f"; its last operation was {last['summary']} (at {last['at']})"
        lines.append(f"  - Process {rank}: {line}")
    if not ended:
        lines += ["", "If it only needs longer, set ACCELERATE_DEBUG_TIMEOUT to more seconds."]
    return "\n".join(lines)


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a custom collective: in debug mode the ranks first compare its first argument, `tensor`.

    Raises:
        DistributedOperationException: on every rank, if structure, dtypes or shapes differ, or a rank does not come.

    Example:
        @verify_operation
        def gather_rows(tensor): ...
    """

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.use_distributed:
            if "tensor" in kwargs:
                tensor = kwargs["tensor"]
            else:
                tensor = args[0]
            agree(_name_of(function), tensor)
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that calls verified operations, so that an error names the function.

    Raises:
        DistributedOperationException: an operation in `function` has raised one.
    """

    @functools.wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(
                f"Error found while calling {_name_of(function)}. Please see the earlier error for more details."
            ) from error

    return chained


def _name_of(function: Callable[..., Any]) -> str:
    return f"`{function.__module__}.{function.__name__}`"
