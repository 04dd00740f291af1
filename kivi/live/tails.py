"""Reading on for subscribers of events that are behind: page by page, from the table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa

from kivi.arrow.columns import stored_rows
from kivi.errors import EventsRetracted, SnapshotTooOld
from kivi.live.lives import EventsLive
from kivi.model.changes import COMMIT_TS, RETRACTED, Changes
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Row, Shown, Update
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store
from kivi.store.reads import skipped

__all__ = ["Tails"]

_PAGE_ROWS: Final = 5_000


class Tails:
    """``lock`` is the hub's, under which ``hub_ts`` is the snapshot that it is at. One call at a time for each live."""

    def __init__(self, store: Store, lock: threading.RLock, hub_ts: Callable[[], int]) -> None:
        self._store, self._lock, self._hub_ts = store, lock, hub_ts

    def page(self, live: EventsLive) -> Update | None:
        """The next page of events that it has not been told. None: it may have caught up, or begins again."""
        if live.reading is None:
            with self._lock:
                if live.kept_from is None:  # what commits bring from this snapshot on is kept
                    live.kept_from = self._hub_ts()
        if live.reading is not None and live.end_ts is not None and live.reading[0].ts > live.end_ts:
            live.release(self._store.snapshots.release)  # it must not read beyond its end
        if live.reading is None:
            self._open(live)
        lease, batches, shown = live.reading
        rows: list[Row] = []
        try:
            self._store.leases.renew(lease)
            for batch in batches:
                rows += stored_rows(batch)
                if len(rows) >= _PAGE_ROWS:
                    break
            else:
                return self._caught_up(live, lease, rows, shown)
        except SnapshotTooOld:  # the subscriber took its time: from where it is
            live.release(self._store.snapshots.release)
            return None
        reset, live.reset = live.reset, False
        last = rows[-1][COMMIT_TS]
        if rows[0][COMMIT_TS] < last or not live.skip:
            live.skip = 0
            live.ts = max(live.ts, last - 1)
        live.skip += sum(row[COMMIT_TS] == last for row in rows)
        live.counted_at = lease.ts
        return Update(live.ts, _changes(rows), reset=reset, skip=live.skip, shown=shown)

    def _open(self, live: EventsLive) -> None:
        lease = self._store.snapshots.begin(as_of_ts=live.end_ts)
        try:
            schema = self._store.table(live.table, lease)
            if schema.id != live.generation:
                raise SnapshotTooOld(f"table {schema.name!r} was overwritten: subscribe again", table=schema.name)
            if live.skip:
                self._check_counted(live, lease, schema)
            with self._lock:
                known, query = live.schema, live.query
            if schema != known:  # the hub comes to an alteration before this snapshot later, or came to one behind it
                query = live.bind(schema)
            scan = replace(query.scan, columns=live.read_of(schema, query))

            def tail(partial: bool) -> Iterator[pa.RecordBatch]:
                changes = Changes(live.ts, commit_ts=True, partial=partial, retractions=live.retractions)
                return self._store.scan(lease, schema, replace(scan, changes=changes))

            try:
                batches = tail(live.partial)
            except SnapshotTooOld as error:
                if "kept_since" not in error.details:
                    raise
                live.reset, live.skip = True, 0  # some of what it has not been told is gone
                batches = tail(True)
            live.partial = False
            live.reading = lease, skipped(batches, live.skip), Shown(schema, query.columns)
        except BaseException:
            self._store.snapshots.release(lease)
            raise

    def _check_counted(self, live: EventsLive, lease: Lease, schema: TableSchema) -> None:
        """Raises EventsRetracted if events of the commit that it was told a part of may be gone since then: nothing
        tells any more which part that was."""
        commit = live.ts + 1
        for cts, first, last in self._store.changes.retractions(schema, lease.ts):
            if cts > live.counted_at and first <= commit <= last:
                raise EventsRetracted(
                    f"events of the commit at {commit} to {schema.name!r}, of which this subscriber was told a part, "
                    f"may have been retracted by the commit at {cts}: subscribe again, since {commit}, or since "
                    f"{live.ts} to be told all of them that are left",
                    table=schema.name,
                    since=live.ts,
                    retracted_at=cts,
                )

    def _caught_up(self, live: EventsLive, lease: Lease, rows: list[Row], shown: Shown) -> Update | None:
        """The tail is read up to the lease's snapshot: what follows is in what was kept."""
        with self._lock:
            end = live.end_ts
            kept_on = live.kept_from is not None
            live.release(self._store.snapshots.release)
            live.ts, live.skip = max(live.ts, lease.ts), 0
            if kept_on or end is not None:
                while live.kept and live.kept[0][0] <= live.ts:
                    live.kept_rows -= len(live.kept.popleft()[1])
                live.behind = False
            reset, live.reset = live.reset, False
            if not rows and not reset:
                return None
            return Update(live.ts, _changes(rows), reset=reset, shown=shown)


def _changes(rows: list[Row]) -> list[Change]:
    return [Change("remove" if row.pop(RETRACTED, False) else "add", None, None, row) for row in rows]
