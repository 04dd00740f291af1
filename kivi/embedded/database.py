"""The embedded database: ``kivi.open``. The public interface over a ``Store`` in this process.

The same methods, arguments and errors as the clients'; one suite runs against all of them. Converts between what a
caller writes and stored form, and holds no rules.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kivi.alerts import Alerts
from kivi.api import interface
from kivi.api.arguments import (
    NO_ARGUMENTS,
    AggregateArguments,
    AlterAggregateArguments,
    AlterTableArguments,
    GetArguments,
    LevelsArguments,
    QuestionArguments,
    ScanArguments,
    SnapshotArguments,
    SqlArguments,
    SubscribeArguments,
    TailArguments,
    TransactionArguments,
    ViewArguments,
    check_batch,
    check_keep,
    check_move,
    check_names,
    check_place,
    check_rebalance,
    check_rows,
    check_token,
    check_ttl,
    directory,
    drops_late,
    move_id,
    node_name,
    plain_text,
    retract_arguments,
    stage_ids,
    table_name,
    takes,
)
from kivi.api.hierarchies import HierarchyArguments
from kivi.api.match_arguments import AnswerArguments
from kivi.api.results import Result
from kivi.api.rules import RuleArguments, rule_name
from kivi.api.subscription import Follower, Subscription, listed, told
from kivi.arrow.records import event_batch, row_batch, table_batch
from kivi.embedded.alerting import Alerting
from kivi.embedded.topics import Topics
from kivi.errors import InvalidArgument, KiviError, NotFound
from kivi.live.hub import Hub
from kivi.model.event_files import can_be_shared
from kivi.model.given import flag
from kivi.model.levels import declared_schema, level_schemas
from kivi.model.outcomes import ABORTED, UNKNOWN, Outcome
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Update
from kivi.model.views import view_schema
from kivi.runtime.settings import Settings
from kivi.store.facade import Lease, Store, Txn

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.api.dataset import Dataset
    from kivi.api.writes import Write
    from kivi.model.changes import TailPoints

__all__ = ["Database", "Snapshot", "Transaction", "open_database"]


def open_database(path: Any = None, **settings: Any) -> Database:
    """``kivi.open("data/", **settings)``: one process owns the directory; None keeps everything in memory.

    Settings are the fields of ``kivi.runtime.settings.Settings``. Raises NotAStore, FormatTooNew, StoreInUse, DataLoss,
    InvalidArgument for an unknown setting.
    """
    return Database(Store.open(None if path is None else directory(path), settings=Settings.of(settings)))


class Transaction(interface.Transaction):
    def __init__(self, db: Database, wanted: TransactionArguments) -> None:
        self._db = db
        self._wanted = wanted
        self._txn: Txn | None = None

    def _started(self) -> Txn:
        if self._txn is None:
            store = self._db.store
            self._txn = store.transaction(store.begin(min_snapshot=self._wanted.min_snapshot))
            self._txn.deferred = self._wanted.deferred
        return self._txn

    def _open(self) -> Txn:
        txn = self._started()
        if txn.closed:
            raise InvalidArgument(f"the transaction is over: {txn.closed}; begin another")
        return txn

    def _begin(self) -> None:
        self._started()

    @property
    def _ended(self) -> bool:
        return bool(self._started().closed)

    def commit(self) -> int:
        return self._db.store.commit_wait(self._open(), token=self._wanted.token, batch=self._wanted.batch)

    def rollback(self) -> None:
        if self._txn is not None:
            self._txn.rollback()

    @property
    def start_ts(self) -> int:
        return self._started().start_ts

    @property
    def commit_ts(self) -> int | None:
        return self._txn.commit_ts if self._txn is not None else None

    def _write(self, table: str, write: Write) -> None:
        txn = self._open()
        schema = self._db._schema(table, txn.lease)
        key, values = write.bound(schema)
        match write.kind:
            case "put":
                txn.put(schema, key, values)
            case "delta":
                txn.delta(schema, key, values)
            case "insert":
                txn.insert(schema, key, values)
            case "delete":
                txn.delete(schema, key)
            case "guard":
                txn.guard(schema, key, write.column)

    def renew(self, ttl_s: float | None = None) -> None:
        check_ttl(ttl_s)
        self._db.store.renew(self._open().lease.id, ttl_s)

    def append(self, table: str, records: Any, late: str = "fail") -> None:
        txn, drop_late = self._open(), drops_late(late)
        schema = self._db._schema(table, txn.lease)
        txn.append(schema, event_batch(schema, records), drop_late=drop_late)

    def write(self, table: str, records: Any, deletes: str | None = None, insert: bool = False) -> None:
        txn = self._open()
        schema = self._db._schema(table, txn.lease)
        txn.write(schema, row_batch(schema, records, deletes=deletes), insert=flag(insert, "insert"))

    def append_stages(self, table: str, stages: Iterable[bytes], late: str = "fail") -> None:
        txn = self._open()
        txn.append_stages(self._db._schema(table, txn.lease), stage_ids(stages), drop_late=drops_late(late))

    @takes(retract_arguments)
    def retract(self, wanted: ScanArguments) -> int:
        txn = self._open()
        schema = self._db._schema(wanted.table, txn.lease)
        return txn.retract(schema, wanted.bound(schema))

    def overwrite(self, table: str) -> None:
        txn = self._open()
        txn.overwrite(self._db._schema(table_name(table), txn.lease))

    def _get(self, wanted: GetArguments) -> list[dict[str, Any] | None]:
        txn = self._open()
        schema = self._db._schema(wanted.table, txn.lease)
        keys, names = wanted.bound(schema)
        return _rows(schema, txn.get(schema, keys, names))

    def _batches(self, wanted: ScanArguments | QuestionArguments, rows: int | None) -> Generator[pa.RecordBatch]:
        txn = self._open()
        schema = self._db._schema(wanted.table, txn.lease)
        return _each(txn.scan(schema, wanted.bound(schema)))


class Snapshot(interface.Snapshot):
    def __init__(self, db: Database, lease: Lease) -> None:
        self._db = db
        self._lease = lease

    def close(self) -> None:
        self._db.store.release(self._lease)

    @property
    def ts(self) -> int:
        return self._lease.ts

    def renew(self, ttl_s: float | None = None) -> None:
        check_ttl(ttl_s)
        self._db.store.renew(self._lease.id, ttl_s)

    def _get(self, wanted: GetArguments) -> list[dict[str, Any] | None]:
        schema = self._db._schema(wanted.table, self._lease)
        keys, names = wanted.bound(schema)
        return _rows(schema, self._db.store.get(self._lease, schema, keys, names))

    def _batches(self, wanted: ScanArguments | QuestionArguments, rows: int | None) -> Generator[pa.RecordBatch]:
        schema = self._db._schema(wanted.table, self._lease)
        return _each(self._db.store.scan(self._lease, schema, wanted.bound(schema)))

    def _answer(self, wanted: AnswerArguments) -> Result:
        schema = self._db._schema(wanted.table, self._lease)
        rolled = self._db.store.answer(self._lease, schema, wanted.bound(schema))
        return Result(wanted.arrow_schema(schema), list(rolled), rolled.explanation(), rolled.complete_since_us)

    def _table_schema(self, table: str) -> TableSchema:
        self._db.store.leases.check(self._lease)
        return self._db._schema(table, self._lease)

    def _sql(self, wanted: SqlArguments) -> pa.Table:
        from kivi.api.dataset import Dataset, hidden_in
        from kivi.sql import Limits, answer, as_table, resolve
        from kivi.sql.parameters import from_batch

        hidden = hidden_in(wanted.text)

        def find(name: str) -> Dataset | None:
            known = resolve(name, self._db.tables())
            if known is None:
                return None
            schema = self._table_schema(known)
            if not can_be_shared(schema, hidden):
                return self._dataset(known, commits=wanted.text)
            table = shared.of(schema)
            return Dataset(schema, lambda asked: table.scan(asked.bound(schema)), hidden, table.files)

        def every() -> Iterable[tuple[str, pa.Schema]]:
            return ((name, self._dataset(name, commits=False).schema) for name in self._db.tables())

        settings = self._db.store.settings
        limits = Limits(settings.sql_memory_bytes, settings.sql_threads, settings.sql_timeout_s, settings.sql_rows)
        with self._db.store.shared_events(self._lease) as shared:
            found = as_table(answer(wanted.text, from_batch(wanted.batch), find, every, limits))
            shared.check()
            return found

    def _table(self, wanted: ScanArguments) -> pa.Table:
        import pyarrow as pa

        batches = list(self._batches(wanted, None))
        return pa.Table.from_batches(batches, wanted.arrow_schema(self._table_schema(wanted.table)))


def _rows(schema: TableSchema, stored: Iterable[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    return [None if row is None else schema.row_from_stored(row) for row in stored]


def _each(batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
    """The store's own batches, which are small enough."""
    yield from batches


