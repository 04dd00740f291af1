"""The hub: one thread that follows the commits of a store for all of its live subscriptions.

A tick takes a snapshot at the watermark and the feed's commits up to it, and brings every group there. Then those
subscribers are told something that are ready, have waited their interval, and have something to be told or have not
heard for a while. All intervals count from one origin: subscriptions of equal intervals, or of one and a multiple of
it, are told at the same snapshots, and a page can put their states together. So do heartbeats that are due once in each
interval: those of which nothing has changed are told so at the snapshots of the others.

A tick that took long is followed by a pause that is longer (``_SHARE``), so that keeping queries up never takes more
than a part of one core from those who commit; meanwhile changes come together. Where subscribers take an update a
second at most, say, a tick in between would read hot rows for nobody: all who have been told wait for one tick that
tells all of them, and where ticks are large a bit longer than they asked for (``_PATIENT_SHARE``). What the feed has no
room for meanwhile is noted: the rows to read. What that leaves to those who commit: decision 0022.

Subscribers ask: ``ask(live, then)`` calls ``then`` once, from a thread of the hub, with an update or the error that
ended it. What they have not asked for is not made.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pyarrow as pa

from kivi.errors import (
    InvalidArgument,
    KiviError,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SchemaError,
    SnapshotTooOld,
    Unavailable,
)
from kivi.live.connections import Connections
from kivi.live.durable import DurableSubscriptions
from kivi.live.groups import Group, Member, RowGroup, group_of, made_again
from kivi.live.lives import Bind, EventsLive, Live, RowsLive, Then
from kivi.live.matches import MatchesLive
from kivi.live.parts import Parts, roundest
from kivi.live.reading import read_window
from kivi.live.renewals import Renewals
from kivi.live.schedule import Schedule
from kivi.live.shared import NOTHING, Shared
from kivi.live.tails import Tails
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, asks_hierarchy
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query, Terms, Update
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store
from kivi.store.shards import asked_shards

__all__ = ["LIVES_MAX", "Hub"]

LIVES_MAX: Final = 100_000
_TICK_S: Final = 0.004
_SHARE: Final = 3.0
"""A pause is at least so many times as long as the tick before it computed, without what it waited for others."""
_PATIENT_SHARE: Final = 30.0
"""Likewise, as far as subscribers are patient: all have had their update and wait for their intervals. With what is
encoded, sent and read for it, a tick takes 1.8 times what its own thread computes."""
_PAUSE_S_MAX: Final = 2.0
_NAP_S: Final = 0.1
"""For so long it leaves alone what collects in the feed: whoever it wakes up beside stands still for it."""
_FIRST_BEAT: Final = 0.1
_BEAT: Final = 0.9
"""The least part of its heartbeat that a subscription waits for the first, and for each after that."""
_START_S: Final = 10.0
_log = logging.getLogger("kivi.live")


class Hub:
    """Thread safe. Its thread runs while there is a subscription."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._starting = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._asked: deque[tuple[Live, Then]] = deque()
        self._closed: deque[Live] = deque()
        self._sought: deque[tuple[RowsLive, int]] = deque()
        self._thread: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._stopping = False
        self._resting = False
        self._looked_at = 0.0
        """When it last had told everything that there was to tell."""
        self._hurried = threading.Event()
        """Somebody asked who has been told nothing yet."""
        self._lost = self._noted = 0
        """Up to which commit the feed has lost some; and up to which groups have noted what the feed had."""
        self.ts = 0
        """Every window is that of this snapshot."""
        self._lives: set[Live] = set()
        """All that are open. Changed under a lock, and copied without one, which is one step for the interpreter."""
        self._schedule = Schedule(self._lives)
        self._tails = Tails(store, self._lock, lambda: self.ts)
        self.durable = DurableSubscriptions(store)
        self._connections = Connections(self.durable)
        self._parts = Parts(self._schedule)
        self._renewals = Renewals(store, self._lock, self._renewed)
        self._held = store.shards.held
        self.ticks = self.told = 0
        self.tick_s = 0.0

    # -- for subscribers ------------------------------------------------------------------------------------

    def subscribe(self, table: str, bind: Bind, terms: Terms) -> Live:
        """Subscribes to a state, or to events. ``bind`` makes the query for the table's schema, now and later.

        Of a state, its first update is the difference to what the subscriber has, as far as that can still be read.
        Raises what reading the query raises, ResourceExhausted, Unavailable.
        """
        self._store.snapshots.hear_of(terms.since or 0)
        if terms.of_events:
            return self._events(table, bind, terms)
        if terms.durable is not None:
            raise InvalidArgument(
                "durable subscriptions are to events: of an event table, without order, limit, offset"
            )
        return self._rows(table, bind, terms)

    def _resolved(self, bind: Bind) -> Bind:
        """The query with the values that a hierarchy has when it is bound first, whatever its table gets afterwards:
        the matcher asks no snapshot."""
        known: list[Expr | None] = []

        def resolved(schema: TableSchema) -> Query:
            query = bind(schema)
            if not _asks_hierarchy(query):
                return query
            if not known:
                known.append(self._store.hierarchies.resolved_now(schema, query.where))
            return replace(query, scan=replace(query.scan, where=known[0]))

        return resolved

    def wait_for(self, min_snapshot: int) -> None:
        """Until the store has come to what a subscriber has seen, perhaps elsewhere (R17). Raises Unavailable."""
        if min_snapshot > self._store.watermark():
            self._store.release(self._store.begin(min_snapshot=min_snapshot))

    def _rows(self, table: str, asked: Bind, terms: Terms) -> RowsLive:
        live = RowsLive(table, self._resolved(asked), terms)
        since = terms.since
        if since is not None and (
            since > self._store.watermark()  # of another store, or of this one before a restore
            or _asks_hierarchy(asked(self._store.table(table)))  # of which state it was told of, nobody knows
        ):
            since = None
        with self._entered(live) as (group, is_first):
            if is_first:
                self._open(group, live.shared)
            else:
                live.shared.opened.wait()
            if since is not None:
                self._remember(live, since)
            self._join(group, live)
        return live

    def _open(self, group: Group, shared: Shared) -> None:
        """Reads a window for the first time, for whoever else asks for the same meanwhile, too."""
        try:
            self._renewals.read(shared)
        except BaseException as error:
            ended = error if isinstance(error, KiviError) else Unavailable("reading the result failed: subscribe again")
            with self._lock:
                group.failed(shared, ended)
            raise
        finally:
            shared.opened.set()

    def _remember(self, live: RowsLive, since: int) -> None:
        """Restores the state that the subscriber was told at ``since``; none if it cannot be read any more."""
        with self._lock:
            shared = live.shared
            if shared.current and shared.from_ts <= since <= self.ts:
                live.told = shared.shown()
                return
        with self._store.snapshots.opened(as_of_ts=since) as lease:
            try:
                schema = self._store.table(live.table, lease)
                live.told = read_window(self._store, lease, schema, live.bind(schema)).state()
            except (NotFound, OutOfRange, SchemaError, SnapshotTooOld):  # the table, or a column, was made after that
                live.told = NOTHING

    def _events(self, table: str, asked: Bind, terms: Terms) -> EventsLive:
        schema, bind = self._store.table(table), self._resolved(asked)
        wanted, since, skip = asked(schema), terms.since or 0, terms.skip
        match = wanted.scan.match
        if match is not None and _asks_hierarchy(wanted):  # of which, whoever comes back cannot say
            raise InvalidArgument(
                "to follow matches, where= asks no hierarchy, as one that changes changes matches that were told: name "
                "the values with isin(), and subscribe again when they are others"
            )
        if match is None or not match.keeps_together(schema.shard_by):  # else one node has all of a partition
            self._store.shards.check(schema, asked_shards(schema, bind(schema).scan))
        if since > self._store.watermark():
            raise InvalidArgument(f"since = {since} is past the watermark: nothing was committed there yet")
        if terms.durable is not None:
            stored = self.durable.open(terms.durable, schema, wanted, since)
            bind = self._resolved(lambda schema: self.durable.adopted(stored, asked(schema), schema))
            since, skip = max((stored.ts, stored.skip), (since, skip))
        live = (
            EventsLive(table, bind, terms, schema, bind(schema), since, skip)
            if match is None
            else MatchesLive(self._store, table, bind, terms, schema)
        )
        with self._entered(live) as (group, _):
            self._join(group, live)
            if terms.durable is not None:
                with self._lock:
                    before = self._connections.take_over(live, terms.durable)
                    if before is not None:
                        if before.table in self._groups:
                            self._groups[before.table].remove(before)
                        self._schedule.put(before, 0.0)
        return live

    def ask(self, live: Live, then: Then) -> None:
        """``then`` is called once, when there is something to tell. Ask again after that."""
        if not live.asked:
            self._hurried.set()
        self._asked.append((live, then))
        self._wake()
        if self._thread is None:  # it has ended, and cleared this before it answered the last time
            with self._lock:
                self._answer_ended()

    def seek(self, live: Live, ts: int) -> None:
        """Something is said of a part as soon as it has come to ``ts``, if its subscriber is ready."""
        if isinstance(live, RowsLive):
            self._sought.append((live, ts))
            self._hurried.set()
            self._wake()

    def close(self, live: Live) -> None:
        """Ends a subscription; what was asked for is not answered any more. Harmless twice."""
        if not live.closed:
            live.closed = True
            self._closed.append(live)
            self._wake()

    def _wake(self) -> None:
        """The thread looks whether there is work, which it does by itself before it rests."""
        if self._resting:
            self._store.moved.nudge()

    # -- coming and going -------------------------------------------------------------------------------------

    @contextmanager
    def _entered(self, live: Live) -> Iterator[tuple[Group, bool]]:
        """Its group, and whether it is the first there to ask for its state: from now on it is noted what changes.

        It is forgotten if it cannot join that.
        """
        self._store.check_open()
        known = self._store.table(live.table)
        query = live.bind(known) if isinstance(live, RowsLive) else live.query
        is_first = False
        try:
            with self._starting:
                if self._stopping:
                    raise Unavailable("the store is closed")
                if len(self._lives) >= LIVES_MAX:
                    raise ResourceExhausted(
                        f"{LIVES_MAX:,} subscriptions are open, which is the limit live_subscriptions_max",
                        limit="live_subscriptions_max",
                        maximum=LIVES_MAX,
                        retry_s=1.0,
                    )
                if self._thread is None:
                    self._start()
                self._lives.add(live)
            with self._lock:
                schema = self._store.table(live.table)
                group = self._groups.get(live.table)
                if group is not None and group.schema.origin != schema.origin:  # no tick has noticed yet
                    self._to_be_told(group.fail_all(made_again(schema)))
                    group = None
                if group is None:
                    group = self._groups[live.table] = group_of(self._store, schema)
                if isinstance(live, RowsLive):
                    is_first = group.enter(live, schema, query if schema == known else live.bind(schema))
                else:
                    group.lives.add(live)
            yield group, is_first
        except BaseException:
            with self._lock:
                self._forget(live)
            raise

    def _join(self, group: Group, live: Live) -> None:
        with self._lock:
            with self._store.snapshots.opened() as lease:
                self._tick(lease)
                if live.failure is not None:
                    raise live.failure
                if isinstance(live, EventsLive):
                    if live.schema != group.schema:  # altered since it was bound: no tick has told it
                        live.define(group.schema)
                    group.add(live)
                elif isinstance(live, RowsLive) and live.is_part:
                    self._parts.add(live)
            if isinstance(live, EventsLive):
                live.kept_from = self.ts

    def _start(self) -> None:
        """From here on the feed is complete above a snapshot that the hub has, and the thread runs."""
        feed = self._store.pending.feed
        feed.start()
        if not self._store.commits.wait_for_entered(_START_S):  # what was applied before is below the first snapshot
            feed.stop()
            raise Unavailable("commits before this moment are not finished yet: subscribe again")
        with self._lock:
            self.ts = self._store.watermark()
            feed.take(self.ts)
        self._looked_at = time.monotonic()
        self._readers = self._readers or ThreadPoolExecutor(2, "kivi-live-read")
        self._thread = threading.Thread(target=self._run, name="kivi-live", daemon=True)
        self._thread.start()

    def _idle(self) -> bool:
        """Whether nobody subscribes any more: the thread ends then, and the feed with it."""
        with self._starting:
            if self._lives or self._stopping:
                return False
            self._store.pending.feed.stop()
            self._thread = None
            return True

    @property
    def count(self) -> int:
        """How many subscriptions there are."""
        return len(self._lives)

    @property
    def windows(self) -> int:
        """How many states those have that are of rows: equal queries have one."""
        return sum(len(group.shared) for group in tuple(self._groups.values()))

    @property
    def renewals(self) -> int:
        """How many windows were read again."""
        return self._renewals.count

    def stop(self) -> None:
        """Ends all subscriptions, with Unavailable, and the thread."""
        with self._starting:
            self._stopping = True
        self._hurried.set()
        self._store.moved.nudge()
        if self._thread is not None:
            self._thread.join()
        self._renewals.stop()
        if self._readers is not None:
            self._readers.shutdown()

    def _forget(self, live: Live) -> None:
        group = self._groups.get(live.table)
        if group is not None and live in group.lives:
            group.remove(live)
        live.closed = True
        live.then = None
        self._lives.discard(live)
        self._parts.discard(live)
        if isinstance(live, EventsLive):
            self._connections.left(live)
            if not live.busy:
                live.release(self._store.snapshots.release)
        if group is not None and not group.lives:
            self._groups.pop(live.table, None)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # With its first array for NumPy pyarrow imports pandas, where that is installed: half a second, which would be
        # the first tick's, and three times that the pause after it.
        pa.array([0]).to_numpy(zero_copy_only=False)
        failure: KiviError | None = None
        while not self._stopping:
            began, worked = time.monotonic(), time.thread_time()
            try:
                self._store.check_open()
                self._hurried.clear()
                with self._lock:
                    self._take_calls()
                    self._tick()
                    now = time.monotonic()
                    self._tell(now)
                    self._looked_at = now
                if self._idle():
                    return
                self.tick_s += time.monotonic() - began
                self._pause(worked)
            except KiviError as error:
                failure = error
                break
            except Exception:
                _log.exception("live subscriptions stopped")
                failure = Unavailable("live subscriptions stopped by a fault of this program: subscribe again")
                break
            self._resting = True
            if not self._has_work():
                self._store.moved.wait_until(self._has_work, self._until_next())
                self._looked_at = time.monotonic()
            self._resting = False
        with self._starting, self._lock:
            self._end_all(failure or Unavailable("the store is closing: subscribe again"))

    def _pause(self, worked: float) -> None:
        """Longer where no subscriber would see it, but never so long that commits are lost for want of room.

        ``worked``: how much the thread had computed when the tick began.
        """
        began, feed = time.monotonic(), self._store.pending.feed
        patient = _patient_s(tuple(self._lives), began, _PATIENT_SHARE * (time.thread_time() - worked))
        while not self._stopping:
            if feed.fills and not self._digested():
                return
            least = max(_TICK_S, _SHARE * (time.thread_time() - worked))
            hurried = self._hurried.is_set()
            left = began + min(least if hurried else max(least, patient), _PAUSE_S_MAX) - time.monotonic()
            if left <= 0:
                return
            if hurried:
                time.sleep(min(left, _NAP_S))
            else:
                self._hurried.wait(min(left, _NAP_S))

    def _digested(self) -> bool:
        """Notes which rows the commits in the feed changed, for the next tick; False if that is not enough."""
        with self._lock:
            groups = [group for group in self._groups.values() if isinstance(group, RowGroup) and group.can_note]
            if len(groups) < len(self._groups):
                return False
            self._noted = self._store.watermark()
            commits, lost = self._store.pending.feed.take(self._noted)
            self._lost = max(self._lost, lost)
            for group in groups:
                group.note(commits)
        return True

    def _has_work(self) -> bool:
        moved = bool(self._groups) and self._store.watermark() > self.ts
        return moved or bool(self._asked or self._closed or self._sought or self._renewals.read_some) or self._stopping

    def _until_next(self) -> float:
        at = self._schedule.next_at
        return 1.0 if at is None else min(1.0, max(0.0, at - time.monotonic()))

    def _end_all(self, failure: KiviError) -> None:
        self._thread = None
        self._store.pending.feed.stop()
        self._take_calls()
        for live in tuple(self._lives):
            live.failure = live.failure or failure
            if live.then is not None:
                self._answer(live, live.failure, 0.0)
            if isinstance(live, EventsLive) and not live.busy:
                live.release(self._store.snapshots.release)
        self._lives.clear()
        self._groups.clear()
        self._answer_ended()

    def _answer_ended(self) -> None:
        for _ in range(len(self._asked)):
            live, then = self._asked.popleft()
            if live.failure is None:  # of the thread that has begun since
                self._asked.append((live, then))
            elif not live.closed:
                _call(then, live.failure)

    def _take_calls(self) -> None:
        while self._closed:
            live = self._closed.popleft()
            self._forget(live)
        now = time.monotonic()
        while self._sought:
            part, ts = self._sought.popleft()
            part.sought = max(part.sought, ts)
            self._parts.answer(part, self.ts, now)
        while self._asked:
            live, then = self._asked.popleft()
            if live.closed:
                continue
            live.then = then
            live.beat = self._beat_of(live, now)
            self._parts.answer(live, self.ts, now)
            at = min(max(now, live.due), live.beat) if live.dirty else live.beat
            self._schedule.put(live, min(at, self._end_at(live, now)))

    def _beat_of(self, live: Live, now: float) -> float:
        """When its next heartbeat is due: never all at the same time, for a message costs as much as a small commit.
        But one for each interval is due where the interval ends in which it was last told something, or when it may be
        told a change, if that is at most half an interval later than one after it was told something."""
        live.asked += 1
        if live.heartbeat_s == live.interval_s > 0.0:
            ended = math.floor(live.said_at / live.interval_s + 1) * live.interval_s
            return live.due if ended < live.due <= live.said_at + 1.5 * live.interval_s else ended
        if live.asked <= 2:  # the first answer is mostly what there is, and comes at once
            return now + live.heartbeat_s * random.uniform(_FIRST_BEAT, 1.0)
        spread = live.heartbeat_s * random.uniform(_BEAT, 1.0)
        return now + (max(spread, live.interval_s) if live.interval_s <= live.heartbeat_s else spread)

    def _begin_tick(self) -> Lease:
        """On the watermark; where there are parts, on a commit that other nodes stop at, too."""
        snapshots, newest = self._store.snapshots, self._store.watermark()
        if self._parts and newest > self.ts:
            at = self._store.pending.feed.first_at(max(roundest(self.ts, newest), self._noted))
            if at is not None and at < newest:
                lease = snapshots.begin(as_of_ts=at)
                if not lease.historical:
                    return lease
                snapshots.release(lease)
        return snapshots.begin()

    def _tick(self, at: Lease | None = None) -> None:
        """Every window to the newest snapshot, or that of a lease. Called with the lock."""
        newest = self._store.watermark() if at is None else at.ts
        if newest <= self.ts and not (self._lost or self._renewals.read_some):
            return
        lease, before = at or self._begin_tick(), self.ts
        try:
            commits, lost = self._store.pending.feed.take(lease.ts)
            self._lost = max(self._lost, lost)
            again = self._lost > self.ts
            touched: list[Member] = []
            commits.sort(key=lambda commit: commit.cts)
            if (held := self._store.shards.held) != self._held:
                touched += self._given_up()
                self._held = held
            for group in list(self._groups.values()):  # also without a commit: a retention floor has a timestamp too
                try:
                    touched += group.advance(lease, commits, again)
                except KiviError as error:
                    touched += group.fail_all(error)
            self.ts = lease.ts
            if self._lost <= self.ts:
                self._lost = 0
            self._renewals.ticked(self._groups.values())
        finally:
            if at is None:
                self._store.snapshots.release(lease)
        self.ticks += 1
        for member in touched:
            if isinstance(member, Shared) and member.current:
                member.from_ts = self.ts
        if self._parts:
            self._parts.ticked(before, self.ts, is_last=self._store.watermark() == self.ts)
        self._to_be_told(touched)

    def _to_be_told(self, members: Iterable[Member]) -> None:
        """Whoever is ready for it, when its interval is over."""
        for member in members:
            for live in member.lives:
                if live.then is not None and live.dirty:
                    self._schedule.put(live, live.due)

    def _given_up(self) -> Iterator[Member]:
        """Ends what needs shards that this node has given up: it goes on at a node that holds them."""
        for group in self._groups.values():
            for member in group.all_members():
                try:
                    self._store.shards.check(group.schema, asked_shards(group.schema, member.query.scan))
                except Unavailable as error:
                    yield group.failed(member, error)

    def _renewed(self, failed: Iterable[Member]) -> None:
        """A window was read again, or cannot be, which ends these."""
        with self._lock:
            self._to_be_told(failed)
        self._wake()

    # -- telling --------------------------------------------------------------------------------------------------

    def _tell(self, now: float) -> None:
        for live in self._schedule.due(now):  # each once: what it then waits for may be the next tick
            if live.then is None or live.closed:
                continue
            if live.failure is not None:
                self._answer(live, live.failure, now)
                continue
            if isinstance(live, EventsLive):
                if live.busy:
                    continue
                self._find_end(live)
            if live.waits or (live.dirty and now < live.due):  # it is not told yet, and has the state of before
                if now < live.beat:
                    self._schedule.put(live, live.beat if live.waits else min(live.due, live.beat))
                elif isinstance(live, RowsLive) and live.told is NOTHING:  # it has none
                    live.beat = now + live.heartbeat_s
                    self._schedule.put(live, live.beat)
                else:
                    self._answer(live, Update(live.ts, skip=live.skip), now)
            elif isinstance(live, EventsLive) and live.behind:
                live.busy = True
                assert self._readers is not None
                self._readers.submit(self._read_page, live)
            else:
                update = live.take(self.ts)
                if update.changes or update.ended or update.reset or now >= live.beat:
                    self._answer(live, update, now)
                else:
                    self._schedule.put(live, self._end_at(live, now))

    def _answer(self, live: Live, said: Update | KiviError, now: float) -> None:
        if isinstance(live, EventsLive) and isinstance(said, Update):
            if live.unseen and said.changes:
                said = replace(said, changes=self._connections.unseen(live, said.changes))
            if live.unseen and said.changes:
                live.given = max(change.row[COMMIT_TS] for change in said.changes if change.row is not None)
            live.handed = said.ts
        then, live.then = live.then, None
        behind = isinstance(live, EventsLive) and not isinstance(live, MatchesLive) and live.behind
        more = isinstance(live, EventsLive) and (behind or bool(live.kept))  # it has waited for long enough
        if isinstance(said, Update) and said.changes and not more:
            live.told_at(now, self._looked_at)
            self._parts.told(live, now)
        self.told += 1
        live.said_at = now
        if then is not None:
            _call(then, said)

    def _end_at(self, live: Live, now: float) -> float:
        """When to look at it again if nothing comes: for its heartbeat, or for its end."""
        if live.until_us is None:
            return live.beat
        return min(live.beat, now + max(0.0, (live.until_us - self._store.committer.now_us()) / 1e6))

    def _find_end(self, live: EventsLive) -> None:
        """Whether the moment is over after which it is told nothing more, and which commits are before that."""
        if live.until_us is None or live.end_ts is not None or self._store.committer.now_us() <= live.until_us:
            return
        try:
            lease = self._store.snapshots.begin(as_of_us=live.until_us, timeout_s=0.0)
        except SnapshotTooOld:  # long ago: all that was committed by now
            live.end_ts = self.ts
        except Unavailable:  # a commit of that moment is not finished
            return
        else:
            # An end that was past when it subscribed: what is there then, whenever it was committed.
            live.end_ts = max(lease.ts, live.kept_from or 0)
            self._store.snapshots.release(lease)

    def _read_page(self, live: EventsLive) -> None:
        """The next page of what it has not been told, from the table. In a thread of the readers."""
        said: Update | KiviError | None
        try:
            page = live.look if isinstance(live, MatchesLive) else functools.partial(self._tails.page, live)
            said = None if live.closed else page()  # others wait for this thread
        except KiviError as error:
            said = error
        except Exception:
            _log.exception("reading for a subscription")
            said = Unavailable("reading failed by a fault of this program: subscribe again")
        with self._lock:
            live.busy = False
            if live.closed or live not in self._lives:
                live.release(self._store.snapshots.release)
                return
            if isinstance(said, KiviError):
                live.failure = said
                live.release(self._store.snapshots.release)
            now = time.monotonic()
            if said is None and isinstance(live, MatchesLive):
                if now >= live.beat:
                    self._answer(live, Update(live.ts, skip=live.skip), now)
                else:
                    self._schedule.put(live, min(live.beat, now + live.pause_s))
            elif said is None:
                self._schedule.put(live, now)
            else:
                self._answer(live, said, now)
        self._wake()


def _call(then: Callable[[Update | KiviError], None], said: Update | KiviError) -> None:
    try:
        then(said)
    except Exception:
        _log.exception("a subscriber's callback raised")


def _asks_hierarchy(query: Query) -> bool:
    return query.where is not None and asks_hierarchy(query.where)


def _patient_s(lives: Collection[Live], now: float, spare: float) -> float:
    """For how long to wait for those who have been told within their interval.

    Until the first of them may be told again it costs nobody anything. Until all of them may, so that from then on
    one tick is for all, and half an interval more than they asked for: only where ticks are large. So it is, too,
    where somebody might be told something at any moment: half an interval at most. ``spare``: how long to wait
    for the sake of what a tick costs.
    """
    if any(not live.patience_s for live in lives):  # of many not all are looked at, in each tick
        return 0.0
    patience = min((live.patience_s for live in lives), default=0.0)
    dues = (live.due for live in lives if live.then is not None or live.due > now)
    soon = [due - now for due in dues if due <= now + patience]
    if not soon or min(soon) <= 0.0:
        return min(spare, patience / 2)
    return max(min(soon), min(spare, max(soon) + patience / 2))
