"""Expiry: events whose moment has come are retracted by the store itself, in a thread of its own.

A table with ``expires="until"`` has a timestamp column that says when each event ends; null is never. Once that moment
is over, a commit of the store retracts the event (R22): from its CTS on, events, aggregates, questions and tails answer
as if it had never been, and snapshots below it see it, so that an answer stays a function of S. The events leave the
disk as retracted ones do.

**Invariant.** No event is gone before its moment, by the log's time: of a cluster's nodes none decides that by a clock
of its own, which may be a year ahead. An event whose moment is over is seen by snapshots up to the first
pass that finds it: a pass begins about every second, and rests twenty times as long as it took.

A pass looks for the moments in (the last pass, now], which headers of blocks and row groups prune, and for events that
were committed since the last pass when their moment was over already. The first pass of a process looks for all.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, Protocol

from kivi.errors import Conflict, KiviError, NotFound, ResourceExhausted
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, all_of
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Committer
from kivi.mvcc.leases import Lease
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.store.catalog import Catalog
from kivi.store.commits import Commits
from kivi.store.transaction import Txn

__all__ = ["Expiry"]

_log = logging.getLogger("kivi.store")
_EVERY_S: Final = 1.0
_REST: Final = 20.0
"""A thread that is busy with expiry takes a twentieth of a core."""


class Expiring(Protocol):
    """What it uses of a store."""

    catalog: Catalog
    commits: Commits
    committer: Committer

    def transaction(self, lease: Lease | None = None) -> Txn: ...


class Expiry:
    """``run`` may be called by any thread; one pass is made at a time."""

    def __init__(self, store: Expiring) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._passed: dict[int, tuple[int, int]] = {}
        """Of each table: up to which moment, and which commit, everything was looked for."""
        self.expired = 0
        """How many events, since the store was opened."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kivi-expiry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def run(self) -> int:
        """Retracts what has expired, of every table, now; how many events.

        Raises what a retraction raises: the first there was, after all other tables had their turn.
        """
        count, failures = 0, list[KiviError]()
        with self._mutex:
            for schema in self._tables():
                if self._stop.is_set():
                    break
                try:
                    count += self._pass(schema)
                except (Conflict, NotFound):  # somebody else retracts, or it was dropped: the next pass finds the same
                    pass
                except KiviError as error:
                    failures.append(error)
        self.expired += count
        if failures:
            raise failures[0]
        return count

    def _tables(self) -> list[TableSchema]:
        tables = [schema for schema in self._store.catalog.visible.by_id.values() if schema.expires is not None]
        for gone in self._passed.keys() - {schema.id for schema in tables}:
            del self._passed[gone]
        return tables

    def _pass(self, schema: TableSchema) -> int:
        assert schema.expires is not None
        now_us = self._store.committer.now_us()
        passed = self._passed.get(schema.id)
        over = Expr("<=", schema.expires, now_us)
        parts: list[Expr | None] = [over]
        if passed is not None:
            moment, cts = passed
            parts = [
                all_of(Expr(">", schema.expires, moment), over),
                all_of(Expr("<=", schema.expires, moment), Expr(">", COMMIT_TS, cts)),
            ]
        txn = self._store.transaction()
        try:
            count = sum(txn.retract(schema, Scan(where=where)) for where in parts)
            if count:
                self._store.commits.commit_wait(txn)
        finally:
            seen = txn.lease.ts
            self._store.commits.rollback(txn)
        self._passed[schema.id] = now_us, seen
        return count

    def _work(self) -> None:
        use_batch_scheduling()
        pause, failing = _EVERY_S, False
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self.run()
                failing = False
            except KiviError as error:
                if not failing:
                    level = logging.INFO if isinstance(error, ResourceExhausted) else logging.WARNING
                    _log.log(level, "events that have expired are still there: %s", error)
                failing = True
            pause = max(_EVERY_S, _REST * (time.monotonic() - began))
