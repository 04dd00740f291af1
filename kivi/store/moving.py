"""Taking shards while the store runs: a copy of what others hold of them at some S, and all that comes after S.

::

    taking    from now on what the log brings of these shards is applied; base stays where it is
    S         a pin, the snapshot that every node keeps (``kivi.mvcc.pins``), so owners answer at it to the end
    fold      base is what was committed up to S, and nothing else
    erase     what base has of these shards: what was given up once, and what was applied before S
    copy      rows of aggregates as they are at S, events up to S among those that are here (``kivi.store.spanning``)
    flush     then the marker says that the shards are held, since S
    held      reads find them here, and base goes on

**One place.** Base holds everything at or below one S while the copy is made, so what is written into it lies below all
that is pending: rows get later deltas in the order of their commits, as on every other node, and sums of floats are the
same to the bit. What comes meanwhile waits in memory, and where that is full, in the log: then this node is behind, and
the others are not.

**Never half visible.** Until the end no read looks at these shards here, and a crash leaves a marker without them: then
what is there of them is never read, as if it had been given up, and the next one begins with erasing it.

**Snapshots below S** find no rows of these shards here, since base has them as of S alone (``Shards.since``): they ask
the old owner, who gives them up when nobody reads below S (`is_needed_below`). Events have the commit that they came
with, so they can be read at every snapshot with the floor that S has: what a floor hid since is not in the new blocks,
and is asked of nobody else. So nothing is taken while a snapshot with an earlier floor is open, on whatever node
(`_check_floors`, C1): it is tried again. Events of sharded tables are not retracted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from kivi.arrow.dictionaries import plain
from kivi.encoding.event_names import STAMP
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, meta_key, row_key, table_prefix
from kivi.encoding.shards import shards_of_events, shards_of_keys
from kivi.engine import WriteBatch
from kivi.errors import Unavailable
from kivi.events.rewriting import Wanted, rewrite
from kivi.events.views import EventView
from kivi.log.shards import EVERY, SHARDS
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.store.host import Running
from kivi.store.reads import Reads

__all__ = ["Remains", "erase", "is_needed_below", "take"]

_KEYS: Final = 4_096
_PIN_S: Final = 60.0
_TIMEOUT_S: Final = 30.0
_LOOK_S: Final = 0.05
_ERASED: Final = meta_key("erased shards")
_NUMBER: Final = {Space.ROW: 0, Space.VERSION: 8}
"""Bytes behind the key of a row."""


class Owner(Running, Protocol):
    """A store with its reads. ``is_catching_up``: what it had when it was closed is not all there yet."""

    reads: Reads

    @property
    def is_catching_up(self) -> bool: ...


def take(store: Owner, shards: int, *, hold: Callable[[int, int], None], check: Callable[[], None]) -> int:
    """Copies what this store lacks of these shards; it holds them when this returns: from which S on.

    ``hold(shards, since)`` makes it so, for good, once all of it is on disk; ``check`` raises to give it up, and is
    asked now and then. Raises Unavailable, SnapshotTooOld and what reading raises; then nothing has changed.
    """
    held, leases, consolidator = store.shards, store.leases, store.consolidator
    lacking = shards & ~held.held
    if not lacking:
        return max((cts for cts, some in held.since if some & shards), default=1)
    if held.held | lacking == EVERY:
        raise Unavailable("this node would hold all shards, and begins with a copy of one that does for that")
    leases.stay(leases.watermark.value)
    try:
        with consolidator.mutex:
            _note_erased(store, _erased(store) & ~lacking)
        with store.committer.entry_lock:
            held.taking = lacking
        with store.snapshots.kept_by_all(_TIMEOUT_S, _PIN_S) as (lease, renew):

            def goes_on() -> None:
                check()
                renew()

            leases.stay(lease.ts)
            _fold(store, lease.ts, goes_on)
            tables = _tables(store, lease)
            _check_floors(store, lease, tables)
            for schema in tables:
                if schema.kind != "event":
                    _erase(store, schema, lacking, goes_on)
                    _copy_rows(store, lease, schema, lacking, goes_on)
                else:
                    _copy_events(store, lease, schema, lacking, goes_on)
            check()
            with consolidator.mutex:  # whoever copies the store has both, or neither
                consolidator.flush()
                hold(held.held | lacking, lease.ts)
            return lease.ts
    finally:
        with store.committer.entry_lock:
            held.taking = 0
        leases.stay(None)


def _fold(store: Running, upto: int, goes_on: Callable[[], None]) -> None:
    """Base is there then. Raises Unavailable where other nodes are long behind, whose snapshots base waits for."""
    watermark, until = store.leases.watermark, store.leases.clock() + _TIMEOUT_S
    while True:
        with store.consolidator.paused() as position:
            pass
        if position == upto:
            return
        if position > upto or store.leases.clock() > until:
            raise Unavailable(f"base is at {position}, and is not to be at {upto} now: it is tried again")
        goes_on()
        watermark.wait_for(watermark.value + 1, _LOOK_S)


def is_needed_below(store: Running, since: int) -> bool:
    """Whether some snapshot below ``since`` may still read rows here: one of this node, of others that ask it, a pin,
    or one that a table's history allows."""
    oldest = store.leases.oldest()
    if oldest is not None and oldest < since:
        return True
    history_floor = store.consolidator.sweeper.history_floor_of
    floors = [history_floor(schema) for schema in _sharded(store) if schema.kind != "event"]
    return any(floor is not None and floor < since for floor in floors)


