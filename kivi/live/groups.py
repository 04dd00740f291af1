"""Groups: the live subscriptions of one table, and what a tick does to them.

``advance`` brings every window of the group to the snapshot of a lease: changed rows are read once for all
subscriptions, by key, a thousand at a time; events come with their commits. What the matcher selects is put into
windows, what it does not select any more is taken out of those that hold it (``_holders``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import padded, stored_rows
from kivi.arrow.dictionaries import plain, together
from kivi.encoding.key_slots import KeySlot
from kivi.errors import KiviError, NotFound, OutOfRange, SnapshotTooOld
from kivi.live.changed import Changed, changed_rows
from kivi.live.covering import Cover
from kivi.live.lives import EventsLive, Live, RowsLive
from kivi.live.matching import BatchColumns, Columns, Matcher
from kivi.live.reading import event_key, floor_of, promising, read_window, types_of
from kivi.live.rollups import rolled_again
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, all_of, between
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query, Row
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.feed import Committed
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store
from kivi.store.shards import is_in

__all__ = ["Group", "RowGroup", "group_of", "made_again"]

_EVERYTHING: Final = Cover([(None, None)])

_EVENTS: Final = 65_536
_NOTED_MAX: Final = 100_000
_MISSED_COMMITS: Final = 1_000
"""A subscription that joins a stream which is faster than its own reading reads the rest while the hub waits."""


def _selecting(schema: TableSchema, query: Query) -> Expr | None:
    """The predicate with the key range, as far as it is one of single columns."""
    if query.scan.match is not None:  # of an event alone nobody knows: it reads the table
        return Expr("isin", schema.event_time or "", ())
    prefix = [Expr("==", column.name, value) for column, value in zip(schema.key, query.scan.prefix, strict=False)]
    times = between(schema.event_time or "", *query.scan.times) if schema.kind == "event" else None
    return all_of(query.where, *prefix, times)


def made_again(schema: TableSchema) -> NotFound:
    return NotFound(f"table {schema.name!r} was dropped and made again: subscribe again", table=schema.name)


class Group:
    """Not thread safe."""

    def __init__(self, store: Store, schema: TableSchema) -> None:
        self.store = store
        self.schema = schema
        self.lives: set[Live] = set()
        self._types = types_of(schema)
        self.matcher: Matcher[Live] = Matcher(self._types)
        self._holders: dict[bytes, set[RowsLive]] = {}
        """For each row that is in a window: the subscriptions that hold it."""
        self.joining: set[Live] = set()
        self._cover: Cover | None = None
        """The keys that its subscriptions want; None: it has to be made."""
        self._named: frozenset[str] | None = None
        """The columns that its subscriptions read; None: to be made."""

    # -- who belongs to it ------------------------------------------------------------------------------

    def add(self, live: Live) -> None:
        """A subscription whose window is that of the hub's snapshot."""
        self._cover = self._named = None
        self.lives.add(live)
        self.matcher.add(live, _selecting(self.schema, live.query))
        if isinstance(live, RowsLive):
            self._hold(live)

    def remove(self, live: Live) -> None:
        self._cover = self._named = None
        self.joining.discard(live)
        if live in self.lives:
            self.lives.discard(live)
            self.matcher.remove(live)
            if isinstance(live, RowsLive):
                self._let_go(live)

    def _alone(self, live: Live) -> Matcher[Live]:
        matcher: Matcher[Live] = Matcher(types_of(self.schema))
        matcher.add(live, _selecting(self.schema, live.query))
        return matcher

    def _hold(self, live: RowsLive) -> None:
        for key in live.window.held():
            self._holders.setdefault(key, set()).add(live)

    def _let_go(self, live: RowsLive) -> None:
        for key in live.window.held():
            self._forget(key, live)

    def _forget(self, key: bytes, live: RowsLive) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(live)
            if not holders:
                del self._holders[key]

    # -- a tick -------------------------------------------------------------------------------------------

    def advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Live]:
        """Brings its subscriptions to the lease's snapshot; ``again``: commits may be missing. Those it touched.

        Raises what reading the table raises, and NotFound where it is another now.
        """
        schema = self.store.table(self.schema.name, lease)
        if schema.origin != self.schema.origin:
            raise made_again(schema)
        if schema is not self.schema and schema != self.schema:
            again = again or schema.id != self.schema.id or schema.altered_ts != self.schema.altered_ts
            self._redefine(schema)
        return self._advance(lease, commits, again)

    def _redefine(self, schema: TableSchema) -> None:
        overwritten = schema.id != self.schema.id
        self.schema, self._cover, self._named = schema, None, None
        self._types = types_of(schema)
        self.matcher = Matcher(self._types)
        for live in list(self.lives):
            try:
                live.define(schema)
                self.matcher.add(live, _selecting(schema, live.query))
                if overwritten and isinstance(live, EventsLive):
                    raise SnapshotTooOld(f"table {schema.name!r} was overwritten: subscribe again", table=schema.name)
            except KiviError as error:
                self.failed(live, error)

    def _advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Live]:
        raise NotImplementedError

    def join(self, live: Live, lease: Lease) -> None:
        """Its window is of an earlier snapshot; what changed since is in ``missed``. Raises what reading raises."""
        raise NotImplementedError

    def fail_all(self, error: KiviError) -> list[Live]:
        """It cannot be brought up to date. Those that this ends."""
        return [self.failed(live, error) for live in (*self.lives, *self.joining)]

    def _selected(self, matcher: Matcher[Live], columns: Columns, touched: set[Live]) -> list[tuple[Live, list[int]]]:
        """Which subscriptions select which rows. One whose predicate fails ends with its error, and is touched."""
        found = []
        for live, at in list(matcher.selected(columns)):
            if isinstance(at, OutOfRange):
                touched.add(self.failed(live, at))
            else:
                found.append((live, at))
        return found

    def failed(self, live: Live, error: KiviError) -> Live:
        live.failure = error
        self.remove(live)
        return live

    def _read_again(self, live: RowsLive, lease: Lease) -> None:
        self._let_go(live)
        try:
            window = read_window(self.store, lease, self.schema, live.query)
        except KiviError as error:
            self.failed(live, error)
            return
        live.window = window
        self._hold(live)

    def _read_all(self, lease: Lease) -> list[Live]:
        of_rows = [live for live in self.lives if isinstance(live, RowsLive)]
        for live in of_rows:
            self._read_again(live, lease)
        return [*of_rows]


