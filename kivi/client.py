"""The client for threads: ``kivi.connect(...)``: the faces of ``client_core``, called.

One gRPC channel, one session stream (``client_transport``). What the calls *do* is in ``client_core`` and
``client_transaction``, shared with the client for asyncio.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kivi import client_methods as methods
from kivi.appending import Appender
from kivi.arrow.columns import rows_from_batch
from kivi.client_core import Core
from kivi.client_messages import read_batches
from kivi.client_steps import backoff_s
from kivi.client_transaction import TransactionCore
from kivi.client_transport import Transport
from kivi.definitions import TimeSlot
from kivi.errors import Retryable, SnapshotTooOld
from kivi.schema import OperatorCall, TableSchema

if TYPE_CHECKING:
    import datetime as dt

    import pyarrow as pa

    from kivi.expr import Expr
    from kivi.outcomes import Outcome

__all__ = ["Appender", "Database", "Snapshot", "Tls", "Transaction", "connect"]

Tls = methods.Tls
T = TypeVar("T")


def connect(
    endpoint: str = methods.DEFAULT_ENDPOINT,
    access_token: str | None = None,
    tls: Tls | bool | str | None = None,
    timeout: float | None = 10.0,
) -> Database:
    """A client of the server at ``endpoint`` ("host:port"). Raises Unavailable, Unauthenticated.

    ``tls``: True for the system's authorities, a CA file's path, or a ``Tls``. ``timeout``: how long, in
    seconds, a call waits for its answer; None waits for ever.
    """
    return Database(endpoint, access_token, tls, timeout)


class Database:
    """A store behind a server: the same interface as ``kivi.open``. Safe to use from many threads."""

    def __init__(
        self, endpoint: str, access_token: str | None, tls: Tls | bool | str | None, timeout: float | None
    ) -> None:
        self._core = Core(endpoint, timeout)
        self._transport = Transport(self._core, access_token, methods.as_tls(tls))
        self._core.transport = self._transport
        self._run = self._transport.run
        self._transport.connect()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def endpoint(self) -> str:
        return self._core.endpoint

    # -- schema ---------------------------------------------------------------------------------

    def create_table(
        self,
        name: str,
        key: Mapping[str, object],
        columns: Mapping[str, object],
        history: str | int | dt.timedelta | None = None,
    ) -> None:
        """A row table; ``history`` keeps older versions for ``as_of``. Raises AlreadyExists, SchemaError."""
        self._run(self._core.create_table(name, key, columns, history))

    def create_event_table(
        self,
        name: str,
        event_time: str,
        columns: Mapping[str, object],
        retention: str | int | dt.timedelta | None = None,
    ) -> None:
        """An append-only event table. Raises AlreadyExists, SchemaError."""
        self._run(self._core.create_event_table(name, event_time, columns, retention))

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
        self._run(self._core.create_aggregate(name, source, group_by, measures, derived, history, progress))

    def tables(self) -> list[str]:
        """The names of all tables, in order."""
        return self._run(self._core.tables())

    def describe(self, name: str) -> dict[str, Any]:
        """A table's definition and what is cheap to know about its contents, as plain data."""
        return self._run(self._core.describe(name))

    def drop(self, name: str) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates depend on it."""
        self._run(self._core.drop(name))

    # -- transactions ---------------------------------------------------------------------------

    def transaction(
        self,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        min_snapshot: int | None = None,
    ) -> Transaction:
        """``with db.transaction() as tx``: commits on success, rolls back on an exception."""
        return Transaction(self, TransactionCore(self._core, token=token, batch=batch, min_snapshot=min_snapshot))

    def run(self, fn: Callable[[Transaction], T], timeout: float | None = None) -> T:
        """``fn(tx)`` in a transaction; after a conflict again, on a new snapshot, until ``timeout`` (seconds).

        The function is rerun from the start, so what it read is never written back stale. It must not
        have effects outside the transaction. CommitUnknown is never rerun.
        """
        limit = timeout if timeout is not None else self._core.timeout_s
        deadline = time.monotonic() + (limit if limit is not None else 1e9)
        for attempt in itertools.count():
            try:
                with self.transaction() as tx:
                    result = fn(tx)
                return result
            except (Retryable, SnapshotTooOld):
                pause = backoff_s(attempt)
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
        shared: bool = False,
        lease: bytes | None = None,
    ) -> Snapshot:
        """A read-only view. ``as_of``: a commit timestamp, or a moment.

        ``shared`` makes one that other processes may open by its ``lease`` and that outlives this client's
        connection, until its maker closes it or ``ttl_s`` has passed without renewal.
        """
        core = TransactionCore(
            self._core,
            read_only=True,
            as_of=as_of,
            min_snapshot=min_snapshot,
            ttl_s=ttl_s,
            shared=shared,
            lease=lease,
        )
        return Snapshot(self, core)

    # -- bulk -----------------------------------------------------------------------------------

    def append(self, table: str, records: Any, token: str | None = None, batch: tuple[str, int] | None = None) -> int:
        """Events (dicts, an Arrow table or batch) in one transaction; its commit timestamp."""
        return self._run(self._core.append(table, records, token, batch))

    def outcome(self, token: str) -> Outcome:
        """The commit timestamp, kivi.ABORTED (final) or kivi.UNKNOWN."""
        return self._run(self._core.outcome(token))

    def appender(self, table: str, linger_ms: float = 5, max_events: int = 10_000) -> Appender:
        """Events one at a time, sent together: see ``Appender``."""
        return Appender(self, table, linger_ms, max_events)

    def stage(self, table: str, records: Any, owner: str = "") -> bytes:
        """Events made durable and invisible, for ``tx.append_stages``; the stage's id."""
        return self._run(self._core.stage(table, records, owner))

    def discard_stages(self, ids: Iterable[bytes]) -> None:
        """Gives stages up. Those that were committed are passed over."""
        self._run(self._core.discard_stages(ids))

    def batch_scopes(self, prefix: str = "") -> list[str]:
        """The scopes of batch tokens that were ever committed, by prefix."""
        return self._run(self._core.batch_scopes(prefix))

    # -- operation ------------------------------------------------------------------------------

    def watermark(self) -> int:
        """The snapshot a new reader gets."""
        return self._run(self._core.watermark())

    def consolidate(self) -> None:
        """Folds everything up to the watermark into base rows now."""
        self._run(self._core.consolidate())

    def stats(self) -> dict[str, int | float]:
        """Counters and sizes, as flat names."""
        return self._run(self._core.stats())

    def checkpoint(self, path: str) -> None:
        """A consistent copy of the store in a new directory ``path`` of the server's machine."""
        self._run(self._core.checkpoint(path))

    def _schema(self, table: str) -> TableSchema:
        return self._core.schemas.get(table) or self._run(self._core.fetch(table))