def _sharded(store: Running) -> list[TableSchema]:
    return [schema for schema in store.catalog.entered.by_id.values() if schema.shard_by]


def _tables(store: Running, lease: Lease) -> list[TableSchema]:
    """The sharded tables. Raises Unavailable if the snapshot does not see all of them as they are now: what is built
    has parts of commits below it that no snapshot sees yet."""
    for schema in (found := _sharded(store)):
        if schema.is_building:
            raise Unavailable(f"{schema.name!r} is being built: shards are moved when it is there")
        if max(schema.created_ts, schema.altered_ts) > lease.ts:
            raise Unavailable(f"{schema.name!r} was made or altered meanwhile: it is tried again")
    return found


def _check_floors(store: Running, lease: Lease, tables: list[TableSchema]) -> None:
    """Raises Unavailable if an open snapshot may see events that the copy has not. Base is at the lease's S, so all
    floors up to there are in it, and nobody begins below it any more."""
    oldest = store.leases.oldest()
    if oldest is None or oldest >= lease.ts:
        return
    for schema in tables:
        events = store.event_tables.of(schema.id)
        if events is not None and not events.forgets_alike(oldest, lease.ts):
            raise Unavailable(
                f"a snapshot at {oldest} is open, and since then events of {schema.name!r} were forgotten: it is tried "
                "again"
            )


def _erase(store: Running, schema: TableSchema, shards: int, goes_on: Callable[[], None]) -> None:
    """Whatever base has of rows of an aggregate."""
    bits = store.shards.bits(shards)
    for space, behind in _NUMBER.items():
        prefix = table_prefix(space, schema.id)
        for keys in store.engine.keys(prefix, prefix_end(prefix), _KEYS):
            rows = pa.array([key[len(prefix) : len(key) - behind] for key in keys], pa.large_binary())
            gone = np.flatnonzero(bits[shards_of_keys(schema, rows, SHARDS)])
            if not len(gone):
                continue
            batch = WriteBatch()
            batch.owe(prefix, prefix_end(prefix))
            for at in gone.tolist():
                batch.delete(keys[at])
            with store.consolidator.mutex:
                store.engine.write(batch)
            goes_on()