class RowGroup(Group):
    """The subscriptions of a row table or an aggregate."""

    def __init__(self, store: Store, schema: TableSchema) -> None:
        super().__init__(store, schema)
        self._noted: set[bytes] = set()
        """Rows to be read again."""
        self._floor = floor_of(store, schema, store.watermark()) if schema.forgets_rows else None

    def _is_rolled(self, live: Live) -> bool:
        return live.query.scan.rollup is not None

    def add(self, live: Live) -> None:
        if self._is_rolled(live):  # its rows are not the table's: no matcher selects them, and nobody holds them
            self._cover = None
            self.lives.add(live)
        else:
            super().add(live)

    def _hold(self, live: RowsLive) -> None:
        if not self._is_rolled(live):
            super()._hold(live)

    def _let_go(self, live: RowsLive) -> None:
        if not self._is_rolled(live):
            super()._let_go(live)

    @property
    def can_note(self) -> bool:
        """Whether ``note`` is enough for a while."""
        return len(self._noted) < _NOTED_MAX

    def note(self, commits: Iterable[Committed]) -> None:
        """Commits that the next ``advance`` is not given."""
        self._noted |= self._changed(commits)

    def _covered(self) -> Cover:
        """One that joins may not have its query yet: nothing is left out for as long."""
        if self.joining:
            return _EVERYTHING
        if self._cover is None:
            self._cover = Cover(live.range for live in self.lives if isinstance(live, RowsLive))
        return self._cover

    def _named_by_queries(self) -> frozenset[str]:
        if self._named is None:
            self._named = frozenset(name for live in self.lives for name in live.query.read)
        return self._named

    def _advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Live]:
        changed, self._noted = self._noted, set()
        if again:
            for live in self.joining:
                live.missed.clear()
                live.reread = True
            return self._read_all(lease)
        changed |= self._changed(commits) | self._forgotten(lease)
        if not changed:
            return []
        for live in self.joining:
            live.missed |= changed
        keys = sorted(changed)
        rolled = [live for live in self.lives if isinstance(live, RowsLive) and self._is_rolled(live)]
        touched = {live for live in rolled if self._roll_up(keys, lease, live)}
        return list(touched | self._update(keys, lease)) if len(self.matcher) else [*touched]

    def _roll_up(self, keys: list[bytes], lease: Lease, live: RowsLive) -> bool:
        """Brings a rollup up to date, given the rows that changed. Whether it is touched."""
        try:
            current = rolled_again(self.store, lease, self.schema, live, keys)
        except KiviError as error:
            self.failed(live, error)
            return True
        if not current or live.window.short:
            self._read_again(live, lease)
            return True
        return live.window.changed

    def _forgotten(self, lease: Lease) -> set[bytes]:
        """The rows that somebody holds and that a retention floor has taken away."""
        floor = floor_of(self.store, self.schema, lease.ts) if self.schema.forgets_rows else None
        if floor is None or floor == self._floor:
            return set()
        self._floor = floor
        for live in self.joining:  # what they hold is not known yet
            live.reread = True
        for live in self.lives:
            if isinstance(live, RowsLive) and self._is_rolled(live):
                self._read_again(live, lease)
        slot = KeySlot.of(self.schema)
        return {key for key in self._holders if slot.is_below(key, floor)}

    def _changed(self, commits: Iterable[Committed]) -> set[bytes]:
        """The rows that changed and that somebody may hold or want."""
        table, cover = self.schema.id, self._covered()
        changed: set[bytes] = set()
        rows: set[bytes] = set()
        for commit in commits:
            rows.update(key for _, of, key, _ in commit.rows if of == table)
            for of, run in commit.runs:
                if of == table:
                    changed.update(cover.keys(run))
        changed |= rows if cover.everything else {key for key in rows if key in cover}
        return changed

    def _update(self, keys: list[bytes], lease: Lease, only: RowsLive | None = None) -> set[Live]:
        """Reads these rows and brings the windows up to date: all of them, or one that joins."""
        touched: set[Live] = set()
        try:
            named = self._named_by_queries() if only is None else only.query.read
            for found in changed_rows(self.store, lease, self.schema, keys, named):
                touched |= self._put(found, only)
        except OutOfRange:  # a derived column: those who ask for it learn it from their own reading
            if only is None:
                return touched | set(self._read_all(lease))
            self._read_again(only, lease)
            return {only}
        for live in list(touched):
            if isinstance(live, RowsLive) and live.window.short:
                self._read_again(live, lease)
        return touched

    def _put(self, found: Changed, only: RowsLive | None) -> set[Live]:
        matcher = self.matcher if only is None else self._alone(only)
        touched: set[Live] = set()
        keys, all_holders = found.keys, self._holders
        selected = [
            (live, within)
            for live, at in self._selected(matcher, found.columns, touched)
            if (within := self._within(live, found, at))
        ]
        rows = found.rows(sorted({i for _, at in selected for i in at}))
        selecting: dict[bytes, set[Live]] = {}
        for live, at in selected:
            assert isinstance(live, RowsLive)
            touched.add(live)
            window = live.window
            for i in at:
                key = keys[i]
                try:
                    held = live.failure is None and window.put(key, rows[i])
                except KiviError as error:
                    self.failed(live, error)
                    held = False
                if held:
                    all_holders.setdefault(key, set()).add(live)
                    selecting.setdefault(key, set()).add(live)
                else:
                    self._forget(key, live)
                while window.dropped:
                    self._forget(window.dropped.pop(), live)
        for key in found.asked:  # whoever holds a row that its query does not select any more lets it go
            for live in all_holders.get(key, set()) - selecting.get(key, set()):
                if only is None or live is only:
                    live.window.remove(key)
                    self._forget(key, live)
                    touched.add(live)
        return touched

    def _within(self, live: Live, found: Changed, at: list[int]) -> list[int]:
        """The rows, of these, that are in its key range, and may be shown."""
        assert isinstance(live, RowsLive)
        keys, window = found.keys, live.window
        if (shards := live.query.scan.shards) is not None:
            at = [i for i in at if is_in(self.schema, keys[i], shards)]
        if live.query.scan.start is not None or live.query.scan.end is not None:
            low, high = live.range
            at = [i for i in at if (low is None or keys[i] >= low) and (high is None or keys[i] < high)]
        if window.last is not None and not live.query.order:
            return at[: bisect_right(at, bisect_right(keys, window.last[-1]) - 1)]
        keep = promising(found.columns, window, live.query, self._types)
        if keep is None:
            return at
        rows: list[int] = np.flatnonzero(keep).tolist() if len(at) == len(keys) else [i for i in at if keep[i]]
        return rows

    def join(self, live: Live, lease: Lease) -> None:
        assert isinstance(live, RowsLive)
        missed, live.missed = live.missed, set()
        self._hold(live)
        try:
            if live.reread:
                self._read_again(live, lease)
            elif missed and self._is_rolled(live):
                self._roll_up(sorted(missed), lease, live)
            elif missed:
                self._update(sorted(missed), lease, live)
            if live.failure is None:
                self.add(live)
        finally:
            if live not in self.lives:
                self._let_go(live)