class _Live(Subscription):
    """A subscription of this process: one question to the hub at a time."""

    def __init__(self, store: Store, hub: Hub, wanted: SubscribeArguments) -> None:
        self._store = store
        self._hub = hub
        schema = store.table(wanted.table)
        self._follower = Follower(wanted, schema)
        self._wanted = wanted
        self._live = hub.subscribe(wanted.table, wanted.bound, wanted.terms(schema))
        self._said: queue.SimpleQueue[Update | KiviError | None] = queue.SimpleQueue()
        self._asked = False

    def _next(self, timeout_s: float | None) -> Update | None:
        if self._store.is_parents:  # what is said comes to the parent
            self._store.check_open()
        if not self._asked:
            self._asked = True
            self._hub.ask(self._live, self._said.put)
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._asked = False
        if isinstance(said, KiviError):
            self.close()
            raise said
        try:
            return None if said is None else told(said)
        except KiviError:  # a value that callers cannot be shown
            self.close()
            raise

    def _acknowledge(self, ts: int, skip: int) -> None:
        assert self._wanted.name is not None
        self._hub.durable.acknowledge(self._wanted.user, self._wanted.name, ts, skip)

    def __del__(self) -> None:
        """Closed by the garbage collector if the caller drops it."""
        if hasattr(self, "_asked") and not self._follower.ended:
            self.close()

    def close(self) -> None:
        if not self._store.is_parents:
            self._hub.close(self._live)
        self._follower.ended = True
        self._said.put(None)  # for a thread that waits


