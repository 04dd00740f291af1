"""All sessions of a server: who is there, the pools they share, and what is still to be answered.

What a session is and in which order things happen is ``kivi_server.session``.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from kivi_server import limits
from kivi_server.auth import Allowance, Grant, Tokens
from kivi_server.calls import Calls
from kivi_server.clients import Client, Clients
from kivi_server.row_sizes import RowSizes
from kivi_server.scheduler import Scheduler
from kivi_server.sql.workers import Workers
from kivi_server.translate import Translator
from kivi_server.waiting import Waiting

from kivi.alerts import Alerts
from kivi.errors import KiviError, SnapshotTooOld, Unauthenticated
from kivi.live.hub import Hub
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.runtime.settings import COMPUTING
from kivi.sql import Limits
from kivi.store.facade import Lease, Store

__all__ = ["Sessions"]

_PAGES_AHEAD: Final = 32
"""Pages of scans that are in memory before they are asked for: of 16,384 rows, or of some 4 MiB, each."""


class OneSession(Protocol):
    """What all sessions together see of each: who it is, its open transactions, and whether answers wait in it."""

    access: Grant
    client: Client
    writing: bool

    @property
    def txns(self) -> Mapping[int, Any]: ...

    @property
    def out(self) -> Collection[Any]: ...

    def stalled(self) -> bool: ...

    def drop(self, why: KiviError) -> None: ...


class Sessions:
    """All sessions of a server, the pools they share, and what is still to be answered."""

    def __init__(
        self, store: Store, version: str, allowance: Allowance | None = None, *, slow_call_s: float = 1.0
    ) -> None:
        self.store = store
        self.clients = Clients(allowance or Allowance())
        self.translator = Translator(store)
        self.row_sizes = RowSizes()
        self.hub = Hub(store)
        self.alerts = Alerts(store)
        self.subscriptions_beside: Callable[[], int] | None = None
        """At which port of this machine those have a process of their own. Raises Unavailable where it starts."""
        self.version = version
        self.instance = secrets.token_hex(8)
        self.limits = limits.message(store.settings)
        self.calls = Calls(slow_call_s)
        self.live: dict[bytes, OneSession] = {}
        self.shared: dict[bytes, tuple[Lease, Client]] = {}
        self.stopping = False
        self.requests = 0
        self.frames_in = 0
        self.frames_out = 0
        self.dropped = 0
        self.http_computed = self.http_shared = 0
        """Answers over HTTP that were computed, and that were there, or being computed, already."""
        self.scheduler: Scheduler | None = None  # comes with the first session, of whose event loop it is
        self.commits_in_flight = 0
        self._mutex = threading.Lock()
        self.reads = ThreadPoolExecutor(8, "kivi-reads")
        self.pages_ahead = threading.Semaphore(_PAGES_AHEAD)
        # Scans and what decodes and derives compute all the time. With eight threads of each on two cores, 48
        # scans that began at once made a bystander eleven times as slow, and 50 appends fourteen times.
        self.scans = ThreadPoolExecutor(COMPUTING, "kivi-scans", initializer=use_batch_scheduling)
        # A question may look at all events of a table: a short one waits for no more than one such.
        self.questions = ThreadPoolExecutor(COMPUTING + 1, "kivi-questions", initializer=use_batch_scheduling)
        self.writes = ThreadPoolExecutor(COMPUTING, "kivi-writes", initializer=use_batch_scheduling)
        self.full = ThreadPoolExecutor(8, "kivi-full")
        self.outcomes = ThreadPoolExecutor(16, "kivi-outcomes")
        self.openings = ThreadPoolExecutor(16, "kivi-openings")  # of durable subscriptions, which wait for a commit
        self.long = ThreadPoolExecutor(8, "kivi-long")  # administration, behind which no short call may wait
        # Threads here wait for processes, and read for them what they ask for; some more may wait for their turn. The
        # next pages of an answer have threads of their own, one for each process: those who wait for a process would
        # else keep away the one who has it.
        settings = store.settings
        self.workers = Workers(
            Limits(settings.sql_memory_bytes, max(1, settings.sql_threads), settings.sql_timeout_s, settings.sql_rows),
            settings.sql_processes,
        )
        processes = self.workers.most
        self.sql = ThreadPoolExecutor(processes + 8, "kivi-sql", initializer=use_batch_scheduling)
        self.sql_pages = ThreadPoolExecutor(processes, "kivi-sql-pages", initializer=use_batch_scheduling)
        self.waiting = Waiting(store, lambda: self.stopping)

    def commit_started(self, count: int = 1) -> None:
        with self._mutex:
            self.commits_in_flight += count

    def commit_ended(self, count: int = 1) -> None:
        with self._mutex:
            self.commits_in_flight -= count

    def share(self, lease: Lease, client: Client) -> bytes:
        """A name, not to be guessed, under which any session may use the lease."""
        if len(self.shared) > 1_000 and len(self.shared) % 256 == 0:
            for other, (shared, _) in list(self.shared.items()):
                if shared.ended:
                    self.shared.pop(other, None)
        name = secrets.token_bytes(16)
        self.shared[name] = lease, client
        return name

    def find_shared(self, name: bytes) -> Lease:
        """Raises SnapshotTooOld. In a cluster any node knows those that are pins, this one those as of the past."""
        found = self.shared.get(name)
        if found is None and (pinned := self.store.find_shared(name)) is not None:
            return pinned
        if found is None:
            raise SnapshotTooOld("this shared snapshot has been released, or the server was restarted: begin again")
        return found[0]

    def check_snapshots(self, client: Client) -> None:
        """Raises ResourceExhausted if the client may not have another one open."""
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
        client.check_snapshots(held)

    def regrant(self, tokens: Tokens) -> None:
        """The tokens are others: sessions go on with what theirs may do now, or end."""
        for session in list(self.live.values()):
            grant = tokens.now(session.access)
            if grant is None:
                session.drop(Unauthenticated("this access token is not valid any more"))
            elif grant.tenant != session.access.tenant:  # its snapshots are those of the one before
                session.drop(Unauthenticated("this access token is for other rows by now: connect again"))
            elif grant != session.access:
                session.access, session.client = grant, self.clients.of(grant, session.client.name)

    def stats(self) -> dict[str, int | float]:
        return {
            "server_sessions": len(self.live),
            "subscriptions": self.hub.count,
            "subscription_windows": self.hub.windows,
            "subscription_renewals": self.hub.renewals,
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
            "server_commits_in_flight": self.commits_in_flight,
            "server_http_computed": self.http_computed,
            "server_http_shared": self.http_shared,
            "server_sql_answered": self.workers.answered,
            "server_sql_killed": self.workers.killed,
            **self.alerts.stats(),
        }

    async def drained(self, grace_s: float) -> bool:
        """True once no commit is in flight and every reply has been handed to gRPC."""
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            if not self.commits_in_flight and not any(session.out or session.writing for session in self.live.values()):
                return True
            await asyncio.sleep(0.01)
        return False

    def close(self) -> None:
        self.alerts.stop()
        self.hub.stop()
        self.waiting.close()
        self.workers.close()
        questions = (self.questions, self.sql, self.sql_pages)
        waiting = (self.full, self.outcomes, self.openings, self.long)
        for pool in (self.reads, self.scans, *questions, self.writes, *waiting):
            pool.shutdown(wait=True, cancel_futures=True)
