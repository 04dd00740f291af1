"""The database behind a server, for asyncio: the faces of ``kivi.client.core``, awaited.

Names and arguments are those of ``kivi.api.interface``, and so is the documentation of what is not explained here.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Coroutine, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from kivi.aio.appender import Appender
from kivi.aio.live import Subscription
from kivi.aio.transport import Transport
from kivi.api import interface
from kivi.api.alerting import AlertArguments, SilenceArguments, drop_alert_name
from kivi.api.arguments import (
    NO_ARGUMENTS,
    AggregateArguments,
    AlterAggregateArguments,
    AlterTableArguments,
    AppenderArguments,
    BatchScanArguments,
    ChangesArguments,
    GetArguments,
    GetNowArguments,
    LevelsArguments,
    OrderedScanArguments,
    QuestionArguments,
    RollupArguments,
    ScanArguments,
    SqlArguments,
    SubscribeArguments,
    SummaryArguments,
    TailArguments,
    TransactionArguments,
    ViewArguments,
    WholeArguments,
    check_awaitable,
    check_work,
    client_timeout_s,
    endpoint_name,
    patience_s,
    reads_fresh,
    retract_arguments,
    summary_arguments,
    table_name,
    takes,
    windows_arguments,
)
from kivi.api.frames import frame_of
from kivi.api.hierarchies import HierarchyArguments
from kivi.api.interface import BATCH_ROWS, documented_by
from kivi.api.match_arguments import MatchArguments, matches_arguments
from kivi.api.retry import Retries
from kivi.api.rules import RuleArguments
from kivi.api.topics import ReachedArguments, StoreArguments, SubscribersArguments
from kivi.api.writes import Write
from kivi.arrow.columns import rows_from_batch
from kivi.client import alerting, appends, declarations, topics
from kivi.client.core import Core
from kivi.client.elsewhere import AnyNode, get_elsewhere, order_of
from kivi.client.messages import read_batches
from kivi.client.pages import PageReader
from kivi.client.steps import Steps, named
from kivi.client.transaction import ANY_SNAPSHOT, SharedSnapshotArguments, TransactionCore
from kivi.errors import InvalidArgument, NotFound, Retryable, SnapshotTooOld, Unavailable
from kivi.model.declarations import event_table_schema, row_table_schema
from kivi.model.given import flag
from kivi.wire import methods
from kivi.wire.methods import Tls

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.api.dataset import Dataset
    from kivi.client.steps import Page

__all__ = ["Database", "Snapshot", "Transaction", "connect"]

LOOP_PATIENCE_S: Final = 5.0
"""For so long a read of another thread waits until the event loop begins with it."""
_ELSEWHERE: Final = "read relations, datasets and lazy frames in asyncio.to_thread(...), where the loop does not wait"

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


async def connect(
    endpoint: str = methods.DEFAULT_ENDPOINT,
    access_token: str | None = None,
    tls: Tls | bool | str | None = None,
    timeout: float | None = 10.0,  # noqa: ASYNC109 (of every call to come)
    read: str = "any",
) -> Database:
    """A client of the server at ``endpoint`` ("host:port"), or of a cluster: of one of its nodes ("a:7420,b:7420"), and
    of another one when that one is lost, with all that this client has seen. Raises Unavailable, Unauthenticated.

    ``tls``: True for the system's authorities, a CA file's path, or a ``Tls``. ``timeout``: how long, in
    seconds, a call waits for its answer; None waits for ever. ``read``: "any", or "fresh" for snapshots that have all
    that was acknowledged before they were asked for, by whatever node; each costs a round of the cluster's log.
    """
    db = Database(endpoint_name(endpoint), access_token, tls, client_timeout_s(timeout), reads_fresh(read))
    await db._transport.connect()
    return db


def asks(steps: Callable[Concatenate[C, P], Steps[T]]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method that carries out these steps of its ``_core``."""

    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(steps(self._core, *args, **kwargs))  # type: ignore[no-any-return]

    return named(method, steps)