def _copy_rows(store: Owner, lease: Lease, schema: TableSchema, shards: int, goes_on: Callable[[], None]) -> None:
    for keys, rows in store.reads.spanning.rows_to_take(lease, schema, shards):
        batch = WriteBatch()
        batch.put_all([row_key(schema.id, key) for key in keys], rows)
        with store.consolidator.mutex:
            store.engine.write(batch)
        goes_on()


def _copy_events(store: Owner, lease: Lease, schema: TableSchema, shards: int, goes_on: Callable[[], None]) -> None:
    events = store.event_tables.of(schema.id)
    if events is None:
        raise Unavailable(f"{schema.name!r} was dropped meanwhile: it is tried again")
    captured, hidden = store.reads.captured(lease, schema), list[int]()

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in store.reads.spanning.events_to_take(lease, captured, shards, hidden.append):
            yield batch
            goes_on()

    with captured.view:
        wanted = Wanted(batches(), lease.ts, lambda: max(hidden))
        rewrite(events, store.engine, lambda: wanted, lock=store.consolidator.mutex)


# -- what is not held any more ------------------------------------------------------------------------


@dataclass(slots=True)
class Remains:
    """What is on this disk of shards that the store does not hold, and when it may be erased.

    Nothing more of them is applied, but what was waits in memory to be folded; and a read that began while they were
    held goes on to its end. So it is `due` when base has come to where they were given up, and all snapshots that were
    open then are closed. A read without a snapshot is over by the time of the next look.
    """

    shards: int = 0
    upto: int = 0
    opened: frozenset[int] = frozenset()

    def due(self, store: Owner) -> int:
        """The shards that may be erased now."""
        if store.is_catching_up:
            return 0
        shards = EVERY & ~store.shards.applied & ~_erased(store)
        if shards != self.shards:
            self.shards, self.upto, self.opened = shards, store.leases.watermark.value, store.leases.ids()
            return 0
        if store.consolidator.position < self.upto or self.opened & store.leases.ids():
            return 0
        return shards


def erase(store: Owner, shards: int, *, check: Callable[[], None]) -> None:
    """Erases what base has of these shards, which are `Remains.due`; the store goes on meanwhile.

    ``check`` raises to give it up, and is asked now and then: it may wait. Then, and after a crash, there is less of
    them than there was, or as much, and the next one goes on.
    """
    for schema in _sharded(store):
        if schema.kind != "event":
            _erase(store, schema, shards, check)
            for space in _NUMBER:
                prefix = table_prefix(space, schema.id)
                store.engine.give_back(prefix, prefix_end(prefix))
        else:
            _erase_events(store, schema, shards, check)
    with store.consolidator.mutex:
        _note_erased(store, _erased(store) | shards)


def _erase_events(store: Owner, schema: TableSchema, shards: int, check: Callable[[], None]) -> None:
    """The table's blocks are made anew without them."""
    events = store.event_tables.of(schema.id)
    if events is None:
        return
    bits = store.shards.bits(shards)
    columns = [column.name for column in schema.columns]

    def kept(view: EventView) -> Iterator[pa.RecordBatch]:
        for batch in view.scan(columns=columns, naming=(STAMP,)):
            rows = np.flatnonzero(~bits[shards_of_events(schema, batch, SHARDS)])
            if len(rows):
                yield plain(batch).take(pa.array(rows))
            check()

    with contextlib.ExitStack() as opened:

        def begin() -> Wanted:
            upto = events.events_upto  # which may be above the position of base, as full blocks are made before a pass
            return Wanted(kept(opened.enter_context(events.everything(upto))), upto)

        rewrite(events, store.engine, begin, lock=store.consolidator.mutex)


def _erased(store: Running) -> int:
    """The shards of which base has nothing."""
    return int.from_bytes(store.engine.get(_ERASED) or b"", "little")


def _note_erased(store: Running, shards: int) -> None:
    batch = WriteBatch()
    batch.put(_ERASED, shards.to_bytes(SHARDS // 8, "little"))
    store.engine.write(batch)
