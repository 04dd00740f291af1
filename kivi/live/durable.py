"""Durable subscriptions: a name, a query and how far its events were delivered, in a row of the store itself.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc

from kivi.errors import Conflict, InvalidArgument, NotFound, SchemaError
from kivi.live.index import Changes as IndexChanges
from kivi.live.index import Index, Place, place_of, put_rows
from kivi.model.changes import Changes
from kivi.model.expressions import Expr, all_of, between, bind, from_plain, to_plain
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Durable, Query, Stored
from kivi.mvcc.leases import Lease
from kivi.store.catalog import ASKS, CELLS, SUBSCRIPTIONS
from kivi.store.facade import Store
from kivi.store.transaction import Txn

__all__ = ["DurableSubscriptions", "Wanted"]

_SWEEP_EVERY_S: Final = 600.0
_SWEEP_ROWS: Final = 10_000
_USERS_KNOWN: Final = 1_000


class Wanted(NamedTuple):
    """Subscriptions to store: ``wheres`` are bound, and ``at`` says which of them each has."""

    users: Sequence[str]
    names: Sequence[str]
    wheres: Sequence[Expr | None]
    at: Sequence[int]
    ttl_us: int
    since: int


class DurableSubscriptions:
    """Thread safe: each change is a transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.index = Index(store, _selecting)
        self._swept_at = 0.0
        self._known_of: dict[str, list[Stored]] = {}
        """A user's rows, until they change, which they do here only."""
        self._changes = 0

    def open(self, wanted: Durable, schema: TableSchema, query: Query, since: int) -> Stored:
        """The subscription of that name, made now if there is none. Raises InvalidArgument if it has another query."""
        text = _written(query)

        def work(txn: Txn) -> Stored:
            row = self._row(txn, wanted.user, wanted.name)
            changes, now = IndexChanges(), self._now_us()
            if row is None or self._is_over(row, schema, now):
                if row is not None:
                    _leave(changes, wanted.user, wanted.name, row)
                row = {"table": schema.origin, "query": text, "since": since, "ts": since, "skip": 0, "places": None}
            elif row["table"] != schema.origin or (row["query"] != text and not _is_bare(query)):
                raise _another(wanted.user, wanted.name)
            row |= {"ttl_us": wanted.ttl_us, "expires_us": now + wanted.ttl_us, "name_of_table": schema.name}
            if row["places"] is None:  # made now, or by an earlier version
                place = place_of(self._store, schema, _selecting(schema, row["query"]), row["query"])
                changes.add(schema.origin, place, wanted.user, wanted.name, row["query"], row["since"])
                row["places"] = place.text()
            changes.write(txn)
            txn.put(SUBSCRIPTIONS, (wanted.user, wanted.name), row)
            return _stored(wanted.user, wanted.name, row)

        stored: Stored = self._run((wanted.user,), work)
        self._sweep()
        return stored

    def store(self, schema: TableSchema, wanted: Wanted) -> int:
        """Remembers subscriptions to events, which nobody is connected to yet, in one commit; its timestamp.

        One that is there already is kept as it is, for longer. Raises InvalidArgument if it has another query.
        """
        if schema.kind != "event":
            raise InvalidArgument(f"{schema.name!r} is no event table: durable subscriptions are to events")
        self._store.shards.check(schema)
        if wanted.since > self._store.watermark():
            raise InvalidArgument(f"since = {wanted.since} is past the watermark: nothing was committed there yet")
        texts, places = list[str](), list[Place]()
        for where in wanted.wheres:
            texts.append(_written(Query.of(schema, Scan(where=where), (), None, 0)))
            places.append(place_of(self._store, schema, where, texts[-1]))
        written = [place.text() for place in places]
        keys = list(zip(wanted.users, wanted.names, strict=True))
        if len(set(keys)) < len(keys):
            raise InvalidArgument("a subscription is named twice: each user has one of a name")

        def work(txn: Txn) -> Txn:
            changes, now = IndexChanges(), self._now_us()
            expires = {"ttl_us": wanted.ttl_us, "expires_us": now + wanted.ttl_us}
            since, come = wanted.since, list[tuple[Any, ...]]()
            for key, at, before in zip(keys, wanted.at, txn.get(SUBSCRIPTIONS, keys), strict=True):
                if before is not None and not self._is_over(before, schema, now):
                    if (before["table"], before["query"]) != (schema.origin, texts[at]):
                        raise _another(*key)
                    txn.put(SUBSCRIPTIONS, key, expires)
                    continue
                if before is not None:
                    _leave(changes, *key, before)
                changes.add(schema.origin, places[at], *key, texts[at], since)
                table = schema.origin, schema.name
                come.append((*key, *table, texts[at], since, since, 0, *expires.values(), written[at]))
            put_rows(txn, SUBSCRIPTIONS, come)
            changes.write(txn)
            return txn

        done: Txn = self._run(set(wanted.users), work)
        self._sweep()
        return done.commit_ts or 0

    def reached(self, table: str, ts: int, since: int | None = None) -> list[int]:
        """How many subscriptions there are at the snapshot ``ts`` that select each event of the commits after ``since``
        up to it, in commit order; None: of the commit at ``ts``. Those that have expired count until they are swept.

        Raises NotFound, SchemaError, SnapshotTooOld, Unavailable.
        """
        with self._store.snapshots.opened(as_of_ts=ts, min_snapshot=ts) as lease:
            schema = self._events(table, lease)
            found = Scan(changes=Changes(ts - 1 if since is None else since))
            return self.index.reached(lease, schema, self._store.scan(lease, schema, found))

    def subscribers(self, table: str, ts: int, place: int, limit: int) -> list[dict[str, str]]:
        """Whose the subscriptions are that select one event, the one at ``place`` of the commit at ``ts``."""
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
        self._store.shards.check(schema)
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
        now = self._now_us()
        rows = self._found(Scan(prefix=(user,)))
        return [_stored(user, row["name"], row) for row in rows if row["expires_us"] > now]

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
        return int(self._store.clock() * 1_000_000)

    def _is_over(self, row: dict[str, Any], schema: TableSchema, now: int) -> bool:
        """Whether it has expired, or is to a table that was dropped."""
        if row["expires_us"] <= now or row["table"] == schema.origin:
            return bool(row["expires_us"] <= now)
        return all(known.origin != row["table"] for known in self._store.catalog.visible.by_id.values())

    def _found(self, wanted: Scan) -> list[dict[str, Any]]:
        with self._store.snapshots.opened() as lease:
            return [row for batch in self._store.scan(lease, SUBSCRIPTIONS, wanted) for row in batch.to_pylist()]

    def _row(self, txn: Txn, user: str, name: str) -> dict[str, Any] | None:
        row = txn.get(SUBSCRIPTIONS, [(user, name)])[0]
        return None if row is None else {key: row[key] for key in row if key not in ("user", "name")}

    def _known(self, txn: Txn, user: str, name: str, table: str | None) -> dict[str, Any]:
        row = self._row(txn, user, name)
        if row is None or row["expires_us"] <= self._now_us() or (table is not None and row["name_of_table"] != table):
            whose = f" of {user!r}" if user else ""
            raise NotFound(f"there is no durable subscription {name!r}{whose}; it may have expired", table=table)
        return row

    def _run(self, users: Collection[str], work: Callable[[Txn], Any]) -> Any:
        """A transaction, again after a conflict. ``users``: whose rows it changes."""
        while True:
            txn = self._store.transaction()
            try:
                result = work(txn)
                self._store.commits.commit_wait(txn)
                return result
            except Conflict:
                self._store.commits.wait_for_entered(1.0)
            finally:
                self._store.commits.rollback(txn)
                self._changes += 1  # first: whoever has read before sees this, or is dropped here
                for user in users:
                    self._known_of.pop(user, None)

    def _sweep(self) -> None:
        """Deletes rows that have expired, now and then."""
        now = self._store.clock()
        if now - self._swept_at < _SWEEP_EVERY_S:
            return
        self._swept_at = now
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


def _leave(changes: IndexChanges, user: str, name: str, row: dict[str, Any]) -> None:
    """A subscription goes. One of an earlier version, which was not heard of since, stands nowhere."""
    if row["places"] is not None:
        changes.remove(row["table"], Place.parse(row["places"]), user, name)


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


def _written(query: Query) -> str:
    """The query as text, in stored form; equal for equal queries."""
    scan = query.scan
    return json.dumps(
        {
            "start": scan.start,
            "end": scan.end,
            "where": None if scan.where is None else to_plain(scan.where),
            "columns": query.columns,
        },
        separators=(",", ":"),
    )


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
