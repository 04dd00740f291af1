"""All sessions of a server: who is there, the workers and pools they share, and what is still to be answered.

What a session is and in which order things happen is ``kivi_server.session``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import resource
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kivi_server import limits
from kivi_server.auth import Allowance, Tokens
from kivi_server.calls import Calls
from kivi_server.clients import Client, Clients
from kivi_server.translate import Translator
from kivi_server.waiting import Waiting

from kivi.errors import SnapshotTooOld, Unauthenticated
from kivi.live.hub import Hub
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.runtime.settings import COMPUTING
from kivi.store.facade import Lease, Store

if TYPE_CHECKING:
    from kivi_server.leading import Leading
    from kivi_server.session import Session

__all__ = ["Sessions", "disk_reads"]

_log = logging.getLogger("kivi.server")
_WORKERS: Final = 4
_PAGES_AHEAD: Final = 32
"""Pages of scans that are in memory before they are asked for: of 16,384 rows, or of some 4 MiB, each."""
_QUICK_S_MAX: Final = 0.005
_STUCK_S_MAX: Final = 0.05
_SLOW_S: Final = 1.0
"""No frame is handled on the event loop for so long after one took longer than the first and read from a disk, or
longer than the second. What takes long otherwise waits for a processor or the interpreter's lock, and would wait more
often as a worker's: beside an append stream a read of 12 slots takes 2.2 ms here and 2.7 there (median), 7.8 and 8.6
at most (of 99 in 100)."""
_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)
_UNCOUNTED: Final = itertools.count()


def disk_reads() -> int:
    """How often the calling thread has waited for a disk; where the system does not count that, more each time."""
    if _THREAD is None:
        return next(_UNCOUNTED)
    used = resource.getrusage(_THREAD)
    return used.ru_inblock + used.ru_majflt


class Sessions:
    """All sessions of a server, the workers they share, and what is still to be answered."""

    def __init__(
        self, store: Store, version: str, allowance: Allowance | None = None, *, slow_call_s: float = 1.0
    ) -> None:
        self.store = store
        self.clients = Clients(allowance or Allowance())
        self.translator = Translator(store)
        self.hub = Hub(store)
        self.version = version
        self.instance = secrets.token_hex(8)
        self.limits = limits.message(store.settings)
        self.calls = Calls(slow_call_s)
        self.live: dict[bytes, Session] = {}
        self.shared: dict[bytes, tuple[Lease, Client]] = {}
        self.stopping = False
        self.requests = 0
        self.frames_in = 0
        self.frames_out = 0
        self.dropped = 0
        self.leading: Leading | None = None  # comes with the first session, of whose event loop it is
        self._commits = 0
        self._mutex = threading.Lock()
        self.reads = ThreadPoolExecutor(8, "kivi-reads")
        self.pages_ahead = threading.Semaphore(_PAGES_AHEAD)
        # Scan streams and what decodes and derives compute all the time. With eight threads of each on two cores, 48
        # scans that began at once made a bystander eleven times as slow, and 50 appends fourteen times.
        self.streams = ThreadPoolExecutor(COMPUTING, "kivi-streams", initializer=use_batch_scheduling)
        self.writes = ThreadPoolExecutor(COMPUTING, "kivi-writes", initializer=use_batch_scheduling)
        self.full = ThreadPoolExecutor(8, "kivi-full")
        self.outcomes = ThreadPoolExecutor(16, "kivi-outcomes")
        self.waiting = Waiting(store, lambda: self.stopping)
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._turn = 0
        self._slow_until = 0.0
        for i in range(_WORKERS):
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            threading.Thread(target=self._work, args=(jobs,), name=f"kivi-worker-{i}", daemon=True).start()

    def _work(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("a session's frame failed")

    def is_quick(self) -> bool:
        """Whether small frames may be handled on the event loop: not for a while after one of them took long."""
        return time.monotonic() >= self._slow_until

    def took(self, seconds: float, reads: int) -> None:
        """A frame was handled on the event loop. ``reads``: by how much ``disk_reads`` has grown."""
        if seconds > (_QUICK_S_MAX if reads else _STUCK_S_MAX):
            self._slow_until = time.monotonic() + _SLOW_S

    def next_queue(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        self._turn += 1
        return self._queues[self._turn % len(self._queues)]

    def commit_started(self, count: int = 1) -> None:
        with self._mutex:
            self._commits += count

    def commit_ended(self, count: int = 1) -> None:
        with self._mutex:
            self._commits -= count

    @property
    def commits_in_flight(self) -> int:
        return self._commits

    def share(self, lease: Lease, client: Client) -> bytes:
        """A name, not to be guessed, under which any session may use the lease."""
        self.prune()
        name = secrets.token_bytes(16)
        self.shared[name] = lease, client
        return name

    def prune(self) -> None:
        """Forgets shared leases that have ended."""
        if len(self.shared) > 1_000 and len(self.shared) % 256 == 0:
            for name, (lease, _) in list(self.shared.items()):
                if lease.ended:
                    self.shared.pop(name, None)

    def find_shared(self, name: bytes) -> Lease:
        found = self.shared.get(name)
        if found is None:
            raise SnapshotTooOld("this shared snapshot has been released, or the server was restarted: begin again")
        return found[0]

    def check_snapshots(self, client: Client, more: int = 1) -> None:
        """Raises ResourceExhausted if that would be more than the client may have open."""
        if client.allowance.snapshots is None:
            return
        held = sum(
            not transaction.shared
            for session in list(self.live.values())
            if session.client is client
            for transaction in list(session.txns.values())
            if transaction.lease is not None
        )
        held += sum(by is client and not lease.ended for lease, by in list(self.shared.values()))
        client.check_snapshots(held, more)

    def regrant(self, tokens: Tokens) -> None:
        """The tokens are others: sessions go on with what theirs may do now, or end."""
        for session in list(self.live.values()):
            grant = tokens.now(session.access)
            if grant is None:
                session.drop(Unauthenticated("this access token is not valid any more"))
            elif grant != session.access:
                session.access, session.client = grant, self.clients.of(grant, session.client.name)

    def stats(self) -> dict[str, int | float]:
        return {
            "server_sessions": len(self.live),
            "subscriptions": self.hub.count,
            "subscription_updates": self.hub.told,
            "subscription_ticks": self.hub.ticks,
            "subscription_tick_s": self.hub.tick_s,
            "subscription_lag": max(0, self.store.watermark() - self.hub.ts) if self.hub.count else 0,
            "server_open_transactions": sum(len(session.txns) for session in list(self.live.values())),
            "server_shared_snapshots": len(self.shared),
            "server_requests": self.requests,
            "server_frames_in": self.frames_in,
            "server_frames_out": self.frames_out,
            "server_sessions_dropped": self.dropped,
            "server_commits_in_flight": self._commits,
        }

    async def drained(self, grace_s: float) -> bool:
        """True once no commit is in flight and every reply has been handed to gRPC."""
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            if not self._commits and not any(session.out or session.writing for session in self.live.values()):
                return True
            await asyncio.sleep(0.01)
        return False

    def close(self) -> None:
        self.hub.stop()
        self.waiting.close()
        for jobs in self._queues:
            jobs.put(None)
        for pool in (self.reads, self.streams, self.writes, self.full, self.outcomes):
            pool.shutdown(wait=True, cancel_futures=True)
