"""Durable subscriptions: a name, a query and how far its events were delivered, in rows of the store itself.

A durable subscription that nobody is connected to is rows on disk and nothing else: what it misses lies in its event
table, from where it reads on when its subscriber comes back. So there may be a million of them, and no commit looks at
one. The rows by which it is found by what it asks for (``kivi.live.index``) are written in the same commits: so of an
event it is known how many it reached, and whom.

**Invariants.**

* The stored position only grows, and is moved by the subscriber alone, once it says that it has what is before it. A
  subscriber or a server that dies in between gets the rest again: each event at least once, and exactly once for a
  subscriber that remembers ``ts`` and ``skip`` together with what it made of them.
* One connection at a time: a later one takes the subscription over, and the one before is told so.
* With ``unseen`` an event is left out if another durable subscription of the same user, on the same table, selects it
  and has been handed it: which is so if it was committed in what that one has behind it. No event is remembered by
  itself. Both are decided under the hub's lock, so of two that are connected exactly one is handed an event that both
  select. An event that is handed out and lost with its connection comes again by the one that was handed it, and then
  whether or not another was handed it since; which events those are is forgotten if the server dies as well. Of a
  commit that was handed out in part, the others still get all: a commit counts as seen when it was handed out whole.
* An expired one is as good as none for its user, and so is one to a table that was dropped, for whoever subscribes to
  another. It is deleted, and counted no more, when somebody subscribes later (``_sweep``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.delta.ops import Barrier
from kivi.errors import (
    CommitUnknown,
    InvalidArgument,
    KiviError,
    NotFound,
    ResourceExhausted,
    SchemaError,
    Unavailable,
)
from kivi.live.cells import EVERYTHING, cell_of
from kivi.live.index import Asked, Index, asked, halves
from kivi.live.index import Changes as IndexChanges
from kivi.model.changes import Changes
from kivi.model.expressions import Expr, all_of, between, bind, from_plain, to_plain
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Durable, Query, Stored
from kivi.mvcc.leases import Lease
from kivi.store.catalog import ASKS, CELLS, EARLIER_SUBSCRIPTIONS, QUERIES, SUBSCRIPTIONS
from kivi.store.facade import Store
from kivi.store.transaction import Txn

__all__ = ["DurableSubscriptions", "Wanted"]

_SWEEP_EVERY_US: Final = 600_000_000
_SWEEP_ROWS: Final = 10_000
_TAKEN_MAX: Final = 20_000
"""Of 0.1.0's so many are taken over in a commit that have so many cells, about: each is written there."""
_USERS_KNOWN: Final = 1_000
_ONE: Final = np.zeros(1, np.int64)
"""Each of one subscription has the first query of one."""
_QUERY_BYTES: Final = 2_048
"""So many bytes of ``subscriptions_bytes`` for each query that is remembered, which takes half of them or less."""
Array = Any
_Get = Callable[[TableSchema, Sequence[tuple[Any, ...]]], list[dict[str, Any] | None]]


class Wanted(NamedTuple):
    """Subscriptions to store: ``users`` and ``names`` are Arrow arrays of text, ``wheres`` are bound, and ``at`` says
    which of them each has."""

    users: Any
    names: Any
    wheres: Sequence[Expr | None]
    at: Sequence[int]
    ttl_us: int
    since: int


@dataclass(eq=False, slots=True)
class _Opening:
    """A call of ``open``, until it has its answer."""

    wanted: Durable
    schema: TableSchema
    asks: Asked
    since: int
    is_bare: bool
    answer: Stored | Exception | None = None


