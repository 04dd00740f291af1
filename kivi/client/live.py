"""Subscriptions of the client for threads."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from kivi.api.arguments import SubscribeArguments
from kivi.api.subscription import Subscription
from kivi.client import subscriptions
from kivi.client.core import Core
from kivi.client.steps import Steps
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
        self._beginning: Future[bool] | None = None
        transport.run(self._live.begin())
        assert self._live.follower is not None
        self._follower = self._live.follower

    def _next(self, timeout_s: float | None) -> Update | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        live = self._live
        while not live.closed:
            if self._transport.is_parents:  # what is said comes to the parent
                self._transport.open()  # which says so
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if live.place is None:
                if not self._begun(left_s):
                    return None
                continue
            try:
                said = live.inbox.get(timeout=left_s)
            except queue.Empty:
                return None
            if (update := live.read(said)) is not None:
                return update
        return None

    def _begun(self, timeout_s: float | None) -> bool:
        """Takes it up again, on a thread of its own: a caller that waits no longer finds it under way the next time.
        False: it has not begun, or was closed."""
        beginning = self._beginning
        if beginning is None:
            beginning = Future[bool]()
            self._transport.threads.start("kivi-begin", _carry_out, self._transport.run, self._live.begin(), beginning)
            self._beginning = beginning
        if not wait([beginning], timeout_s).done:
            return False
        self._beginning = None
        return beginning.result()

    def _acknowledge(self, ts: int, skip: int) -> None:
        self._transport.run(self._core.acknowledge(self._wanted, ts, skip))

    def __del__(self) -> None:
        """Ends it if the caller drops it without closing, or an interrupt kept it from being made."""
        live = self.__dict__.get("_live")
        if live is not None and not live.closed:
            live.close()

    def close(self) -> None:
        self._live.close()


def _carry_out(run: Callable[[Steps[bool]], bool], steps: Steps[bool], beginning: Future[bool]) -> None:
    """For whoever waits; it does not keep the subscription, which its caller may drop meanwhile."""
    try:
        beginning.set_result(run(steps))
    except BaseException as error:
        beginning.set_exception(error)
