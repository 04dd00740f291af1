"""The embedded database: ``kivi.open``. The public interface over a ``Store`` in this process.

The same methods, arguments and errors as the clients'; one suite runs against all of them. Converts between what a
caller writes and stored form, and holds no rules.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kivi.arrow.columns import arrow_schema, rows_from_batch
from kivi.arrow.records import event_batch
from kivi.definitions import TimeSlot, aggregate_schema, event_table_schema, row_table_schema
from kivi.errors import InvalidArgument, Retryable, SnapshotTooOld
from kivi.expr import Expr, Scan
from kivi.outcomes import ABORTED, UNKNOWN, Outcome
from kivi.scan import bound_predicate
from kivi.schema import OperatorCall, TableSchema
from kivi.settings import Settings
from kivi.store import Lease, Store, Txn
from kivi.types import ColumnType

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.appending import Appender

__all__ = ["Database", "Snapshot", "Transaction", "open_database"]

T = TypeVar("T")
_MOMENT = ColumnType("timestamp")


def open_database(path: Any = None, **settings: Any) -> Database:
    """``kivi.open("data/", **settings)``: one process owns the directory; None keeps everything in memory.

    Settings are the fields of ``kivi.settings.Settings``. Raises NotAStore, FormatTooNew, StoreInUse, DataLoss,
    InvalidArgument for an unknown setting.
    """
    import os

    return Database(Store.open(None if path is None else os.fspath(path), settings=Settings.of(settings)))


class Database:
    """A store in this process. Safe to use from many threads."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finishes commits in progress and makes everything durable in base. Harmless twice."""
        self.store.close()

    # -- schema ---------------------------------------------------------------------------------

    def create_table(
        self,
        name: str,
        key: Mapping[str, object],
        columns: Mapping[str, object],
        history: str | int | dt.timedelta | None = None,
    ) -> None:
        """A row table; ``history`` keeps older versions for ``as_of``. Raises AlreadyExists, SchemaError."""
        self.store.create(row_table_schema(name, key, columns, history))

    def create_event_table(
        self,
        name: str,
        event_time: str,
        columns: Mapping[str, object],
        retention: str | int | dt.timedelta | None = None,
    ) -> None:
        """An append-only event table. Raises AlreadyExists, SchemaError."""
        self.store.create(event_table_schema(name, event_time, columns, retention))

    def create_aggregate(
        self,
        name: str,
        source: str,
        group_by: Sequence[str | TimeSlot],
        measures: Mapping[str, OperatorCall],
        derived: Mapping[str, str] | None = None,
        history: str | int | dt.timedelta | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """An aggregate of an event table; returns when it can be read. ``progress(done_rows, total_rows)``."""
        of = self.store.table(source)
        self.store.create(aggregate_schema(name, of, group_by, measures, derived, history), progress=progress)

    def tables(self) -> list[str]:
        """The names of all tables, in order."""
        return [schema.name for schema in self.store.tables()]

    def describe(self, name: str) -> dict[str, Any]:
        """A table's definition and what is cheap to know about its contents, as plain data."""
        schema = self.store.table(name)
        return {**schema.description(), "statistics": self.store.statistics(schema)}

    def drop(self, name: str) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates depend on it."""
        self.store.drop(name)

    # -- transactions ---------------------------------------------------------------------------

    def transaction(
        self,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        min_snapshot: int | None = None,
    ) -> Transaction:
        """``with db.transaction() as tx``: commits on success, rolls back on an exception."""
        return Transaction(self, token, batch, min_snapshot)

    def run(self, fn: Callable[[Transaction], T], timeout: float | None = 10.0) -> T:
        """``fn(tx)`` in a transaction; after a conflict again, on a new snapshot, until ``timeout`` (seconds).

        The function is rerun from the start, so what it read is never written back stale. It must not
        have effects outside the transaction. CommitUnknown is never rerun.
        """
        deadline = time.monotonic() + (timeout if timeout is not None else 1e9)
        for attempt in itertools.count():
            try:
                with self.transaction() as tx:
                    result = fn(tx)
                return result
            except (Retryable, SnapshotTooOld):
                pause = random.uniform(0, min(0.2, 0.001 * 2**attempt))
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def snapshot(
        self,
        as_of: int | dt.datetime | None = None,
        min_snapshot: int | None = None,
        *,
        ttl_s: float | None = None,
    ) -> Snapshot:
        """A read-only view. ``as_of``: a commit timestamp, or a moment."""
        as_of_ts = as_of_us = None
        if isinstance(as_of, dt.datetime):
            as_of_us = _MOMENT.to_stored(as_of, "as_of")
        elif as_of is not None:
            if not isinstance(as_of, int) or isinstance(as_of, bool) or as_of < 0:
                raise InvalidArgument(f"as_of is a commit timestamp or a datetime, not {as_of!r}")
            as_of_ts = as_of
        return Snapshot(
            self, self.store.begin(as_of_ts=as_of_ts, as_of_us=as_of_us, min_snapshot=min_snapshot, ttl_s=ttl_s)
        )

    # -- bulk -----------------------------------------------------------------------------------

    def append(self, table: str, records: Any, token: str | None = None, batch: tuple[str, int] | None = None) -> int:
        """Events (dicts, an Arrow table or batch) in one transaction; its commit timestamp."""
        schema = self._schema(table)
        events = event_batch(schema, records)
        txn = self.store.transaction()
        try:
            txn.append(schema, events)
            return self.store.commit_wait(txn, token=token, batch=batch)
        finally:
            txn.rollback()

    def outcome(self, token: str) -> Outcome:
        """The commit timestamp, kivi.ABORTED (final) or kivi.UNKNOWN."""
        state, commit_ts = self.store.outcome(token)
        if commit_ts is not None:
            return commit_ts
        return ABORTED if state == "aborted" else UNKNOWN

    def appender(self, table: str, linger_ms: float = 5, max_events: int = 10_000) -> Appender:
        """Events one at a time, committed together: see ``kivi.appending.Appender``."""
        from kivi.appending import Appender

        return Appender(self, table, linger_ms, max_events)

    def stage(self, table: str, records: Any, owner: str = "") -> bytes:
        """Events made durable and invisible, for ``tx.append_stages``; the stage's id."""
        schema = self._schema(table)
        return self.store.stage_wait(schema, event_batch(schema, records), owner=owner)

    def discard_stages(self, ids: Iterable[bytes]) -> None:
        """Gives stages up. Those that were committed are passed over."""
        self.store.discard_stages(list(ids))

    def batch_scopes(self, prefix: str = "") -> list[str]:
        """The scopes of batch tokens that were ever committed, by prefix."""
        return self.store.batch_scopes(prefix)

    # -- operation ------------------------------------------------------------------------------

    def watermark(self) -> int:
        """The snapshot a new reader gets."""
        return self.store.watermark()

    def consolidate(self) -> None:
        """Folds everything up to the watermark into base rows now."""
        self.store.consolidate()

    def stats(self) -> dict[str, int | float]:
        """Counters and sizes, as flat names."""
        return self.store.stats()

    def checkpoint(self, path: Any) -> None:
        """A consistent copy of the store in a new directory ``path``."""
        import os

        self.store.checkpoint(os.fspath(path))

    def _schema(self, table: str) -> TableSchema:
        return self.store.table(table)


class _Reads:
    """What transactions and snapshots have in common."""

    _db: Database

    def _get(
        self, schema: TableSchema, keys: list[tuple[Any, ...]], columns: Sequence[str] | None
    ) -> list[dict[str, Any] | None]:
        raise NotImplementedError

    def _batches(self, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def get(self, table: str, key: Sequence[Any], columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row as a dict of key, columns and derived columns, or None. Own writes included."""
        return self.get_many(table, [key], columns)[0]

    def get_many(
        self, table: str, keys: Iterable[Sequence[Any]], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any] | None]:
        """One row or None per key, in the order of the keys."""
        schema = self._db._schema(table)
        rows = self._get(schema, [schema.stored_key(key) for key in keys], columns)
        return [None if row is None else schema.row_from_stored(row) for row in rows]

    def scan(
        self,
        table: str,
        prefix: Sequence[Any] = (),
        start: Sequence[Any] | None = None,
        end: Sequence[Any] | None = None,
        where: Expr | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Rows in key order; ``end`` is exclusive. Events come in commit order, bounded by event time."""
        schema = self._db._schema(table)
        batches = self._batches(schema, wanted_scan(schema, prefix, start, end, where, columns, limit, reverse))
        return (row for batch in batches for row in rows_from_batch(batch))


def wanted_scan(
    schema: TableSchema,
    prefix: Sequence[Any],
    start: Sequence[Any] | None,
    end: Sequence[Any] | None,
    where: Expr | None,
    columns: Sequence[str] | None,
    limit: int | None,
    reverse: bool,
) -> Scan:
    """The arguments of a scan, checked and in stored form. Raises SchemaError, InvalidArgument."""
    schema.output_columns(columns)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InvalidArgument(f"limit is a number of rows, not {limit!r}")
    bounds = [None if key is None else schema.stored_bound(key) for key in (start, end)]
    return Scan(
        prefix=schema.stored_bound(prefix) if prefix else (),
        start=bounds[0],
        end=bounds[1],
        where=bound_predicate(schema, where),
        columns=columns,
        limit=limit,
        reverse=reverse,
    )


class Transaction(_Reads):
    """Reads one snapshot and its own writes; commits all or nothing. Not for several threads at once."""

    def __init__(
        self, db: Database, token: str | None, batch: tuple[str, int] | None, min_snapshot: int | None
    ) -> None:
        self._db = db
        self._token = token
        self._batch = batch
        self._min_snapshot = min_snapshot
        self._txn: Txn | None = None

    def __enter__(self) -> Transaction:
        self._started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.rollback()
        elif not self._started().closed:
            self.commit()

    def _started(self) -> Txn:
        if self._txn is None:
            store = self._db.store
            self._txn = store.transaction(store.begin(min_snapshot=self._min_snapshot))
        return self._txn

    def _open(self) -> Txn:
        txn = self._started()
        if txn.closed:
            raise InvalidArgument(f"the transaction is over: {txn.closed}; begin another")
        return txn

    def commit(self) -> int:
        """Commits now; the ``with`` block does it at its end otherwise. Returns the commit timestamp."""
        return self._db.store.commit_wait(self._open(), token=self._token, batch=self._batch)

    def rollback(self) -> None:
        """Gives the transaction up."""
        if self._txn is not None:
            self._txn.rollback()

    @property
    def start_ts(self) -> int:
        """The snapshot: the commit timestamp up to which everything is seen."""
        return self._started().start_ts

    @property
    def commit_ts(self) -> int | None:
        """The commit timestamp once committed; for a transaction that wrote nothing, its snapshot."""
        return self._txn.commit_ts if self._txn is not None else None

    def put(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Upsert of the named columns."""
        schema = self._db._schema(table)
        self._open().put(schema, schema.stored_key(key), schema.stored_put(values))

    def delta(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Updates delta columns by their operators; never conflicts with other deltas."""
        schema = self._db._schema(table)
        self._open().delta(schema, schema.stored_key(key), schema.stored_delta(values))

    def insert(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """A new row. Raises RowExists here if it is there, and the transaction may go on."""
        schema = self._db._schema(table)
        self._open().insert(schema, schema.stored_key(key), schema.stored_put(values))

    def delete(self, table: str, key: Sequence[Any]) -> None:
        """The row is gone; harmless if it is not there."""
        schema = self._db._schema(table)
        schema.stored_put({})
        self._open().delete(schema, schema.stored_key(key))

    def guard(self, table: str, key: Sequence[Any], column: str | None = None) -> None:
        """Makes a read of this cell (or of the row's existence) conflict like a write."""
        schema = self._db._schema(table)
        schema.check_guardable(column)
        self._open().guard(schema, schema.stored_key(key), column)

    def append(self, table: str, records: Any) -> None:
        """Events: dicts, an Arrow table or record batch."""
        schema = self._db._schema(table)
        self._open().append(schema, event_batch(schema, records))

    def append_stages(self, table: str, stages: Iterable[bytes]) -> None:
        """Events that were staged before."""
        self._open().append_stages(self._db._schema(table), list(stages))

    def _get(
        self, schema: TableSchema, keys: list[tuple[Any, ...]], columns: Sequence[str] | None
    ) -> list[dict[str, Any] | None]:
        return self._open().get(schema, keys, columns)

    def _batches(self, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]:
        return self._open().scan(schema, wanted)


class Snapshot(_Reads):
    """A read-only view at one timestamp."""

    def __init__(self, db: Database, lease: Lease) -> None:
        self._db = db
        self._lease = lease

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the snapshot's lease."""
        self._db.store.release(self._lease)

    @property
    def ts(self) -> int:
        """The commit timestamp up to which everything is seen."""
        return self._lease.ts

    def renew(self, ttl_s: float | None = None) -> None:
        """Keeps the snapshot for ``ttl_s`` from now. Raises SnapshotTooOld if it has ended."""
        self._db.store.renew(self._lease.id, ttl_s)

    def to_arrow(
        self,
        table: str,
        prefix: Sequence[Any] = (),
        start: Sequence[Any] | None = None,
        end: Sequence[Any] | None = None,
        where: Expr | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> pa.Table:
        """A scan as one Arrow table."""
        import pyarrow as pa

        schema = self._db._schema(table)
        wanted = wanted_scan(schema, prefix, start, end, where, columns, limit, reverse)
        full = arrow_schema(schema)
        narrow = pa.schema([full.field(name) for name in schema.output_columns(columns)])
        return pa.Table.from_batches(list(self._batches(schema, wanted)), narrow)

    def _get(
        self, schema: TableSchema, keys: list[tuple[Any, ...]], columns: Sequence[str] | None
    ) -> list[dict[str, Any] | None]:
        return self._db.store.get(self._lease, schema, keys, columns)

    def _batches(self, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]:
        return self._db.store.scan(self._lease, schema, wanted)