class _Reads:
    """What transactions and snapshots have in common."""

    def __init__(self, db: Database, core: TransactionCore) -> None:
        self._db = db
        self._core = core
        self._run = db._run

    def get(self, table: str, key: Sequence[Any], columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row as a dict of key, columns and derived columns, or None. Own writes included."""
        return self._run(self._core.get_many(table, (key,), columns))[0]

    def get_many(
        self, table: str, keys: Iterable[Sequence[Any]], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any] | None]:
        """One row or None per key, in the order of the keys."""
        return self._run(self._core.get_many(table, keys, columns))

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
        """Rows in key order; ``end`` is exclusive. The first page is read at once, the rest as it is asked for."""
        args = {
            "prefix": prefix,
            "start": start,
            "end": end,
            "where": where,
            "columns": columns,
            "limit": limit,
            "reverse": reverse,
        }
        _, data, scan = self._run(self._core.scan_open(table, args))
        return self._rows(data, scan)

    def _rows(self, data: bytes, scan: int) -> Iterator[dict[str, Any]]:
        try:
            while True:
                for batch in read_batches(data):
                    yield from rows_from_batch(batch)
                if not scan:
                    return
                data, scan = self._run(self._core.scan_next(scan))
        finally:
            if scan:
                self._core.scan_close(scan)


class Transaction(_Reads):
    """Reads one snapshot and its own writes; commits all or nothing."""

    def __enter__(self) -> Transaction:
        self._core.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if not self._core.ended:
                self.commit()
        else:
            self._core.release()

    def commit(self) -> int:
        """Commits now; the ``with`` block does it at its end otherwise."""
        return self._run(self._core.commit())

    def rollback(self) -> None:
        self._core.release()

    @property
    def start_ts(self) -> int:
        """The snapshot: the commit timestamp up to which everything is seen."""
        return self._run(self._core.started())

    @property
    def commit_ts(self) -> int | None:
        """The commit timestamp once committed; for a transaction that wrote nothing, its snapshot if it was read."""
        return self._core.commit_ts

    def _write(self, table: str, fn: Callable[[TableSchema], bool]) -> None:
        if self._run(self._db._core.use(table, fn)):
            self._run(self._core.flush())

    def put(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Upsert of the named columns."""
        self._write(table, lambda schema: self._core.put(schema, key, values))

    def delta(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Updates delta columns by their operators; never conflicts with other deltas."""
        self._write(table, lambda schema: self._core.delta(schema, key, values))

    def insert(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """A new row. Raises RowExists here if it is there, and the transaction may go on."""
        self._write(table, lambda schema: self._core.insert(schema, key, values))

    def delete(self, table: str, key: Sequence[Any]) -> None:
        self._write(table, lambda schema: self._core.delete(schema, key))

    def guard(self, table: str, key: Sequence[Any], column: str | None = None) -> None:
        """Makes a read of this cell (or of the row's existence) conflict like a write."""
        self._write(table, lambda schema: self._core.guard(schema, key, column))

    def append(self, table: str, records: Any) -> None:
        """Events: dicts, an Arrow table or record batch."""
        self._run(self._core.append(self._db._schema(table), records))

    def append_stages(self, table: str, stages: Iterable[bytes]) -> None:
        """Events that were staged before."""
        self._core.append_stages(self._db._schema(table), stages)


class Snapshot(_Reads):
    """A read-only view at one timestamp."""

    def __enter__(self) -> Snapshot:
        if self._core._begin.shared:
            self._run(self._core.open_shared())
        else:
            self._core.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._core.release()

    def close(self) -> None:
        self._core.release()

    @property
    def ts(self) -> int:
        """The commit timestamp up to which everything is seen."""
        return self._run(self._core.started())

    @property
    def lease(self) -> bytes:
        """Names a shared snapshot for other processes; empty otherwise."""
        return self._core.lease

    def renew(self, ttl_s: float | None = None) -> None:
        """Keeps the snapshot for ``ttl_s`` from now. Raises SnapshotTooOld if it has ended."""
        self._run(self._core.renew(ttl_s))

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
        args = {
            "prefix": prefix,
            "start": start,
            "end": end,
            "where": where,
            "columns": columns,
            "limit": limit,
            "reverse": reverse,
        }
        return self._run(self._core.to_arrow(table, args))