def reads(
    steps: Callable[Concatenate[TransactionCore, P], Steps[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The same, at whichever node has what is read."""

    async def method(self: _Reads, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return (await self._read(lambda core: steps(core, *args, **kwargs)))[1]

    return named(method, steps)


@documented_by(interface.Reads)
class _Reads:
    def __init__(self, db: Database, core: TransactionCore) -> None:
        self._db = db
        self._core = core
        self._run = db._run

    async def get(self, table: str, key: Sequence[Any], columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row as a dict of key, columns and derived columns, or None. Own writes included."""
        _, rows = await self._read(lambda core: core.get_many(GetArguments(table, (key,), columns)))
        return rows[0]

    async def _read(self, steps: Callable[[TransactionCore], Steps[T]]) -> tuple[TransactionCore, T]:
        """Carries out steps that read, and says where."""
        return self._core, await self._run(steps(self._core))

    get_many = takes(GetArguments)(reads(TransactionCore.get_many))
    started = reads(TransactionCore.started)
    renew = reads(TransactionCore.renew)

    @takes(OrderedScanArguments)
    def scan(self, wanted: ScanArguments) -> AsyncIterator[dict[str, Any]]:
        """``async for`` rows in key order; ``end`` is exclusive. Pages are read as they are asked for."""
        return self._each(wanted)

    async def _each(self, wanted: ScanArguments) -> AsyncGenerator[dict[str, Any]]:
        at, (rows, page) = await self._read(lambda core: core.scan_rows(wanted))
        if rows is not None:
            for row in rows:
                yield row
            return
        async with aclosing(self._pages(at, page)) as batches:
            async for batch in batches:
                for row in rows_from_batch(batch):
                    yield row

    @takes(BatchScanArguments)
    def scan_batches(self, wanted: ScanArguments) -> AsyncIterator[pa.RecordBatch]:
        """``async for`` Arrow record batches, in the scan's order; at most 65,536 rows each, and none of no rows.

        Each is read when it is asked for, and at a server one before that: nothing ever holds the table.
        """
        return self._batches(wanted, BATCH_ROWS)

    @takes(summary_arguments)
    async def summary(self, wanted: SummaryArguments) -> dict[str, Any]:
        """As ``kivi.api.interface.Reads.summary``."""
        _, (_, page) = await self._read(lambda core: core.scan_open(wanted))
        (batch,) = read_batches(page.arrow)
        (row,) = rows_from_batch(batch)
        return wanted.row(row)

    async def _batches(self, wanted: ScanArguments, rows: int | None) -> AsyncGenerator[pa.RecordBatch]:
        at, (_, page) = await self._read(lambda core: core.scan_open(wanted, rows))
        async with aclosing(self._pages(at, page)) as batches:
            async for batch in batches:
                yield batch

    @staticmethod
    async def _pages(at: TransactionCore, page: Page) -> AsyncGenerator[pa.RecordBatch]:
        pages = PageReader()
        try:
            while True:
                batches = pages.batches(page)
                while page.row_groups and (batch := await asyncio.to_thread(next, batches, None)) is not None:
                    yield batch
                for batch in batches:
                    yield batch
                if not page.scan:
                    return
                page = await at.core.transport.run(at.scan_next(page))
        finally:
            if page.scan:
                at.scan_close(page)


@documented_by(interface.Transaction)
class Transaction(_Reads):
    """Reads one snapshot and its own writes; commits all or nothing."""

    async def __aenter__(self) -> Transaction:
        self._core.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._core.release()
        elif not self._core.ended:
            await self._run(self._core.commit())

    commit = asks(TransactionCore.commit)
    append = asks(TransactionCore.append)
    write = asks(TransactionCore.write_rows)
    append_stages = asks(TransactionCore.append_stages)
    overwrite = asks(TransactionCore.overwrite)
    retract = takes(retract_arguments)(asks(TransactionCore.retract))

    async def rollback(self) -> None:
        self._core.release()

    @property
    def start_ts(self) -> int:
        """The snapshot, once an answer has told it (any read, or the commit); ``await started()`` asks."""
        return _known(self._core)

    @property
    def commit_ts(self) -> int | None:
        return self._core.commit_ts

    async def put(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        await self._write(table, Write("put", key, values))

    async def delta(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        await self._write(table, Write("delta", key, values))

    async def insert(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        await self._write(table, Write("insert", key, values))

    async def delete(self, table: str, key: Sequence[Any]) -> None:
        await self._write(table, Write("delete", key))

    async def guard(self, table: str, key: Sequence[Any], column: str | None = None) -> None:
        await self._write(table, Write("guard", key, column=column))

    async def _write(self, table: str, write: Write) -> None:
        left = self._core.write(table, write)
        if left is not None:
            await self._run(left)


@documented_by(interface.Snapshot)
class Snapshot(AnyNode, _Reads):
    """A read-only view at one timestamp: of one node of a cluster, and, where that does not hold all that is read, of
    others."""

    def __init__(self, db: Database, wanted: SharedSnapshotArguments) -> None:
        AnyNode.__init__(self, db, wanted)
        _Reads.__init__(self, db, self._core)

    async def _read(self, steps: Callable[[TransactionCore], Steps[T]]) -> tuple[TransactionCore, T]:
        deadline, core = self._db._core.deadline(), self._core
        try:
            return core, await core.core.transport.run(steps(core))
        except Unavailable as error:
            refused = error
        return await self._run(self._follow(deadline, refused, steps))

    async def __aenter__(self) -> Snapshot:
        if not self._core.shared:
            self._core.begin()
        try:  # ``ts`` is an attribute: it has to be known from here on
            await self._read(TransactionCore.open_shared if self._core.shared else TransactionCore.started)
        except BaseException:  # ``__aexit__`` is not called if ``__aenter__`` raises
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def renew(self, ttl_s: float | None = None) -> None:
        self._renew_others(ttl_s)
        await super().renew(ttl_s)

    async def close(self) -> None:
        left = self._end()
        if left is not None:
            await self._run(left)

    to_arrow = takes(WholeArguments)(reads(TransactionCore.to_arrow))
    rollup = takes(RollupArguments)(reads(TransactionCore.answer))
    query = takes(QuestionArguments)(reads(TransactionCore.answer))
    windows = takes(windows_arguments)(reads(TransactionCore.answer))
    match = takes(MatchArguments)(reads(TransactionCore.answer))
    sql = takes(SqlArguments)(reads(TransactionCore.sql))

    async def dataset(self, table: str, *, commits: bool = False) -> Dataset:
        """As ``kivi.api.interface.Snapshot.dataset``; what reads it runs in another thread (``asyncio.to_thread``)."""
        from kivi.api.dataset import HIDDEN, Dataset

        schema = await self._table_schema(table_name(table))
        loop = asyncio.get_running_loop()

        def read(wanted: ScanArguments) -> Iterator[pa.RecordBatch]:
            with contextlib.suppress(RuntimeError):  # there is none in a thread that waits for nobody
                if asyncio.get_running_loop() is loop:
                    raise InvalidArgument(f"this thread runs the event loop: {_ELSEWHERE}")
            return _pulled(self._batches(wanted, BATCH_ROWS), loop)

        return Dataset(schema, read, HIDDEN if flag(commits, "commits") else ())

    async def relation(self, table: str, connection: Any = None, *, commits: bool = False) -> Any:
        """As ``kivi.api.interface.Snapshot.relation``; it is read in another thread (``asyncio.to_thread``).

        DuckDB raises InvalidInputException, with what to do instead, where the loop's own thread waits for its rows.
        """
        from kivi.sql import relation

        return relation(await self.dataset(table, commits=commits), connection)

    @takes(WholeArguments)
    async def to_pandas(self, wanted: ScanArguments) -> Any:
        return frame_of("pandas", await self._arrow(wanted))

    @takes(WholeArguments)
    async def to_polars(self, wanted: ScanArguments) -> Any:
        return frame_of("polars", await self._arrow(wanted))

    _arrow = reads(TransactionCore.to_arrow)
    _table_schema = reads(TransactionCore.table_schema)

    @property
    def ts(self) -> int:
        return _known(self._core)

    @takes(ChangesArguments)
    def changes(self, wanted: ChangesArguments) -> AsyncIterator[dict[str, Any]]:
        return self._each(wanted)

    @takes(ChangesArguments)
    def change_batches(self, wanted: ChangesArguments) -> AsyncIterator[pa.RecordBatch]:
        return self._batches(wanted, BATCH_ROWS)


def _pulled(batches: AsyncIterator[Any], loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """For another thread than the loop's. Raises InvalidArgument if the loop waits for that thread."""
    while (batch := _next(batches, loop)) is not None:
        yield batch


def _next(batches: AsyncIterator[Any], loop: asyncio.AbstractEventLoop) -> Any:
    begun = threading.Event()

    async def read() -> Any:
        begun.set()
        return await anext(batches, None)

    reading = asyncio.run_coroutine_threadsafe(read(), loop)
    # DuckDB and Polars read in threads of their own, while the one that asked them stands still.
    if not begun.wait(LOOP_PATIENCE_S):
        reading.cancel()
        raise InvalidArgument(f"the event loop has stood still for {LOOP_PATIENCE_S:g} s: {_ELSEWHERE}")
    return reading.result()


def _known(core: TransactionCore) -> int:
    if core.start_ts is None:
        raise InvalidArgument("the snapshot is not known before the first answer: await started() to ask for it")
    return core.start_ts


@documented_by(interface.Database)
class Database:
    """A store behind a server: the same interface as ``kivi.open``. For the tasks of one event loop."""

    def __init__(
        self,
        endpoint: str,
        access_token: str | None,
        tls: Tls | bool | str | None,
        timeout: float | None,
        fresh: bool = False,
    ) -> None:
        self._core = Core(endpoint, timeout, fresh)
        self._transport = Transport(self._core, access_token, methods.as_tls(tls))
        self._core.transport = self._transport
        self._run = self._transport.run
        self._others = dict[str, Database]()
        self._open = functools.partial(Database, access_token=access_token, tls=tls, timeout=timeout, fresh=fresh)

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()
        for one in list(self._others.values()):
            await one.close()

    async def _other(
        self, addresses: Sequence[str], deadline: float, before: Container[str] = ()
    ) -> tuple[str, Database]:
        for address, seconds in order_of(addresses, deadline, self._others, before):
            try:
                other = self._at(address)
                await other._transport.reach(seconds)
                other._core.saw(self._core.seen_ts)
                return address, other
            except Unavailable as error:
                lost = error
        raise lost

    def _at(self, address: str) -> Database:
        """A client of the node there, reached or not. Raises Closed."""
        self._transport.check_open()
        if address not in self._others:
            self._others[address] = self._open(address)
        return self._others[address]

    @property
    def endpoint(self) -> str:
        return self._core.endpoint

    @property
    def _value_bytes_max(self) -> int:
        return self._core.value_bytes_max

    _schema = asks(Core.fetch)  # of an appender, which knows no other columns as long as it lives
    create_table = takes(row_table_schema)(asks(Core.create))
    create_event_table = takes(event_table_schema)(asks(Core.create))
    create_aggregate = takes(AggregateArguments)(asks(Core.create_aggregate))
    create_aggregates = takes(LevelsArguments)(asks(Core.create_aggregates))
    create_view = takes(ViewArguments)(asks(Core.create_view))
    create_hierarchy = takes(HierarchyArguments)(asks(Core.create_hierarchy))
    create_rule = takes(RuleArguments)(asks(declarations.create_rule))
    rules = asks(declarations.rules)
    drop_rule = asks(declarations.drop_rule)
    alter_table = takes(AlterTableArguments)(asks(Core.alter_table))
    alter_aggregate = takes(AlterAggregateArguments)(asks(Core.alter_aggregate))
    tables = asks(Core.tables)
    describe = asks(Core.describe)
    split_points = asks(Core.split_points)
    tail_points = takes(TailArguments)(asks(Core.tail_points))
    drop = asks(Core.drop)
    append = asks(appends.append)
    write = asks(appends.write)
    _append = asks(appends.append_batch)
    outcome = asks(Core.outcome)
    stage = asks(Core.stage)
    discard_stages = asks(Core.discard_stages)
    batch_scopes = asks(Core.batch_scopes)
    subscriptions = asks(Core.subscriptions)
    unsubscribe = asks(Core.unsubscribe)
    store_subscriptions = takes(StoreArguments)(asks(topics.store_subscriptions))
    reached = takes(ReachedArguments)(asks(topics.reached))
    subscribers = takes(SubscribersArguments)(asks(topics.subscribers))
    create_alert = takes(AlertArguments)(asks(alerting.create_alert))
    alerts = asks(alerting.alerts)
    silence = takes(SilenceArguments)(asks(alerting.silence))
    drop_alert = takes(drop_alert_name)(asks(alerting.drop_alert))
    watermark = asks(Core.watermark)
    consolidate = asks(Core.consolidate)
    stats = asks(Core.stats)
    cluster_status = asks(Core.cluster_status)
    move_shards, cancel_move = asks(Core.move_shards), asks(Core.cancel_move)
    rebalance_shards = asks(Core.rebalance_shards)
    forget_node = asks(Core.forget_node)
    verify_cluster = asks(Core.verify_cluster)
    checkpoint = asks(Core.checkpoint)
    backup = asks(Core.backup)

    @takes(GetNowArguments)
    async def get_many(self, wanted: GetNowArguments) -> list[dict[str, Any] | None]:
        return await self._get(wanted)

    # -- transactions ---------------------------------------------------------------------------

    @takes(TransactionArguments, NO_ARGUMENTS)
    def transaction(self, wanted: TransactionArguments) -> Transaction:
        """``async with db.transaction() as tx``: commits on success, rolls back on an exception."""
        return Transaction(self, TransactionCore(self._core, wanted))

    @takes(SharedSnapshotArguments, ANY_SNAPSHOT)
    def snapshot(self, wanted: SharedSnapshotArguments) -> Snapshot:
        """``async with db.snapshot() as snap``: as ``kivi.client.Database.snapshot``."""
        return Snapshot(self, wanted)

    async def get(
        self,
        table: str,
        key: Sequence[Any],
        columns: Sequence[str] | None = None,
        *,
        max_staleness: str | int | dt.timedelta | None = None,
    ) -> dict[str, Any] | None:
        wanted = GetNowArguments(table, (key,), columns, max_staleness=max_staleness)
        return (await self._get(wanted))[0]

    async def _get(self, wanted: GetNowArguments) -> list[dict[str, Any] | None]:
        deadline = self._core.deadline()
        try:
            return await self._run(self._core.get_many(wanted))
        except Unavailable as error:
            refused = error
        return await self._run(get_elsewhere(self, deadline, refused, wanted))

    async def run(
        self,
        fn: Callable[[Transaction], Awaitable[T]],
        timeout: float | None = None,  # noqa: ASYNC109
        *,
        deferred: bool = False,
    ) -> T:
        check_work(fn)
        retries = Retries(patience_s(timeout) if timeout is not None else self._core.timeout_s)
        while True:
            try:
                async with self.transaction(deferred=deferred) as tx:
                    working = fn(tx)
                    check_awaitable(working)
                    result = await working
                return result
            except (Retryable, SnapshotTooOld, NotFound) as error:
                if (pause := retries.pause_s(error)) is None:
                    raise
            await asyncio.sleep(pause)

    @takes(AppenderArguments)
    def appender(self, wanted: AppenderArguments) -> Appender:
        """Events one at a time, sent together: see ``Appender``."""
        return Appender(self, wanted)

    @takes(SubscribeArguments)
    def subscribe(self, wanted: SubscribeArguments) -> Subscription:
        return Subscription(self._core, self._transport, wanted)

    @takes(matches_arguments)
    def subscribe_matches(self, wanted: SubscribeArguments) -> Subscription:
        return Subscription(self._core, self._transport, wanted)