class Database(Alerting, Topics, interface.Database[Transaction, Snapshot]):
    """A store in this process."""

    _timeout_s = 10.0

    def __init__(self, store: Store) -> None:
        self.store = store
        self.hub = Hub(store)
        self._alerts = Alerts(store)

    def close(self) -> None:
        """Finishes commits in progress and makes everything durable in base. Harmless twice."""
        if not self.store.is_parents:
            self._alerts.stop()
            self.hub.stop()
            self.store.close()

    def _schema(self, table: str, lease: Lease | None = None) -> TableSchema:
        return self.store.table(table_name(table), lease)

    @property
    def _value_bytes_max(self) -> int:
        return self.store.settings.max_value_bytes

    def _create(self, schema: TableSchema) -> None:
        self.store.create(schema)

    @takes(AggregateArguments)
    def create_aggregate(self, wanted: AggregateArguments) -> None:
        schema = declared_schema(
            self.store.table,
            wanted.name,
            wanted.source,
            wanted.group_by,
            wanted.measures,
            wanted.derived,
            wanted.history,
            wanted.retention,
        )
        self.store.create(schema, progress=wanted.progress)

    @takes(LevelsArguments)
    def create_aggregates(self, wanted: LevelsArguments) -> list[str]:
        schemas = level_schemas(
            self.store.table,
            wanted.name,
            wanted.source,
            wanted.levels,
            wanted.slots,
            wanted.measures,
            wanted.derived,
            wanted.history,
            wanted.retention,
            wanted.tz,
        )
        self.store.create_all(schemas, progress=wanted.progress)
        return wanted.names

    @takes(ViewArguments)
    def create_view(self, wanted: ViewArguments) -> None:
        source = self.store.table(wanted.source)
        self.store.create(view_schema(wanted.name, source, wanted.key, wanted.columns, wanted.unique))

    @takes(HierarchyArguments)
    def create_hierarchy(self, wanted: HierarchyArguments) -> None:
        try:
            table = self._schema(wanted.name)
        except NotFound:
            table = self.store.create(wanted.table)
        view = wanted.view(table)
        self.create_view(view.name, view.source, view.key, view.columns)

    @takes(RuleArguments)
    def create_rule(self, wanted: RuleArguments) -> None:
        self._alerts.create_rule(wanted.rule, backfill=bool(wanted.backfill))

    def rules(self) -> list[dict[str, Any]]:
        return [listed for _, listed in self.store.rules()]

    def drop_rule(self, name: str) -> None:
        self.store.drop_rule(rule_name(name))

    @takes(AlterTableArguments)
    def alter_table(self, wanted: AlterTableArguments) -> None:
        self.store.alter_table(wanted.name, wanted.add_columns, wanted.role)

    @takes(AlterAggregateArguments)
    def alter_aggregate(self, wanted: AlterAggregateArguments) -> None:
        self.store.alter_aggregate(
            wanted.name,
            wanted.add_measures,
            backfill=wanted.backfill,
            derived=wanted.derived,
            progress=wanted.progress,
        )

    def tables(self) -> list[str]:
        return [schema.name for schema in self.store.tables()]

    def describe(self, name: str) -> dict[str, Any]:
        schema = self.store.table(table_name(name))
        return schema.described(
            self.store.statistics(schema), self.store.retracted_in_backups(schema), self.store.lateness_of(schema)
        )

    def split_points(self, table: str, rows: int = 500_000) -> list[tuple[Any, ...]]:
        schema = self.store.table(table_name(table))
        return schema.caller_bounds(self.store.split_points(schema, check_rows(rows)))

    @takes(TailArguments)
    def tail_points(self, wanted: TailArguments) -> TailPoints:
        schema = self.store.table(wanted.table)
        return self.store.tail_points(schema, wanted.since, wanted.rows, wanted.upto, wanted.most, wanted.shards)

    def drop(self, name: str) -> None:
        self.store.drop(table_name(name))

    @takes(TransactionArguments, NO_ARGUMENTS)
    def transaction(self, wanted: TransactionArguments) -> Transaction:
        return Transaction(self, wanted)

    @takes(SnapshotArguments)
    def snapshot(self, wanted: SnapshotArguments) -> Snapshot:
        staleness_us = wanted.max_staleness_us
        lease = self.store.begin(
            as_of_ts=wanted.as_of_ts,
            as_of_us=wanted.as_of_us,
            min_snapshot=wanted.min_snapshot,
            ttl_s=wanted.ttl_s,
            max_staleness_s=None if staleness_us is None else staleness_us / 1e6,
        )
        return Snapshot(self, lease)

    def append(
        self,
        table: str,
        records: Any,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        late: str = "fail",
    ) -> int:
        check_batch(batch)
        drop_late = drops_late(late)
        token = None if token is None else check_token(token)
        txn = self.store.blind_transaction()
        try:
            schema = self._schema(table, txn.lease)
            txn.append(schema, event_batch(schema, records), drop_late=drop_late)
            return self.store.commit_wait(txn, token=token, batch=batch)
        finally:
            txn.rollback()

    def write(
        self,
        table: str,
        records: Any,
        deletes: str | None = None,
        insert: bool = False,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
    ) -> int:
        check_batch(batch)
        token = None if token is None else check_token(token)
        txn = self.store.transaction() if flag(insert, "insert") else self.store.blind_transaction()
        txn.deferred = True
        try:
            schema = self._schema(table, txn.lease)
            txn.write(schema, row_batch(schema, records, deletes=deletes), insert=bool(insert))
            return self.store.commit_wait(txn, token=token, batch=batch)
        finally:
            txn.rollback()

    def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int:
        if not each:
            return self.append(table, events, token, late=late)
        schema, drop_late = self._schema(table), drops_late(late)
        append = partial(self.store.append_each, schema, event_batch(schema, events), token=token, drop_late=drop_late)
        return self.store.wait(append, token=token)

    def outcome(self, token: str, place: int | None = None) -> Outcome:
        state, commit_ts = self.store.outcome(check_token(token), check_place(place))
        if commit_ts is not None:
            return commit_ts
        return ABORTED if state == "aborted" else UNKNOWN

    def stage(self, table: str, records: Any, owner: str = "", deletes: str | None = None) -> bytes:
        schema = self._schema(table)
        batch = table_batch(schema, records, deletes=deletes)
        return self.store.stage_wait(schema, batch, owner=plain_text(owner, "owner"))

    def discard_stages(self, ids: Iterable[bytes]) -> None:
        self.store.discard_stages(stage_ids(ids))

    def batch_scopes(self, prefix: str = "") -> list[str]:
        return self.store.batch_scopes(plain_text(prefix, "prefix"))

    def _subscribe(self, wanted: SubscribeArguments) -> Subscription:
        return _Live(self.store, self.hub, wanted)

    def subscriptions(self, user: str = "") -> list[dict[str, Any]]:
        self.store.check_open()
        check_names(user, "-")
        return [listed(stored) for stored in self.hub.durable.listed(user)]

    def unsubscribe(self, name: str, user: str = "") -> None:
        check_names(user, name)
        self.hub.durable.drop(user, name)

    def watermark(self) -> int:
        self.store.check_open()
        return self.store.watermark()

    def consolidate(self) -> None:
        self.store.consolidate()

    def stats(self) -> dict[str, int | float]:
        self.store.check_open()
        return {**self.store.stats(), **self._alerts.stats()}

    def cluster_status(self) -> dict[str, Any]:
        self.store.check_open()
        found: dict[str, Any] = self.store.cluster_status().described()
        return found

    def move_shards(self, shards: str, to: str, *, source: str | None = None, copy: bool = False) -> str:
        self.store.check_open()
        check_move(shards, to, source, copy)
        return self.store.move_shards(shards, to, source, copy=copy)

    def rebalance_shards(
        self,
        *,
        copies: int | None = None,
        away_from: Sequence[str] = (),
        keep: Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> list[dict[str, str]]:
        self.store.check_open()
        check_rebalance(copies, away_from, keep, dry_run)
        return self.store.rebalance_shards(copies, away_from, keep, dry_run=dry_run)

    def cancel_move(self, move: str) -> None:
        self.store.check_open()
        self.store.cancel_move(move_id(move))

    def forget_node(self, node: str) -> None:
        self.store.check_open()
        self.store.forget_node(node_name(node))

    def verify_cluster(self) -> int:
        self.store.check_open()
        return self.store.verify_cluster()

    def checkpoint(self, path: Any) -> None:
        self.store.checkpoint(directory(path))

    def backup(self, repository: Any, *, keep: int | None = None) -> dict[str, Any]:
        return self.store.backup(directory(repository), check_keep(keep))
