"""Subscriptions of the client for threads."""

from __future__ import annotations

import queue
import time

from kivi.api.arguments import SubscribeArguments
from kivi.api.subscription import Subscription
from kivi.client import subscriptions
from kivi.client.core import Core
from kivi.client.transport import Transport
from kivi.model.subscriptions import Update

__all__ = ["Live"]


class Live(Subscription):
    """Waits on the calling thread."""

    def __init__(self, core: Core, transport: Transport, wanted: SubscribeArguments) -> None:
        self._core = core
        self._transport = transport
        self._wanted = wanted
        self._live = subscriptions.Live(core, wanted, queue.SimpleQueue)
        transport.run(self._live.begin())
        assert self._live.follower is not None
        self._follower = self._live.follower

    def _next(self, timeout_s: float | None) -> Update | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        live = self._live
        while not live.closed:
            if self._transport.is_parents:  # what is said comes to the parent
                self._transport.open()  # which says so
            if live.place is None and not self._transport.run(live.begin(deadline)):
                return None
            try:
                said = live.inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if (update := live.read(said)) is not None:
                return update
        return None

    def _acknowledge(self, ts: int, skip: int) -> None:
        self._transport.run(self._core.acknowledge(self._wanted, ts, skip))

    def __del__(self) -> None:
        """Ends it if the caller drops it without closing."""
        if not self._live.closed:
            self._live.close()

    def close(self) -> None:
        self._live.close()
