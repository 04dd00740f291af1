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
from kivi.live.partials import TABLE_BYTES, Partials, deltas_of
from kivi.live.reading import event_key, floor_of, promising, read_window, types_of
from kivi.live.rollups import moved, rolled_again, rolled_on
from kivi.live.shared import ATTEMPTS, Shared, key_of
from kivi.live.windows import Window
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, all_of, between
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query, Row
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.feed import Committed
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store
from kivi.store.shards import is_in

__all__ = ["Group", "Member", "RowGroup", "group_of", "made_again"]

_EVENTS: Final = 65_536
_NOTED_MAX: Final = 100_000
_MISSED_MAX: Final = 50_000
_MISSED_COMMITS: Final = 1_000
"""A window of a stream that is faster than its reading: of more than that it is read again."""


def _selecting(schema: TableSchema, query: Query) -> Expr | None:
    """The predicate with the key range, as far as it is one of single columns."""
    if query.scan.match is not None:  # of an event alone nobody knows: it reads the table
        return Expr("isin", schema.event_time or "", ())
    prefix = [Expr("==", column.name, value) for column, value in zip(schema.key, query.scan.prefix, strict=False)]
    times = between(schema.event_time or "", *query.scan.times) if schema.kind == "event" else None
    return all_of(query.where, *prefix, times)


def made_again(schema: TableSchema) -> NotFound:
    return NotFound(f"table {schema.name!r} was dropped and made again: subscribe again", table=schema.name)


Member = EventsLive | Shared
"""What a group keeps up: a query that subscriptions share, or one that is told events."""


