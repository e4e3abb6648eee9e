# SPDX-License-Identifier: Apache-2.0
"""The machines that take part in a rendezvous of torch's elastic agent, which reports only how many wait."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from . import Internal

MACHINES = Internal(
    name="rendezvous_machines",
    what="DynamicRendezvousHandler._state_holder: the participants and the wait list of the rendezvous",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="elastic runs: a lost machine is named and left behind, and those that wait name each other",
    without="a lost machine is noticed only if a rank here loses its connection, which uses up a restart",
    test="tests/torch_internals/test_rendezvous.py::test_machines_of_a_rendezvous",
)


class Machines(NamedTuple):
    """The addresses of machines, by what identifies each in the rendezvous: those of the group, those that wait."""

    group: dict[str, str]
    waiting: dict[str, str]


def machines(handler: RendezvousHandler) -> Machines | None:
    """The machines as this one knows them since its last heartbeat; None for other kinds of rendezvous."""
    if not MACHINES.is_on or not isinstance(handler, DynamicRendezvousHandler):
        return None
    state = handler._state_holder.state
    waiting = [*state.wait_list, *state.redundancy_list]
    return Machines(
        {str(node): node.addr for node in list(state.participants)},
        {str(node): node.addr for node in waiting},
    )