class EventGroup(Group):
    """The subscriptions of an event table."""

    def __init__(self, store: Store, schema: TableSchema) -> None:
        super().__init__(store, schema)
        self._floor = floor_of(store, schema, store.watermark())

    def _advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Live]:
        table = self.schema.id
        found = sorted((events for c in commits for of, events in c.events if of == table), key=attrgetter("last"))
        for live in self.joining:
            live.missed_events += found
            live.reread = live.reread or again or len(live.missed_events) > _MISSED_COMMITS
            if live.reread:
                live.missed_events.clear()
        touched: list[Live] = []
        floor = floor_of(self.store, self.schema, lease.ts)
        retracted = any(of == table for c in commits for of, _ in c.retracted)
        if retracted:  # those who have been told such an event learn it where they read on
            for live in self.lives:
                if isinstance(live, EventsLive):
                    live.let_go()
        windows_done = again or retracted or floor != self._floor
        if windows_done:
            self._floor = floor
            for live in self.joining:
                live.reread = True
            touched += self._read_all(lease)
        if again:
            of_events = [live for live in self.lives if isinstance(live, EventsLive)]
            for live in of_events:
                live.let_go()
            return [*touched, *of_events]
        for stamps, batch in _put_together(self.schema, found):
            touched += self._update(stamps, batch, windows_done)
        for live in touched:
            if isinstance(live, RowsLive) and live.failure is None and live.window.short:
                self._read_again(live, lease)
        return touched

    def _update(
        self, stamps: list[int], batch: pa.RecordBatch, windows_done: bool, matcher: Matcher[Live] | None = None
    ) -> set[Live]:
        by_live: dict[Live, list[int]] = {}
        touched: set[Live] = set()
        for live, at in self._selected(matcher or self.matcher, BatchColumns(batch), touched):
            by_live.setdefault(live, []).extend(at)
        wanted = sorted({i for at in by_live.values() for i in at})
        if not wanted:
            return touched
        rows = dict(zip(wanted, stored_rows(plain(batch.take(pa.array(wanted)))), strict=True))
        for live, at in by_live.items():
            if isinstance(live, EventsLive):
                _keep(live, at, stamps, rows)
            elif not windows_done:
                self._show(live, at, stamps, rows)
        return touched | set(by_live)

    def _show(self, live: Live, at: list[int], stamps: list[int], rows: dict[int, Row]) -> None:
        assert isinstance(live, RowsLive)
        last = place = 0
        try:
            for i in at:
                place = place + 1 if stamps[i] == last else 0
                last = stamps[i]
                live.window.put(event_key(last, place), rows[i])
            live.window.dropped.clear()
        except KiviError as error:
            self.failed(live, error)

    def _hold(self, live: RowsLive) -> None:
        """Events do not change: nobody looks for who holds one."""

    def _let_go(self, live: RowsLive) -> None:
        pass

    def join(self, live: Live, lease: Lease) -> None:
        if isinstance(live, RowsLive):
            if live.reread:
                live.window = read_window(self.store, lease, self.schema, live.query)
            else:
                alone = self._alone(live)
                later = [part for item in live.missed_events if (part := item.after(live.read_ts)) is not None]
                for stamps, batch in _put_together(self.schema, later):
                    self._update(stamps, batch, False, alone)
        live.missed_events.clear()
        if live.failure is None:
            self.add(live)


def _keep(live: EventsLive, at: list[int], stamps: list[int], rows: dict[int, Row]) -> None:
    columns = live.columns
    for cts, together_at in itertools.groupby(at, stamps.__getitem__):
        live.keep(cts, [{**{name: rows[i][name] for name in columns}, COMMIT_TS: cts} for i in together_at])


def _put_together(schema: TableSchema, found: Sequence[PendingEvents]) -> Iterable[tuple[list[int], pa.RecordBatch]]:
    """Small commits' batches as one, with the timestamp of each event; a commit is not divided."""
    held: list[PendingEvents] = []
    rows = 0
    for i, item in enumerate(found):
        held.append(item)
        rows += item.batch.num_rows
        is_last_of_commit = i + 1 == len(found) or found[i + 1].last != item.last
        if is_last_of_commit and (rows >= _EVENTS or i + 1 == len(found)):
            stamps: list[int] = np.concatenate([part.cts_of_each() for part in held]).tolist()
            yield stamps, together([padded(part.batch, schema) for part in held])
            held, rows = [], 0


def group_of(store: Store, schema: TableSchema) -> Group:
    return EventGroup(store, schema) if schema.kind == "event" else RowGroup(store, schema)
