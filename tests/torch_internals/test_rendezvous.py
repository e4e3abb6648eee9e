# SPDX-License-Identifier: Apache-2.0
"""The machines of a rendezvous of torch's elastic agent."""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from accelerate.torch_internals.rendezvous import machines


def test_machines_of_a_rendezvous() -> None:
    store = HashStore()
    backend = C10dRendezvousBackend(store, "run")
    handler = DynamicRendezvousHandler.from_backend(
        "run", store, backend, 1, 1, local_addr="127.0.0.1"
    )
    handler.next_rendezvous()
    try:
        present = machines(handler)
        assert present is not None
        assert list(present.group.values()) == ["127.0.0.1"] and not present.waiting
    finally:
        handler.shutdown()
