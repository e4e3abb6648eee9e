# SPDX-License-Identifier: Apache-2.0
"""A rendezvous of the elastic agent says how many machines wait, and not which take part."""

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

store = HashStore()
backend = C10dRendezvousBackend(store, "run")
handler = DynamicRendezvousHandler.from_backend("run", store, backend, 1, 1, "127.0.0.1")
handler.next_rendezvous()
public = [name for name in dir(handler) if not name.startswith("_")]
handler.shutdown()
if not any("participant" in name for name in public):
    raise SystemExit(f"127.0.0.1 takes part, which none of these tells: {public}")
