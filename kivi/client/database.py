"""The client for threads: ``kivi.connect(...)``: the public interface over a server.
One gRPC channel, one session stream (``transport``). What the calls *do* is in ``core`` and
``transaction``, shared with the client for asyncio.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kivi.api import interface
from kivi.api.appender import Appender
from kivi.api.arguments import (
    AggregateArguments,
    GetArguments,
    ScanArguments,
    SubscribeArguments,
    TailArguments,
    TransactionArguments,
    endpoint_name,
    patience_s,
    takes,
)
from kivi.client.core import Core
from kivi.client.live import Live
from kivi.client.messages import read_batches
from kivi.client.transaction import SharedSnapshotArguments, TransactionCore
from kivi.client.transport import Transport
from kivi.wire import methods

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.api.subscription import Subscription
    from kivi.api.writes import Bind
    from kivi.model.changes import TailPoints
    from kivi.model.outcomes import Outcome
    from kivi.model.schema import TableSchema

__all__ = ["Appender", "Database", "Snapshot", "Tls", "Transaction", "connect"]

Tls = methods.Tls


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
    return Database(endpoint_name(endpoint), access_token, tls, patience_s(timeout))


class _Reads(interface.Reads):
    def __init__(self, db: Database, core: TransactionCore) -> None:
        self._db = db
        self._core = core
        self._run = db._run

    def _get(self, wanted: GetArguments) -> list[dict[str, Any] | None]:
        return self._run(self._core.get_many(wanted))

    def _batches(self, wanted: ScanArguments, rows: int | None) -> Generator[pa.RecordBatch]:
        _, page = self._run(self._core.scan_open(wanted, rows))
        return self._pages(page.arrow, page.scan)

    def _rows(self, wanted: ScanArguments) -> Iterator[dict[str, Any]]:
        rows, page = self._run(self._core.scan_rows(wanted))
        return iter(rows) if rows is not None else interface.rows_of(self._pages(page.arrow, page.scan))

    def _pages(self, data: bytes, scan: int) -> Generator[pa.RecordBatch]:
        try:
            while True:
                yield from read_batches(data)
                if not scan:
                    return
                data, scan = self._run(self._core.scan_next(scan))
        finally:
            if scan:
                self._core.scan_close(scan)


class Transaction(_Reads, interface.Transaction):
    def _begin(self) -> None:
        self._core.begin()

    @property
    def _ended(self) -> bool:
        return self._core.ended

    def commit(self) -> int:
        return self._run(self._core.commit())

    def rollback(self) -> None:
        self._core.release()

    @property
    def start_ts(self) -> int:
        return self._run(self._core.started())

    @property
    def commit_ts(self) -> int | None:
        return self._core.commit_ts

    def delta(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        flush = self._db._core.delta(table, self._core, key, values)
        if flush is None:
            super().delta(table, key, **values)
        elif flush:
            self._run(self._core.flush())

    def _write(self, table: str, bind: Bind) -> None:
        flush = self._db._core.write(table, self._core, bind)
        if flush is None:
            flush = self._run(self._db._core.use(table, lambda schema: self._core.write(schema, bind(schema))))
        if flush:
            self._run(self._core.flush())

    def renew(self, ttl_s: float | None = None) -> None:
        self._run(self._core.renew(ttl_s))

    def append(self, table: str, records: Any, late: str = "fail") -> None:
        self._run(self._core.append(self._db._schema(table), records, late))

    def append_stages(self, table: str, stages: Iterable[bytes], late: str = "fail") -> None:
        self._core.append_stages(self._db._schema(table), stages, late)

    def overwrite(self, table: str) -> None:
        self._run(self._db._core.use(table, self._core.overwrite))


class Snapshot(_Reads, interface.Snapshot):
    def __enter__(self) -> Snapshot:
        if self._core.shared:
            self._run(self._core.open_shared())
        else:
            self._core.begin()
        return self

    def close(self) -> None:
        self._core.release()

    @property
    def ts(self) -> int:
        return self._run(self._core.started())

    @property
    def lease(self) -> bytes:
        """Names a shared snapshot for other processes; empty otherwise."""
        return self._core.lease

    def renew(self, ttl_s: float | None = None) -> None:
        self._run(self._core.renew(ttl_s))

    def _to_arrow(self, wanted: ScanArguments) -> pa.Table:
        return self._run(self._core.to_arrow(wanted))


class Database(interface.Database[Transaction, Snapshot]):
    """A store behind a server."""

    def __init__(
        self, endpoint: str, access_token: str | None, tls: Tls | bool | str | None, timeout: float | None
    ) -> None:
        self._core = Core(endpoint, timeout)
        self._timeout_s = timeout
        self._transport = Transport(self._core, access_token, methods.as_tls(tls))
        self._core.transport = self._transport
        self._run = self._transport.run
        self._transport.connect()

    def close(self) -> None:
        self._transport.close()

    @property
    def endpoint(self) -> str:
        return self._core.endpoint

    def _schema(self, table: str) -> TableSchema:
        return self._core.schemas.get(table) or self._run(self._core.fetch(table))

    @property
    def _value_bytes_max(self) -> int:
        return self._core.value_bytes_max

    def _create(self, schema: TableSchema) -> None:
        self._run(self._core.create(schema))

    def _create_aggregate(self, wanted: AggregateArguments) -> None:
        self._run(self._core.create_aggregate(wanted))

    def tables(self) -> list[str]:
        return self._run(self._core.tables())

    def describe(self, name: str) -> dict[str, Any]:
        return self._run(self._core.describe(name))

    def split_points(self, table: str, rows: int = 500_000) -> list[tuple[Any, ...]]:
        return self._run(self._core.split_points(table, rows))

    @takes(TailArguments)
    def tail_points(self, wanted: TailArguments) -> TailPoints:
        return self._run(self._core.tail_points(wanted))

    def drop(self, name: str) -> None:
        self._run(self._core.drop(name))

    def _transaction(self, wanted: TransactionArguments) -> Transaction:
        return Transaction(self, TransactionCore(self._core, wanted))

    @takes(SharedSnapshotArguments)
    def snapshot(self, wanted: SharedSnapshotArguments) -> Snapshot:
        """A read-only view. ``as_of``: a commit timestamp, or a moment. ``ttl_s``: how long it is kept unless renewed.

        ``shared`` makes one that other processes may open by its ``lease`` and that outlives this client's
        connection, until its maker closes it or ``ttl_s`` has passed without renewal.
        """
        return Snapshot(self, TransactionCore(self._core, wanted))

    def _get(self, wanted: GetArguments) -> list[dict[str, Any] | None]:
        return self._run(self._core.get_many(wanted))

    def append(
        self,
        table: str,
        records: Any,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        late: str = "fail",
    ) -> int:
        return self._run(self._core.append(table, records, token, batch, late))

    def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int:
        return self._run(self._core.append(table, events, token, None, late, each=each))

    def outcome(self, token: str, place: int | None = None) -> Outcome:
        return self._run(self._core.outcome(token, place))

    def stage(self, table: str, records: Any, owner: str = "") -> bytes:
        return self._run(self._core.stage(table, records, owner))

    def discard_stages(self, ids: Iterable[bytes]) -> None:
        self._run(self._core.discard_stages(ids))

    def batch_scopes(self, prefix: str = "") -> list[str]:
        return self._run(self._core.batch_scopes(prefix))

    @takes(SubscribeArguments)
    def subscribe(self, wanted: SubscribeArguments) -> Subscription:
        return Live(self._core, self._transport, wanted, self._schema(wanted.table))

    def subscriptions(self, user: str = "") -> list[dict[str, Any]]:
        return self._run(self._core.subscriptions(user))

    def unsubscribe(self, name: str, user: str = "") -> None:
        self._run(self._core.unsubscribe(name, user))

    def watermark(self) -> int:
        return self._run(self._core.watermark())

    def consolidate(self) -> None:
        self._run(self._core.consolidate())

    def stats(self) -> dict[str, int | float]:
        return self._run(self._core.stats())

    def checkpoint(self, path: str) -> None:
        self._run(self._core.checkpoint(path))

    def backup(self, repository: Any, *, keep: int | None = None) -> dict[str, Any]:
        return self._run(self._core.backup(repository, keep))
