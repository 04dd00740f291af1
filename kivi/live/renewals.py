"""Windows that are read again, one after the other, beside the ticks.

Where a window runs short, or it is not known which rows changed, it has to be read again from a snapshot. That takes as
long as a scan takes, and in a tick everybody would wait for it. So a thread of its own reads, at most
``live_renewals_per_s`` windows a second and, as ticks do, for no more than a part of the time (``_SHARE``): what a
burst of them takes from others is bounded, and falls on those who wait for them. A tick takes over what was read
(``kivi.live.groups``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kivi.errors import KiviError, Unavailable
from kivi.live.groups import Group, Member
from kivi.live.reading import read_window
from kivi.live.shared import Shared
from kivi.live.windows import Window
from kivi.store.facade import Store
from kivi.store.shards import asked_shards

__all__ = ["Renewals"]

_SHARE: Final = 3.0
"""A pause is at least so many times as long as the reading before it computed."""
_log = logging.getLogger("kivi.live")


class Renewals:
    """``lock`` is the hub's. ``done`` is called after each, with those that ended because they cannot be read."""

    def __init__(self, store: Store, lock: threading.RLock, done: Callable[[Iterable[Member]], None]) -> None:
        self._store, self._lock, self._done = store, lock, done
        self._thread: ThreadPoolExecutor | None = None
        self._stopping = threading.Event()
        self._next_at = 0.0
        self.read_some = False
        """A window waits for a tick that takes it over."""
        self.count = 0

    def ticked(self, groups: Iterable[Group]) -> None:
        """What a tick has left to be read again, or to be taken over. Called with the lock."""
        self.read_some = False
        for group in groups:
            self.read_some |= any(shared.fresh is not None for shared in group.noting)
            for shared in group.stale:
                self._thread = self._thread or ThreadPoolExecutor(1, "kivi-live-renew")
                self._thread.submit(self._renew, group, shared)
            group.stale.clear()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def read(self, shared: Shared) -> None:
        """Reads its window, of which it is noted what changes. Raises what a scan raises, Unavailable."""
        with self._lock:
            schema, query = shared.schema, shared.query
        with self._store.snapshots.opened() as lease:
            is_known = self._store.table(shared.table, lease) == schema  # else a tick finds out what it asks for now
            if is_known:
                self._store.shards.check(schema, asked_shards(schema, query.scan))
            window = read_window(self._store, lease, schema, query) if is_known else Window(query)
            with self._lock:
                shared.fresh, shared.read_ts = window, lease.ts
                shared.reread = shared.reread or not is_known or shared.query is not query
                self.read_some = True

    def _renew(self, group: Group, shared: Shared) -> None:
        failed: list[Member] = []
        if self._stopping.wait(max(0.0, self._next_at - time.monotonic())):
            return
        with self._lock:
            if not shared.lives or shared.failure is not None:
                return
            group.begin(shared)
        began, computed = time.monotonic(), time.thread_time()
        try:
            self.read(shared)
            self.count += 1
        except KiviError as error:
            with self._lock:
                failed.append(group.failed(shared, error))
        except Exception:
            _log.exception("reading for a subscription")
            fault = Unavailable("reading failed by a fault of this program: subscribe again")
            with self._lock:
                failed.append(group.failed(shared, fault))
        rate_s = 1 / max(1, self._store.settings.live_renewals_per_s)
        self._next_at = max(began + rate_s, time.monotonic() + _SHARE * (time.thread_time() - computed))
        self._done(failed)