class Group:
    """Not thread safe."""

    def __init__(self, store: Store, schema: TableSchema) -> None:
        self.store = store
        self.schema = schema
        self.lives: set[Live] = set()
        """Its subscriptions."""
        self.members: set[Member] = set()
        """What they ask for and the matcher knows."""
        self.shared: dict[bytes, Shared] = {}
        """The states that are asked for, by their queries; those that are read for the first time, too."""
        self._types = types_of(schema)
        self.matcher: Matcher[Member] = Matcher(self._types)
        self._holders: dict[bytes, set[Shared]] = {}
        """For each row that is in a current window: who holds it."""
        self.noting: set[Shared] = set()
        """Those of which a window is being read, or waits to be taken over: what changes meanwhile is noted."""
        self.stale: list[Shared] = []
        """Of which a window is to be read again; the hub empties it."""
        self._cover: Cover | None = None
        """The keys that its subscriptions want; None: it has to be made."""
        self._named: frozenset[str] | None = None
        """The columns that its subscriptions read; None: to be made."""
        self._rollups: list[Shared] | None = None
        """Its queries of rollups; None: to be made. Of all others a tick looks only at those that it touches."""

    # -- who belongs to it ------------------------------------------------------------------------------

    def enter(self, live: RowsLive, schema: TableSchema, query: Query) -> bool:
        """A subscription to a state. Whether it is the first to ask for that, and has to read it."""
        self.lives.add(live)
        key = key_of(query)
        shared = self.shared.get(key)
        if is_first := shared is None:
            shared = self.shared[key] = Shared(live.table, schema, query)
            self.begin(shared)
        live.attach(shared)
        return is_first

    def begin(self, shared: Shared) -> None:
        """From now on it is noted what changes for it: its window is about to be read.

        One that was read before and overtaken is nothing to take over: what changed since then is not known any more.
        """
        shared.fresh = None
        shared.miss(all_=False)
        self.noting.add(shared)
        self._cover = None

    def add(self, member: Member) -> None:
        """What is told of the hub's snapshot from now on."""
        self._cover = self._named = None
        self.members.add(member)
        self.matcher.add(member, _selecting(self.schema, member.query))

    def remove(self, live: Live) -> None:
        self.lives.discard(live)
        if isinstance(live, EventsLive):
            self._drop(live)
        elif isinstance(live, RowsLive):
            live.shared.lives.discard(live)
            if not live.shared.lives:
                self._drop(live.shared)

    def _drop(self, member: Member) -> None:
        self._cover = self._named = self._rollups = None
        if member in self.members:
            self.members.discard(member)
            self.matcher.remove(member)
        if isinstance(member, Shared):
            self._let_go(member)
            self.noting.discard(member)
            member.opened.set()  # whoever waits for it has another by now, or none
            if self.shared.get(member.key) is member:
                del self.shared[member.key]

    def _alone(self, member: Member) -> Matcher[Member]:
        matcher: Matcher[Member] = Matcher(types_of(self.schema))
        matcher.add(member, _selecting(self.schema, member.query))
        return matcher

    def _hold(self, shared: Shared) -> None:
        for key in shared.window.held():
            self._holders.setdefault(key, set()).add(shared)

    def _let_go(self, shared: Shared) -> None:
        """It is not current any more."""
        if shared.current:
            shared.current = False
            for key in shared.window.held():
                self._forget(key, shared)

    def _forget(self, key: bytes, shared: Shared) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(shared)
            if not holders:
                del self._holders[key]

    # -- a tick -------------------------------------------------------------------------------------------

    def advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Member]:
        """Brings its queries to the lease's snapshot; ``again``: commits may be missing. Those it touched.

        Raises what reading the table raises, and NotFound where it is another now.
        """
        schema = self.store.table(self.schema.name, lease)
        if schema.origin != self.schema.origin:
            raise made_again(schema)
        if schema is not self.schema and schema != self.schema:
            again = again or schema.id != self.schema.id or schema.altered_ts != self.schema.altered_ts
            again = self._redefine(schema) or again
        return self._advance(lease, commits, again)

    def _redefine(self, schema: TableSchema) -> bool:
        """Whether any query is another now."""
        overwritten, differ = schema.id != self.schema.id, False
        self.schema, self._cover, self._named, self._rollups = schema, None, None, None
        self._types = types_of(schema)
        self.matcher = Matcher(self._types)
        known, self.shared = self.shared, {}
        for shared in known.values():
            differ |= self._define(shared)
        for member in list(self.members):
            try:
                if isinstance(member, EventsLive):
                    member.define(schema)
                    if overwritten:
                        raise SnapshotTooOld(
                            f"table {schema.name!r} was overwritten: subscribe again", table=schema.name
                        )
                if member.query.scan.rollup is None:
                    self.matcher.add(member, _selecting(schema, member.query))
            except KiviError as error:
                self.failed(member, error)
        return differ

    def _define(self, shared: Shared) -> bool:
        """Queries that were equal may differ now, and become equal to others. Whether any is another."""
        before, taken = shared.query, False
        for live in tuple(shared.lives):
            try:
                query = live.bind(self.schema)
            except KiviError as error:
                live.failure = error
                self.remove(live)
                continue
            key = key_of(query)
            target = self.shared.get(key)
            if target is None and not taken:
                target, taken = shared, True
                shared.define(self.schema, query)
            elif target is None:
                target = Shared(shared.table, self.schema, query)
                target.attempts = 0
                target.opened.set()
                self.members.add(target)
                self.stale.append(target)
            self.shared[key] = target
            shared.lives.discard(live)
            live.attach(target)
        if not taken:
            self._drop(shared)
        return shared.query != before

    def _advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Member]:
        raise NotImplementedError

    def all_members(self) -> set[Member]:
        """Whatever any of its subscriptions asks for."""
        return self.members | {live for live in self.lives if isinstance(live, EventsLive)} | {*self.shared.values()}

    def fail_all(self, error: KiviError) -> list[Member]:
        """It cannot be brought up to date. Those that this ends."""
        return [self.failed(member, error) for member in self.all_members()]

    def _selected(
        self, matcher: Matcher[Member], columns: Columns, touched: set[Member]
    ) -> list[tuple[Member, list[int]]]:
        """Which queries select which rows. One whose predicate fails ends with its error, and is touched."""
        found = []
        for member, at in list(matcher.selected(columns)):
            if isinstance(at, OutOfRange):
                touched.add(self.failed(member, at))
            else:
                found.append((member, at))
        return found

    def failed(self, member: Member, error: KiviError) -> Member:
        member.failure = error
        for live in member.lives:
            live.failure = error
            self.lives.discard(live)
        self._drop(member)
        return member

    def _fresh_at(self, lease: Lease) -> list[Shared]:
        """Those of which a window was read, at the lease's snapshot or an earlier one: it is to be taken over."""
        found = [shared for shared in self.noting if shared.fresh is not None and shared.read_ts <= lease.ts]
        self.noting.difference_update(found)
        return found

    def _enter_current(self, shared: Shared, window: Window) -> None:
        shared.take_over(window)
        self._hold(shared)
        if shared not in self.members:
            self.add(shared)

    def _renew(self, shared: Shared, lease: Lease) -> None:
        """Its window cannot be brought to this snapshot: it is read again, by others than the tick.

        But where that has been overtaken too often, or somebody waits for the tick to subscribe, here.
        """
        self._let_go(shared)
        if shared.attempts < ATTEMPTS:
            shared.attempts += 1
            self.stale.append(shared)
            return
        try:
            self._enter_current(shared, read_window(self.store, lease, self.schema, shared.query))
        except KiviError as error:
            self.failed(shared, error)

    def _renew_all(self, lease: Lease) -> list[Member]:
        current = [member for member in self.members if isinstance(member, Shared) and member.current]
        for shared in current:
            self._renew(shared, lease)
        return [*current]

    def _settled(self, joined: Iterable[Shared], lease: Lease) -> None:
        """Those that were taken over in this tick are up to date, or begin again."""
        for shared in joined:
            if shared.failure is None and shared.current:
                if shared.window.short:
                    self._renew(shared, lease)
                if shared.current:
                    shared.attempts = 0


