# SPDX-License-Identifier: Apache-2.0
"""What the launchers of several machines share through a store of torch: the first failure, and that each is alive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from ..core import env, messages, system
from ..core.errors import LaunchError
from .base import Interrupted, handling
from .ports import address_towards, interface_of
from .spec import LaunchSpec
from .supervisor import OtherMachines, Stop

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

# Variables of the launcher's process alone: its ranks do not get them. The agent and the stores of torch log each
# event; the launcher reports what that means. Each group of ranks has a store of its own: the store that torch's
# agent shares by default keeps the addresses of dead processes, and the restarted ranks wait for those.
QUIET = {
    "LOGLEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
# Seconds between two looks at the store.
LOOK = 0.25
FAILURE = "accelerate/failure"


def tcp_store(host: str, port: int, is_master: bool, timeout: float) -> TCPStore:
    """Open a store at a port, as its host (port 0: any free one) or to use that of another process."""
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        use_libuv=system.uses_libuv(),
    )


class News(NamedTuple):
    """What a look at the store has shown.

    Fields:
        failure: the report of the first failure, its exit code, and whether the run must not be restarted.
        finished: the number of machines whose ranks have ended without an error.
        left: which machine has left an elastic run, and why.
        waiting: the number of machines that wait to join an elastic run.
    """

    failure: tuple[str, int, bool] | None = None
    finished: int = 0
    left: str = ""
    waiting: int = 0


class SharedStore(OtherMachines):
    """The launchers of a run, as far as they write to and read from one store.

    A thread looks at the store, because a call does not return while the network is down.

    Args:
        lost_message: what is reported where the store is lost.
        patience: seconds without news after which the store is lost.
    """

    def __init__(self, lost_message: str, patience: float) -> None:
        self.lost_message = lost_message
        self.store: Store | None = None
        self.is_lost: bool = False
        self.news: News = News()
        # Set while the store is not followed.
        self.ended: threading.Event = threading.Event()
        self._patience = patience
        self._news_at = 0.0

    def follow(self, store: Store) -> None:
        """Follow what the launchers write to the store of a group of ranks."""
        self.unfollow()
        self.store = store
        self.news = News()
        self._news_at = time.monotonic()
        self.ended = threading.Event()
        threading.Thread(target=self._follow, args=(store, self.ended), daemon=True).start()

    def unfollow(self) -> None:
        """Look at the store no longer."""
        self.ended.set()

    def _follow(self, store: Store, ended: threading.Event) -> None:
        while not ended.wait(LOOK):
            try:
                news = self.look(store)
            except (RuntimeError, ConnectionError):
                self.is_lost = not ended.is_set()
                return
            if not ended.is_set():
                self.news = news
                self._news_at = time.monotonic()

    def look(self, store: Store) -> News:
        """One look at the store, in the thread that follows it. ConnectionError or RuntimeError where it is gone."""
        if store.check([FAILURE]):
            return News(failure=tuple(json.loads(store.get(FAILURE))))
        return News()

    @property
    def is_reachable(self) -> bool:
        """Whether the store has answered within the last seconds, so that a call to it returns."""
        return not self.is_lost and time.monotonic() - self._news_at < 8 * LOOK

    def tick(self, stop: Stop) -> None:
        """Stop the ranks here where one has failed elsewhere, or the store is lost."""
        if time.monotonic() - self._news_at > self._patience:
            self.is_lost = True
        if self.is_lost:
            stop(self.lost_message, 1, True)
        elif self.news.failure:
            stop(*self.news.failure)

    def failed(self, report: str, code: int, final: bool = False) -> None:
        """Report a failure here to the other machines, unless one has reported another before."""
        if self.store is None or not self.is_reachable:
            return
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(FAILURE, "", json.dumps([report, code, final]))


def run_with_store(spec: LaunchSpec, run: Callable[[LaunchSpec], int]) -> int:
    """Call `run` with the variables that torch and its stores need in this process, and those of the ranks.

    Signals that end the run raise Interrupted in it; while ranks run, their supervisor handles signals. Returns the
    exit code.
    """
    # The ranks get these variables as they were.
    variables = {**spec.variables, **{name: env.get(name) for name in QUIET}}
    if env.get("GLOO_SOCKET_IFNAME") is None:
        interface = interface_of(address_towards(spec.main_process_ip))
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    env.publish({name: env.get(name, text) for name, text in QUIET.items()})
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupts:
            os._exit(128 + number)
        interrupts.append(number)
        raise Interrupted(number)

    try:
        with handling(("SIGINT", "SIGTERM", "SIGHUP"), interrupt):
            code = run(spec._replace(variables=variables))
    except Interrupted as error:
        messages.show(f"ended by {signal.Signals(error.number).name}")
        code = 128 + error.number
    except LaunchError as error:
        messages.show(f"error: {error}")
        code = 1
    if spec.in_place:
        # A thread of torch in a call of its store aborts the interpreter's exit, or holds it up while the network is
        # down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
