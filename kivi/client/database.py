"""The client for threads: ``kivi.connect(...)``: the public interface over a server.
One gRPC channel, one session stream (``transport``). What the calls *do* is in ``core`` and
``transaction``, shared with the client for asyncio.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from kivi.api import interface
from kivi.api.alerting import AlertArguments, SilenceArguments, drop_alert_name
from kivi.api.appender import Appender
from kivi.api.arguments import (
    NO_ARGUMENTS,
    AggregateArguments,
    AlterAggregateArguments,
    AlterTableArguments,
    GetNowArguments,
    LevelsArguments,
    QuestionArguments,
    ScanArguments,
    SubscribeArguments,
    TailArguments,
    TransactionArguments,
    ViewArguments,
    client_timeout_s,
    endpoint_name,
    reads_fresh,
    retract_arguments,
    takes,
)
from kivi.api.hierarchies import HierarchyArguments
from kivi.api.interface import documented_by
from kivi.api.rules import RuleArguments
from kivi.api.topics import ReachedArguments, StoreArguments, SubscribersArguments
from kivi.client import alerting, appends, declarations, topics
from kivi.client.core import Core
from kivi.client.elsewhere import AnyNode, get_elsewhere, order_of
from kivi.client.live import Live
from kivi.client.pages import PageReader
from kivi.client.steps import Steps, named, silent
from kivi.client.transaction import ANY_SNAPSHOT, SharedSnapshotArguments, TransactionCore
from kivi.client.transport import Transport
from kivi.errors import Unavailable
from kivi.wire import methods

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.api.subscription import Subscription
    from kivi.api.writes import Write
    from kivi.client.steps import Page

__all__ = ["Appender", "Database", "Snapshot", "Tls", "Transaction", "connect", "reached_first"]

_REACH_S: Final = 5.0
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
Tls = methods.Tls


def connect(
    endpoint: str = methods.DEFAULT_ENDPOINT,
    access_token: str | None = None,
    tls: Tls | bool | str | None = None,
    timeout: float | None = 10.0,
    read: str = "any",
) -> Database:
    """A client of the server at ``endpoint`` ("host:port"), or of a cluster: of one of its nodes ("a:7420,b:7420"), and
    of another one when that one is lost, with all that this client has seen. Raises Unavailable, Unauthenticated.

    ``tls``: True for the system's authorities, a CA file's path, or a ``Tls``. ``timeout``: how long, in
    seconds, a call waits for its answer; None waits for ever. ``read``: "any", or "fresh" for snapshots that have all
    that was acknowledged before they were asked for, by whatever node; each costs a round of the cluster's log.
    """
    db = Database(endpoint_name(endpoint), access_token, tls, client_timeout_s(timeout), reads_fresh(read))
    db._transport.connect()
    return db


def reached_first(db: Database, nodes: Sequence[str]) -> Database | None:
    """A client, that is closed with ``db`` and has seen what it has, of the first of these nodes of its cluster if that
    is reached, else of another one of them; None if none is."""
    if nodes:
        with contextlib.suppress(Unavailable):
            return db._other(nodes, time.monotonic() + _REACH_S, nodes[:1])[1]
    return None


def asks(steps: Callable[Concatenate[C, P], Steps[R]]) -> Callable[Concatenate[Any, P], R]:
    """A method that carries out these steps of its ``_core``."""

    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(steps(self._core, *args, **kwargs))  # type: ignore[no-any-return]

    return named(method, steps)


def reads(steps: Callable[Concatenate[TransactionCore, P], Steps[R]]) -> Callable[Concatenate[Any, P], R]:
    """The same, at whichever node has what is read."""

    def method(self: _Reads, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._read(lambda core: steps(core, *args, **kwargs))[1]

    return named(method, steps)


@documented_by(interface.Reads)
class _Reads(interface.Reads):
    def __init__(self, db: Database, core: TransactionCore) -> None:
        self._db = db
        self._core = core
        self._run = db._run

    _get = reads(TransactionCore.get_many)
    renew = reads(TransactionCore.renew)

    def _read(self, steps: Callable[[TransactionCore], Steps[R]]) -> tuple[TransactionCore, R]:
        """Carries out steps that read, and says where."""
        return self._core, self._run(steps(self._core))

    def _batches(self, wanted: ScanArguments | QuestionArguments, rows: int | None) -> Generator[pa.RecordBatch]:
        at, (_, page) = self._read(lambda core: core.scan_open(wanted, rows))
        return self._pages(at, page)

    def _rows(self, wanted: ScanArguments) -> Iterator[dict[str, Any]]:
        at, (rows, page) = self._read(lambda core: core.scan_rows(wanted))
        return iter(rows) if rows is not None else interface.rows_of(self._pages(at, page))

    @staticmethod
    def _pages(at: TransactionCore, page: Page) -> Generator[pa.RecordBatch]:
        pages = PageReader()
        try:
            while True:
                yield from pages.batches(page)
                if not page.scan:
                    return
                page = at.core.transport.run(at.scan_next(page))
        finally:
            if page.scan:
                at.scan_close(page)


@documented_by(interface.Transaction)
class Transaction(_Reads, interface.Transaction):
    def _begin(self) -> None:
        self._core.begin()

    @property
    def _ended(self) -> bool:
        return self._core.ended

    commit = asks(TransactionCore.commit)
    append = asks(TransactionCore.append)
    write = asks(TransactionCore.write_rows)
    append_stages = asks(TransactionCore.append_stages)
    overwrite = asks(TransactionCore.overwrite)
    retract = takes(retract_arguments)(asks(TransactionCore.retract))

    def rollback(self) -> None:
        self._core.release()

    @property
    def start_ts(self) -> int:
        return self._run(self._core.started())

    @property
    def commit_ts(self) -> int | None:
        return self._core.commit_ts

    def _write(self, table: str, write: Write) -> None:
        left = self._core.write(table, write)
        if left is not None:
            self._run(left)


@documented_by(interface.Snapshot)
class Snapshot(AnyNode, _Reads, interface.Snapshot):
    """Of one node of a cluster; and, where that does not hold all that is read, of others at the same timestamp."""

    def __init__(self, db: Database, wanted: SharedSnapshotArguments) -> None:
        AnyNode.__init__(self, db, wanted)
        _Reads.__init__(self, db, self._core)
        self._turn = threading.RLock()
        """Whoever asks for the first answer has it until that has come, or will not. It knows who has it, from within
        the step that takes it: so an interrupt, wherever it comes, leaves it to others."""

    def _read(self, steps: Callable[[TransactionCore], Steps[R]]) -> tuple[TransactionCore, R]:
        deadline = self._db._core.deadline()
        if self._is_fixed:
            return self._answered(steps, deadline)
        try:
            self._take_turn(deadline)
            return self._answered(steps, deadline)
        finally:
            try:  # noqa: SIM105 (which would call something before that)
                self._turn.release()  # itself: an interrupt comes where a function begins, or after one
            except RuntimeError:  # this thread does not have it, or not any more
                pass

    def _answered(self, steps: Callable[[TransactionCore], Steps[R]], deadline: float) -> tuple[TransactionCore, R]:
        core = self._core
        try:
            return core, core.core.transport.run(steps(core))
        except Unavailable as error:
            refused = error
        return self._run(self._follow(deadline, refused, steps))

    def _take_turn(self, deadline: float) -> None:
        """It has it then, unless the first answer has come meanwhile. Raises Timeout."""
        turn = self._turn
        if not (turn.acquire(blocking=False) or turn.acquire(timeout=max(0.0, deadline - time.monotonic()))):
            raise silent(self._core.core.endpoint, self._core.core.timeout_s)
        if self._is_fixed:
            self._let_others()

    def _let_others(self) -> None:
        try:  # noqa: SIM105 (each first read of a snapshot passes here)
            self._turn.release()
        except RuntimeError:  # this thread does not have it
            pass

    def _told(self) -> None:
        super()._told()
        self._let_others()

    def __enter__(self) -> Snapshot:
        if self._core.shared:
            self._read(TransactionCore.open_shared)
        else:
            self._core.begin()
        return self

    def renew(self, ttl_s: float | None = None) -> None:
        self._renew_others(ttl_s)
        super().renew(ttl_s)

    def close(self) -> None:
        left = self._end()
        if left is not None:
            self._run(left)

    @property
    def ts(self) -> int:
        return self._read(TransactionCore.started)[1]

    _table = reads(TransactionCore.to_arrow)
    _table_schema = reads(TransactionCore.table_schema)
    _sql = reads(TransactionCore.sql)
    _answer = reads(TransactionCore.answer)


@documented_by(interface.Database)
class Database(interface.Database[Transaction, Snapshot]):
    """A store behind a server."""

    def __init__(
        self,
        endpoint: str,
        access_token: str | None,
        tls: Tls | bool | str | None,
        timeout: float | None,
        fresh: bool = False,
    ) -> None:
        self._core = Core(endpoint, timeout, fresh)
        self._timeout_s = timeout
        self._others, self._other_lock = dict[str, Database](), threading.Lock()
        self._open = functools.partial(Database, access_token=access_token, tls=tls, timeout=timeout, fresh=fresh)
        self._transport = Transport(self._core, access_token, methods.as_tls(tls))
        self._core.transport = self._transport
        self._run = self._transport.run

    def close(self) -> None:
        self._transport.close()
        with self._other_lock:
            others = list(self._others.values())
        for one in others:
            one.close()

    def _other(self, addresses: Sequence[str], deadline: float, before: Container[str] = ()) -> tuple[str, Database]:
        for address, seconds in order_of(addresses, deadline, self._others, before):
            try:
                other = self._at(address)
                other._transport.reach(seconds)
                other._core.saw(self._core.seen_ts)
                return address, other
            except Unavailable as error:
                lost = error
        raise lost

    def _at(self, address: str) -> Database:
        """A client of the node there, reached or not: no other thread waits for that. Raises Closed."""
        with self._other_lock:
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
    _create = asks(Core.create)
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

    def _get(self, wanted: GetNowArguments) -> list[dict[str, Any] | None]:
        deadline = self._core.deadline()
        try:
            return self._run(self._core.get_many(wanted))
        except Unavailable as error:
            refused = error
        return self._run(get_elsewhere(self, deadline, refused, wanted))

    @takes(TransactionArguments, NO_ARGUMENTS)
    def transaction(self, wanted: TransactionArguments) -> Transaction:
        return Transaction(self, TransactionCore(self._core, wanted))

    @takes(SharedSnapshotArguments, ANY_SNAPSHOT)
    def snapshot(self, wanted: SharedSnapshotArguments) -> Snapshot:
        """A read-only view. ``as_of``: a commit timestamp, or a moment. ``ttl_s``: how long it is kept unless renewed.

        ``shared`` makes one that other processes may open by its ``lease`` and that outlives this client's
        connection, until its maker closes it or ``ttl_s`` has passed without renewal.
        """
        return Snapshot(self, wanted)

    def _subscribe(self, wanted: SubscribeArguments) -> Subscription:
        return Live(self._core, self._transport, wanted)