class RowGroup(Group):
    """The subscriptions of a row table or an aggregate."""

    def __init__(self, store: Store, schema: TableSchema) -> None:
        super().__init__(store, schema)
        self._noted: set[bytes] = set()
        """Rows to be read again."""
        self._floor = floor_of(store, schema, store.watermark()) if schema.forgets_rows else None

    def _is_rolled(self, member: Member) -> bool:
        return member.query.scan.rollup is not None

    def add(self, member: Member) -> None:
        if self._is_rolled(member):  # its rows are not the table's: no matcher selects them, and nobody holds them
            self._cover = self._rollups = None
            self.members.add(member)
        else:
            super().add(member)

    def _hold(self, shared: Shared) -> None:
        if not self._is_rolled(shared):
            super()._hold(shared)

    @property
    def can_note(self) -> bool:
        """Whether ``note`` is enough for a while."""
        return len(self._noted) < _NOTED_MAX

    def note(self, commits: Sequence[Committed]) -> None:
        """Commits that the next ``advance`` is not given."""
        self._noted |= self._changed(commits)
        self._add_deltas(commits)

    def _covered(self) -> Cover:
        if self._cover is None:
            self._cover = Cover(shared.range for shared in self.shared.values())
        return self._cover

    def _named_by_queries(self) -> frozenset[str]:
        if self._named is None:
            self._named = frozenset(name for member in self.members for name in member.query.read)
        return self._named

    def _advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Member]:
        changed, self._noted = self._noted, set()
        touched: set[Member] = set()
        if again:
            changed = set()
            touched.update(self._renew_all(lease))
        else:
            self._add_deltas(commits)  # before any window is read at this snapshot, which has them
            changed |= self._changed(commits) | self._forgotten(lease)
        for shared in self.noting:
            if again:
                shared.miss(all_=True)
            else:
                shared.missed |= changed
        joined = self._fresh_at(lease)
        for shared in joined:
            if shared.reread or len(shared.missed) > _MISSED_MAX or shared.fresh is None:
                self._renew(shared, lease)
            else:
                self._enter_current(shared, shared.fresh)
                changed |= shared.missed
                if shared.window.partials is not None:
                    shared.window.partials.read_again(shared.missed)
            shared.miss(all_=False)
        keys = sorted(changed)
        touched |= {shared for shared in self._rolled() if self._roll_up(keys, lease, shared)}
        touched |= self._update(keys, lease) if keys and len(self.matcher) else set()
        self._settled(joined, lease)
        self._bound()
        return [*touched, *joined]

    def _rolled(self) -> list[Shared]:
        """The rollups that are current."""
        if self._rollups is None:
            self._rollups = [m for m in self.members if isinstance(m, Shared) and self._is_rolled(m)]
        return [shared for shared in self._rollups if shared.current]

    def _partials(self) -> list[Partials]:
        return [partials for shared in self._rolled() if (partials := shared.window.partials) is not None]

    def _add_deltas(self, commits: Sequence[Committed]) -> None:
        """Tells partial results what commits added."""
        kept = self._partials() if commits else []
        if kept:
            run, others = deltas_of(self.schema, commits)
            for partials in kept:
                if run is not None:
                    partials.add(run)
                partials.read_again(others)

    def _roll_up(self, keys: list[bytes], lease: Lease, shared: Shared) -> bool:
        """Brings a rollup up to date, given the rows that changed. Whether it is touched."""
        known = True
        try:
            if moved(self.store, lease, self.schema, shared):
                known = False
            elif shared.window.partials is not None:
                known = rolled_on(self.store, lease, self.schema, shared)
            elif keys:
                known = rolled_again(self.store, lease, self.schema, shared, keys)
        except KiviError as error:
            self.failed(shared, error)
            return True
        if not known or shared.window.short:
            self._renew(shared, lease)
            return True
        return shared.window.changed

    def _bound(self) -> None:
        """Lets go of partial results, the largest first, where they take too much together."""
        kept = [shared.window for shared in self._rolled() if shared.window.partials is not None]
        sizes = {window: window.partials.nbytes for window in kept if window.partials is not None}
        total = sum(sizes.values())
        for window in sorted(kept, key=sizes.__getitem__, reverse=True):
            if total <= TABLE_BYTES or window.partials is None:
                break
            total -= sizes[window]
            window.let_go_of_partials()

    def _forgotten(self, lease: Lease) -> set[bytes]:
        """The rows that somebody holds and that a retention floor has taken away."""
        floor = floor_of(self.store, self.schema, lease.ts) if self.schema.forgets_rows else None
        if floor is None or floor == self._floor:
            return set()
        self._floor = floor
        for shared in self.noting:  # what they hold is not known yet
            shared.reread = True
        for shared in self._rolled():
            if shared.window.partials is None:
                self._renew(shared, lease)
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

    def _update(self, keys: list[bytes], lease: Lease) -> set[Member]:
        """Reads these rows and brings the windows up to date."""
        touched: set[Member] = set()
        try:
            for found in changed_rows(self.store, lease, self.schema, keys, self._named_by_queries()):
                touched |= self._put(found)
        except OutOfRange:  # a derived column: those who ask for it learn it from their own reading
            return touched | {*self._renew_all(lease)}
        for shared in touched:
            if isinstance(shared, Shared) and shared.current and shared.window.short:
                self._renew(shared, lease)
        return touched

    def _put(self, found: Changed) -> set[Member]:
        touched: set[Member] = set()
        keys, all_holders = found.keys, self._holders
        selected = [
            (member, within)
            for member, at in self._selected(self.matcher, found.columns, touched)
            if isinstance(member, Shared) and member.current and (within := self._within(member, found, at))
        ]
        rows = found.rows(sorted({i for _, at in selected for i in at}))
        selecting: dict[bytes, set[Shared]] = {}
        for shared, at in selected:
            touched.add(shared)
            window = shared.window
            for i in at:
                key = keys[i]
                try:
                    held = shared.failure is None and window.put(key, rows[i])
                except KiviError as error:
                    self.failed(shared, error)
                    held = False
                if held:
                    all_holders.setdefault(key, set()).add(shared)
                    selecting.setdefault(key, set()).add(shared)
                else:
                    self._forget(key, shared)
                while window.dropped:
                    self._forget(window.dropped.pop(), shared)
        for key in found.asked:  # whoever holds a row that its query does not select any more lets it go
            for shared in all_holders.get(key, set()) - selecting.get(key, set()):
                shared.window.remove(key)
                self._forget(key, shared)
                touched.add(shared)
        return touched

    def _within(self, shared: Shared, found: Changed, at: list[int]) -> list[int]:
        """The rows, of these, that are in its key range, and may be shown."""
        keys, window = found.keys, shared.window
        if (shards := shared.query.scan.shards) is not None:
            at = [i for i in at if is_in(self.schema, keys[i], shards)]
        if shared.query.scan.start is not None or shared.query.scan.end is not None:
            low, high = shared.range
            at = [i for i in at if (low is None or keys[i] >= low) and (high is None or keys[i] < high)]
        if window.last is not None and not shared.query.order:
            return at[: bisect_right(at, bisect_right(keys, window.last[-1]) - 1)]
        keep = promising(found.columns, window, shared.query, self._types)
        if keep is None:
            return at
        rows: list[int] = np.flatnonzero(keep).tolist() if len(at) == len(keys) else [i for i in at if keep[i]]
        return rows