class DurableSubscriptions:
    """Thread safe: each change is a transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.index = Index(store, _selecting)
        self._opening: list[_Opening] = []
        """Of it only whole steps are taken, each of which the interpreter does at once."""
        self._committing = threading.Lock()
        """That of the threads which wait for it goes on commits for all."""
        self._swept_us = 0
        self._took_over = False
        self._known_queries: dict[tuple[int, int, str], Asked] = {}
        self._queries_known = max(1, store.settings.subscriptions_bytes // _QUERY_BYTES)
        self._known_of: dict[str, list[Stored]] = {}
        """A user's rows, until they change, which they do here only."""
        self._changes = 0

    def open(self, wanted: Durable, schema: TableSchema, query: Query, since: int) -> Stored:
        """The subscription of that name, made now if there is none. Raises InvalidArgument if it has another query.

        Those that come while a commit is on its way are one commit, the next: it costs as much as one of them.
        """
        text = _written(query, query.where)
        asks = self._asked(schema, partial(_selecting, schema, text), text)
        mine = _Opening(wanted, schema, asks, since, _is_bare(query))
        self._opening.append(mine)
        try:
            while mine.answer is None:
                with self._committing:
                    if mine.answer is None:
                        self._open_together(self._first_of_each_name())
        finally:
            self._opening.remove(mine)
        self._sweep()
        if isinstance(mine.answer, Exception):
            raise mine.answer
        return mine.answer

    def _first_of_each_name(self) -> list[_Opening]:
        """Of those that wait."""
        waiting = [each for each in [*self._opening] if each.answer is None]
        return [*{each.wanted[:2]: each for each in reversed(waiting)}.values()]

    def _open_together(self, group: Sequence[_Opening]) -> None:
        """Answers all of them, of which no two have one name. One that is refused takes no other with it.

        An error that may be that of one is looked for in each half: beside one of many, a few commits are made more.
        """
        alike: dict[tuple[int, ...], list[_Opening]] = {}
        for each in group:
            terms = each.schema.id, each.schema.altered_ts, each.since, each.wanted.ttl_us, each.is_bare
            alike.setdefault(terms, []).append(each)

        def work(txn: Txn) -> list[tuple[_Opening, Stored | KiviError]]:
            changes, answers = IndexChanges(), list[tuple[_Opening, Stored | KiviError]]()
            for some in alike.values():
                first, keys = some[0], [each.wanted[:2] for each in some]
                users, names = (pa.array(column, pa.string()) for column in zip(*keys, strict=True))
                wanted = Wanted(users, names, (), range(len(some)), first.wanted.ttl_us, first.since)
                queries = [each.asks for each in some]
                begun, held = self._begin(txn, changes, first.schema, wanted, keys, queries, by_name=first.is_bare)
                for i, each in enumerate(some):
                    row = held.get(i) or begun | {"query": each.asks.text}
                    answers.append((each, row if isinstance(row, KiviError) else _stored(*keys[i], row)))
            changes.write(txn)
            return answers

        try:
            for each, answer in self._run({each.wanted.user for each in group}, work):
                each.answer = answer
        except Exception as error:
            is_of_all = isinstance(error, CommitUnknown | Unavailable) and not isinstance(error, ResourceExhausted)
            if len(group) > 1 and not is_of_all:
                half = len(group) // 2
                self._open_together(group[:half])
                self._open_together(group[half:])
                return
            for each in group:
                each.answer = error

    def store(self, schema: TableSchema, wanted: Wanted) -> int:
        """Remembers subscriptions to events, which nobody is connected to yet, in one commit; its timestamp.

        One that is there already is kept as it is, for longer. Raises InvalidArgument if it has another query.
        """
        if schema.kind != "event":
            raise InvalidArgument(f"{schema.name!r} is no event table: durable subscriptions are to events")
        self._store.shards.check(schema, may_ask_less=False)
        self._store.snapshots.hear_of(wanted.since)
        if wanted.since > self._store.watermark():
            raise InvalidArgument(f"since = {wanted.since} is past the watermark: nothing was committed there yet")
        bare = Query.of(schema, Scan(), (), None, 0)
        queries = [self._asked(schema, partial(_as_it_is, where), _written(bare, where)) for where in wanted.wheres]
        keys = list(zip(wanted.users.to_pylist(), wanted.names.to_pylist(), strict=True))
        if len(set(keys)) < len(keys):
            raise InvalidArgument("a subscription is named twice: each user has one of a name")

        def work(txn: Txn) -> Txn:
            changes = IndexChanges()
            _, held = self._begin(txn, changes, schema, wanted, keys, queries, by_name=False)
            for row in held.values():
                if isinstance(row, KiviError):
                    raise row
            changes.write(txn)
            return txn

        done: Txn = self._run({user for user, _ in keys}, work)
        self._sweep()
        return done.commit_ts or 0

    def _begin(
        self,
        txn: Txn,
        changes: IndexChanges,
        schema: TableSchema,
        wanted: Wanted,
        keys: Sequence[tuple[str, str]],
        queries: Sequence[Asked],
        *,
        by_name: bool,
    ) -> tuple[dict[str, Any], dict[int, dict[str, Any] | InvalidArgument]]:
        """What those have that begin now, and by their places the rows of those that are there and are kept for longer;
        or that such a one has another query, unless they are asked for ``by_name``. ``keys`` are users with names."""
        now, at = self._now_us(), np.asarray(wanted.at, np.int64)
        moved = {"ttl_us": wanted.ttl_us, "expires_us": now + wanted.ttl_us}
        begun = {"table": schema.origin, "since": wanted.since, "ts": wanted.since, "skip": 0, **moved}
        named, held = {"name_of_table": schema.name}, dict[int, dict[str, Any] | InvalidArgument]()
        is_new, is_written = np.ones(len(keys), np.bool_), np.ones(len(keys), np.bool_)
        maybe = txn.maybe_there(SUBSCRIPTIONS, [wanted.users, wanted.names])
        for i, before in zip(maybe, self._rows(txn.get, [keys[i] for i in maybe]), strict=True):
            if before is None:
                continue
            query = queries[at[i]]
            if not self._is_over(before, schema, now):
                is_new[i] = is_written[i] = False
                if before["table"] == schema.origin and (by_name or _is_same(before["query"], query.text)):
                    txn.put(SUBSCRIPTIONS, keys[i], moved)
                    held[i] = before | moved | named
                else:
                    held[i] = _another(*keys[i])
            elif _is_to(before, schema, query):
                is_new[i] = False
            else:
                _leave(changes, *keys[i], before)
        users, names = _chosen(wanted, is_written)
        high, low = halves(queries, at[is_written])
        txn.write_deltas(SUBSCRIPTIONS, [users, names], {**begun, "high": high, "low": low}, barrier=Barrier.RESTART)
        users, names = _chosen(wanted, is_new)
        changes.add(schema, queries, at[is_new], users, names, wanted.since)
        return begun | named, held

    def _asked(self, schema: TableSchema, where: Callable[[], Expr | None], text: str) -> Asked:
        """By which it is found, as long as there are the same hierarchies."""
        known, key = self._known_queries, (schema.id, self._store.catalog.visible.version, text)
        found = known.get(key)
        if found is None:
            if len(known) >= self._queries_known:
                known.clear()
            found = known[key] = asked(self._store, schema, where(), text)
        return found

    def reached(self, table: str, ts: int, since: int | None = None) -> list[int]:
        """How many subscriptions there are at the snapshot ``ts`` that select each event of the commits after ``since``
        up to it, in commit order; None: of the commit at ``ts``. Those that have expired count until they are swept.

        Raises NotFound, SchemaError, SnapshotTooOld, Unavailable.
        """
        self.take_over()
        with self._store.snapshots.opened(as_of_ts=ts, min_snapshot=ts) as lease:
            schema = self._events(table, lease)
            found = Scan(changes=Changes(ts - 1 if since is None else since))
            return self.index.reached(lease, schema, self._store.scan(lease, schema, found))

    def subscribers(self, table: str, ts: int, place: int, limit: int) -> list[dict[str, str]]:
        """Whose the subscriptions are that select one event, the one at ``place`` of the commit at ``ts``."""
        self.take_over()
        with self._store.snapshots.opened(as_of_ts=ts, min_snapshot=ts) as lease:
            schema = self._events(table, lease)
            wanted = Scan(changes=Changes(ts - 1, skip=place, take=1))
            for batch in self._store.scan(lease, schema, wanted):
                if batch.num_rows:
                    return self.index.subscribers(lease, schema, batch, limit)
        raise NotFound(f"the commit at {ts} has no event at place {place} of {table!r}", table=table)

    def _events(self, table: str, lease: Lease) -> TableSchema:
        schema = self._store.table(table, lease)
        if schema.kind != "event":
            raise SchemaError(f"{table!r} is no event table: subscriptions are reached by events", table=table)
        self._store.shards.check(schema, may_ask_less=False)
        return schema

    def adopted(self, stored: Stored, query: Query, schema: TableSchema) -> Query:
        """The query of a subscription that is taken up by its name alone, with the columns that are asked for."""
        if not _is_bare(query):
            return query
        return replace(query, scan=replace(query.scan, where=_selecting(schema, stored.query)))

    def acknowledge(self, user: str, name: str, ts: int, skip: int, *, table: str | None = None) -> None:
        """Everything at or before this position is delivered. An older position changes nothing. Raises NotFound."""

        def work(txn: Txn) -> None:
            row = self._known(txn, user, name, table)
            moved: dict[str, Any] = {"expires_us": self._now_us() + row["ttl_us"]}
            if (ts, skip) > (row["ts"], row["skip"]):
                if ts > self._store.watermark():
                    raise InvalidArgument(f"nothing was committed at {ts} yet: acknowledge what an update said")
                moved |= {"ts": ts, "skip": skip}
            txn.put(SUBSCRIPTIONS, (user, name), moved)

        self._run((user,), work)

    def position(self, user: str, name: str) -> int:
        """Up to which commit all is delivered; 0 if there is none of that name."""
        self.take_over()
        with self._store.snapshots.opened() as lease:
            row = self._store.reads.get(lease, SUBSCRIPTIONS, [(user, name)])[0]
        return 0 if row is None else row["ts"]

    def drop(self, user: str, name: str, *, table: str | None = None) -> None:
        """Forgets it. Raises NotFound."""

        def work(txn: Txn) -> None:
            changes = IndexChanges()
            _leave(changes, user, name, self._known(txn, user, name, table))
            changes.write(txn)
            txn.delete(SUBSCRIPTIONS, (user, name))

        self._run((user,), work)

    def listed(self, user: str) -> list[Stored]:
        """A user's, by name, without those that have expired."""
        self.take_over()
        now = self._now_us()
        with self._store.snapshots.opened() as lease:
            found = self._store.scan(lease, SUBSCRIPTIONS, Scan(prefix=(user,)))
            rows = [row for batch in found for row in batch.to_pylist() if row["expires_us"] > now]
            rows = self._whole(partial(self._store.reads.get, lease), rows)
        return [_stored(user, row["name"], row) for row in rows]

    def others(self, user: str, name: str, schema: TableSchema) -> list[tuple[Stored, Expr | None]]:
        """The user's others on this table, and what each selects of the commits in (since, ts]. One call at a time."""
        known = self._known_of.get(user)
        if known is None:
            if len(self._known_of) >= _USERS_KNOWN:
                self._known_of.clear()
            changes = self._changes
            known = self._known_of[user] = self.listed(user)
            if self._changes != changes:
                self._known_of.pop(user, None)
        now = self._now_us()
        return [
            (stored, self._store.hierarchies.resolved_now(schema, _selecting(schema, stored.query)))
            for stored in known
            if stored.table_id == schema.origin and stored.name != name and stored.expires_us > now
        ]

    # -- rows ---------------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return self._store.committer.now_us()

    def _is_over(self, row: dict[str, Any], schema: TableSchema, now: int) -> bool:
        """Whether it has expired, or is to a table that was dropped."""
        if row["expires_us"] <= now or row["table"] == schema.origin:
            return bool(row["expires_us"] <= now)
        return all(known.origin != row["table"] for known in self._store.catalog.visible.by_id.values())

    def _row(self, txn: Txn, user: str, name: str) -> dict[str, Any] | None:
        return self._rows(txn.get, [(user, name)])[0]

    def _rows(self, get: _Get, keys: Sequence[tuple[str, str]]) -> list[dict[str, Any] | None]:
        found = get(SUBSCRIPTIONS, keys)
        whole = iter(self._whole(get, [row for row in found if row is not None]))
        return [None if row is None else next(whole) for row in found]

    def _whole(self, get: _Get, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """With what they ask for."""
        if not rows:
            return []
        names = [(row["table"], row["high"], row["low"]) for row in rows]
        distinct = list(dict.fromkeys(names))
        queries = dict(zip(distinct, get(QUERIES, distinct), strict=True))
        now_named = {schema.origin: schema.name for schema in self._store.catalog.visible.by_id.values()}
        found = []
        for row, name in zip(rows, names, strict=True):
            query = queries[name]
            assert query is not None  # it goes after the last one that has it, and of these this snapshot sees one
            found.append(row | query | {"name_of_table": now_named.get(row["table"], query["name_of_table"])})
        return found

    def _known(self, txn: Txn, user: str, name: str, table: str | None) -> dict[str, Any]:
        row = self._row(txn, user, name)
        if row is None or row["expires_us"] <= self._now_us() or (table is not None and row["name_of_table"] != table):
            whose = f" of {user!r}" if user else ""
            raise NotFound(f"there is no durable subscription {name!r}{whose}; it may have expired", table=table)
        return row

    def take_over(self) -> None:
        """What 0.1.0 has written, once: which subscriptions there are was known then, and not what they ask for.

        A follower has of it what its owner has done.
        """

        def work(txn: Txn) -> bool:
            changes, wanted, taken = IndexChanges(), Scan(limit=_SWEEP_ROWS), 0
            rows = [row for batch in txn.scan(EARLIER_SUBSCRIPTIONS, wanted) for row in batch.to_pylist()]
            tables = {schema.origin: schema for schema in self._store.catalog.visible.by_id.values()}
            for i, row in enumerate(rows):
                if taken > _TAKEN_MAX:
                    rows = rows[:i]
                    break
                key = row["user"], row["name"]
                txn.delete(EARLIER_SUBSCRIPTIONS, key)
                if (schema := tables.get(row["table"])) is None:
                    continue
                try:
                    query = self._asked(schema, partial(_selecting, schema, row["query"]), row["query"])
                except KiviError:  # its hierarchy is gone, and it says so to whoever takes it up
                    query = Asked.of(row["query"], False, (cell_of(EVERYTHING, ""),))
                numbers = {"table", "since", "ts", "skip", "ttl_us", "expires_us"}
                values = {name: row[name] for name in numbers} | {"high": query.high, "low": query.low}
                txn.put(SUBSCRIPTIONS, key, values)
                changes.add(schema, [query], _ONE, [row["user"]], [row["name"]], row["since"])
                taken += len(query.cells) + len(query.text) // _QUERY_BYTES
            changes.write(txn)
            return not rows

        while not (self._took_over or self._store.is_follower):
            self._took_over = self._commit((), work)

    def _run(self, users: Collection[str], work: Callable[[Txn], Any]) -> Any:
        """A transaction, again after a conflict. ``users``: whose rows it changes."""
        self.take_over()
        return self._commit(users, work)

    def _commit(self, users: Collection[str], work: Callable[[Txn], Any]) -> Any:
        def committed(txn: Txn) -> Any:
            result = work(txn)
            self._store.commits.commit_wait(txn)
            return result

        try:
            return self._store.commits.again(self._store.transaction, committed)
        finally:
            self._changes += 1  # first: whoever has read before sees this, or is dropped here
            for user in users:
                self._known_of.pop(user, None)

    def _sweep(self) -> None:
        """Deletes rows that have expired, now and then."""
        now_us = self._now_us()
        if now_us - self._swept_us < _SWEEP_EVERY_US:
            return
        self._swept_us = now_us
        empty = all_of(Expr("==", "exact", 0), Expr("==", "asks", 0))

        def forget(txn: Txn) -> None:
            changes = IndexChanges()
            for row in gone:
                held = self._row(txn, row["user"], row["name"])
                if held is not None and held["expires_us"] <= self._now_us():
                    _leave(changes, row["user"], row["name"], held)
                    txn.delete(SUBSCRIPTIONS, (row["user"], row["name"]))
            changes.write(txn)

        def clear(txn: Txn) -> int:
            """What nobody asks for any more, some of it. A subscription that comes meanwhile conflicts with it."""
            cleared = 0
            for schema, where in ((CELLS, empty), (ASKS, Expr("==", "members", 0))):
                for batch in txn.scan(schema, Scan(where=where, columns=schema.key_names, limit=_SWEEP_ROWS)):
                    for row in batch.to_pylist():
                        txn.delete(schema, tuple(row.values()))
                        if schema is ASKS:
                            txn.delete(QUERIES, (row["table"], row["high"], row["low"]))
                    cleared += batch.num_rows
            return cleared

        swept = 0
        for gone in self._expired():
            self._run({row["user"] for row in gone}, forget)
            swept += len(gone)
        while swept and self._run((), clear):
            pass

    def _expired(self) -> Iterator[list[dict[str, Any]]]:
        """Rows that have expired. Each part has a snapshot of its own: a million rows may take longer than one may."""
        now_us = self._now_us()
        user, name, read = "", "", _SWEEP_ROWS
        while read == _SWEEP_ROWS:
            read, gone = 0, list[dict[str, Any]]()
            wanted = Scan(start=(user, name), columns=("user", "name", "expires_us"), limit=_SWEEP_ROWS)
            with self._store.snapshots.opened() as lease:
                for batch in self._store.scan(lease, SUBSCRIPTIONS, wanted):
                    read += batch.num_rows
                    gone += batch.filter(pc.less_equal(batch.column("expires_us"), now_us)).to_pylist()
                    user, name = (batch.column(i)[-1].as_py() for i in (0, 1))
            name += "\0"  # the least behind it
            if gone:
                yield gone


def _as_it_is(where: Expr | None) -> Expr | None:
    return where


def _chosen(wanted: Wanted, chosen: Array) -> Iterator[Any]:
    """Users and names of those that are chosen."""
    return (column.filter(pa.array(chosen)) for column in (wanted.users, wanted.names))


def _leave(changes: IndexChanges, user: str, name: str, row: dict[str, Any]) -> None:
    """A subscription goes."""
    query = Asked.read(row["high"], row["low"], row["query"], row["places"])
    changes.remove(row["table"], query, user, name)


def _is_to(row: dict[str, Any], schema: TableSchema, query: Asked) -> bool:
    """Whether it stands where one of this query does."""
    return (row["table"], row["high"], row["low"]) == (schema.origin, query.high, query.low)


def _another(user: str, name: str) -> InvalidArgument:
    whose = f" of {user!r}" if user else ""
    return InvalidArgument(
        f"subscription {name!r}{whose} is to another query: give that one, or drop it first with unsubscribe({name!r})"
    )


def _stored(user: str, name: str, row: dict[str, Any]) -> Stored:
    return Stored(
        user, name, row["name_of_table"], row["table"], row["query"], row["since"], row["ts"], row["skip"],
        row["expires_us"],
    )  # fmt: skip


# -- queries as text --------------------------------------------------------------------------------------


def _written(query: Query, where: Expr | None) -> str:
    """The query with this predicate as text, in stored form; equal for equal queries."""
    scan = query.scan
    return _as_text(
        {
            "start": scan.start,
            "end": scan.end,
            "where": None if where is None else to_plain(where),
            "columns": query.columns,
        }
    )


_as_text: Final = json.JSONEncoder(separators=(",", ":")).encode


def _is_same(text: str, other: str) -> bool:
    """Whether they are of the same events. Columns are what a connection is shown of them: to ask for all names others
    once some were added."""
    return text == other or {**json.loads(text), "columns": None} == {**json.loads(other), "columns": None}


def _is_bare(query: Query) -> bool:
    """Whether it says nothing of which events are wanted."""
    scan = query.scan
    return scan.where is None and scan.start is None and scan.end is None


def _selecting(schema: TableSchema, text: str) -> Expr | None:
    """The predicate of a stored query, with its bounds of the event time."""
    known = json.loads(text)
    low, beyond = (known[bound][0] if known[bound] else None for bound in ("start", "end"))
    where = known["where"] and bind(
        from_plain(known["where"]), lambda name: schema.column(name).type, lambda _, value, __: value
    )
    return all_of(where, between(schema.event_time or "", low, beyond))