class EventGroup(Group):
    """The subscriptions of an event table."""

    def __init__(self, store: Store, schema: TableSchema) -> None:
        super().__init__(store, schema)
        self._floor = floor_of(store, schema, store.watermark())

    def _advance(self, lease: Lease, commits: Sequence[Committed], again: bool) -> list[Member]:
        table = self.schema.id
        found = sorted((events for c in commits for of, events in c.events if of == table), key=attrgetter("last"))
        touched: list[Member] = []
        floor = floor_of(self.store, self.schema, lease.ts)
        retracted = any(of == table for c in commits for of, _ in c.retracted)
        windows_done = again or retracted or floor != self._floor
        of_events = list[EventsLive]()
        if again or retracted:  # those who have been told such an event learn it where they read on
            of_events = [member for member in self.members if isinstance(member, EventsLive)]
            for live in of_events:
                live.let_go()
        if windows_done:
            self._floor = floor
            touched += self._renew_all(lease)
        for shared in self.noting:
            shared.missed_events += found
            if windows_done or shared.reread or len(shared.missed_events) > _MISSED_COMMITS:
                shared.miss(all_=True)
        joined = self._fresh_at(lease)
        if again:
            touched += of_events
        else:
            for stamps, batch in _put_together(self.schema, found):
                touched += self._update(stamps, batch)
        for shared in joined:
            self._take_over(shared, lease)
        for member in touched:
            if isinstance(member, Shared) and member.current and member.window.short:
                self._renew(member, lease)
        self._settled(joined, lease)
        return [*touched, *joined]

    def _take_over(self, shared: Shared, lease: Lease) -> None:
        """Its window of before, and the events since then."""
        missed, reread = shared.missed_events, shared.reread
        shared.miss(all_=False)
        if reread or shared.fresh is None:
            self._renew(shared, lease)
            return
        self._enter_current(shared, shared.fresh)
        alone = self._alone(shared)
        later = [part for item in missed if (part := item.after(shared.read_ts)) is not None]
        for stamps, batch in _put_together(self.schema, later):
            self._update(stamps, batch, alone)

    def _update(self, stamps: list[int], batch: pa.RecordBatch, matcher: Matcher[Member] | None = None) -> set[Member]:
        by_member: dict[Member, list[int]] = {}
        touched: set[Member] = set()
        for member, at in self._selected(matcher or self.matcher, BatchColumns(batch), touched):
            if isinstance(member, EventsLive) or member.current:
                by_member.setdefault(member, []).extend(at)
        wanted = sorted({i for at in by_member.values() for i in at})
        if not wanted:
            return touched
        rows = dict(zip(wanted, stored_rows(plain(batch.take(pa.array(wanted)))), strict=True))
        for member, at in by_member.items():
            if isinstance(member, EventsLive):
                _keep(member, at, stamps, rows)
            else:
                self._show(member, at, stamps, rows)
        return touched | set(by_member)

    def _show(self, shared: Shared, at: list[int], stamps: list[int], rows: dict[int, Row]) -> None:
        last = place = 0
        try:
            for i in at:
                place = place + 1 if stamps[i] == last else 0
                last = stamps[i]
                shared.window.put(event_key(last, place), rows[i])
            shared.window.dropped.clear()
        except KiviError as error:
            self.failed(shared, error)

    def _hold(self, shared: Shared) -> None:
        """Events do not change: nobody looks for who holds one."""


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
