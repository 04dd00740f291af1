"""The store: the operations on it that the embedded database and the server share.

Holds no rules of its own: what a read sees is ``mvcc.snapshot``, what may commit is ``mvcc.verdict``, in which order is
``mvcc.commit``, what reaches base is ``mvcc.consolidate``; and each part of this room has its own page. Values here are
in stored form (``kivi.model.types``).

::

    open      format file and directory lock -> engine -> position -> catalog -> replay the log after it
    begin     a lease on W, or on a past timestamp
    commit    prepare (derive, encode) -> Committer.submit -> done(outcome)
    close     no new commits -> what is in the log queue finishes -> fold, flush
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from kivi.events.settled_files import StoredGroup
from kivi.log import CommitLog
from kivi.model.declarations import with_columns
from kivi.model.lateness import LatenessDay
from kivi.model.levels import altered_schema
from kivi.model.roles import with_role
from kivi.model.scans import Scan
from kivi.model.schema import OperatorCall, TableSchema
from kivi.model.tenants import Tenant
from kivi.mvcc.groups import Outcome, Writes, WriteSet
from kivi.mvcc.leases import Lease
from kivi.mvcc.record import Once
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.query.answers import Answer
from kivi.runtime.forks import register_fork_handler
from kivi.runtime.histogram import Histogram
from kivi.runtime.settings import Settings
from kivi.store import backups, checkpoint, statistics
from kivi.store.arrivals import decoded
from kivi.store.backfill import Backfill, Progress
from kivi.store.commits import Commit
from kivi.store.cooler import Cooler
from kivi.store.expiry import Expiry
from kivi.store.housekeeping import Housekeeping
from kivi.store.opening import Parts, open_parts
from kivi.store.plans import GetPlan, WritePlan
from kivi.store.replay import load_base, replay
from kivi.store.rollups import rolled_batches
from kivi.store.rules import Rules
from kivi.store.settler import Settler
from kivi.store.shared_events import SharedEvents
from kivi.store.shared_window import SharedWindow
from kivi.store.tables import Tables
from kivi.store.transaction import Txn
from kivi.store.view_filling import ViewFilling
from kivi.store.wiring import Wiring

__all__ = [
    "Answer",
    "Commit",
    "GetPlan",
    "Lease",
    "Outcome",
    "Scan",
    "SharedEvents",
    "Store",
    "StoredGroup",
    "Txn",
    "WritePlan",
    "WriteSet",
    "Writes",
    "rolled_batches",
]

_log = logging.getLogger("kivi.store")


def _no_cluster() -> Any:
    raise InvalidArgument("this server is no node of a cluster: kivi status says how it is")


class Store(Wiring):
    """Thread safe. Get one with ``Store.open``.

    Most of its methods are those of its parts, under the same names: see ``Wiring``.
    """

    def __init__(self, parts: Parts, settings: Settings, clock: Callable[[], float]) -> None:
        super().__init__(parts, settings, clock)
        register_fork_handler(self)
        position = load_base(self)
        replay(self, position)
        self._wire(position)
        if isinstance(self.committer, ReplicatedCommitter) and self.prefix is not None:
            if not self.prefix.saved:  # before a pass makes base more than the first position says
                first = WriteBatch()
                self.committer.rows(first, position)
                self.engine.write(first)
                self.engine.flush()
            self.catalog.on_touch, self.catalog.on_define = self.prefix.changed, self.prefix.defined
            self.committer.decode = partial(decoded, self)
            self.committer.trim = partial(self.shards.trim, known=self.catalog.schema_of)
            self.shards.cuts = lambda log=self.committer.log: log.members.cuts  # type: ignore[misc]
            self.shards.of_cluster = True
            self.shards.holders = self.committer.log.addresses
            self.shards.parts = self.committer.log.parts
            self.shards.is_whole_elsewhere = self.committer.log.is_whole_elsewhere
            self.committer.hear_nodes()
        self.before_copy: Callable[[], None] = lambda: None
        """Called before the store is copied."""
        self.cluster_status: Callable[[], Any] = _no_cluster
        """What a node of a cluster says of it (``kivi.cluster.status``)."""
        self.move_shards: Callable[..., str] = lambda *_, **__: _no_cluster()
        self.cancel_move: Callable[[str], None] = lambda id_: _no_cluster()
        self.rebalance_shards: Callable[..., list[dict[str, str]]] = lambda *_, **__: _no_cluster()
        """Moves of shards between nodes (``kivi.cluster.moving``)."""
        self.verify_cluster: Callable[[], int] = lambda: _no_cluster()
        """Has the nodes compare what they store (``kivi.cluster.verifying``)."""
        self.forget_node: Callable[[str], None] = lambda node: _no_cluster()
        """Goes on without a node that is gone for good."""
        self._tables = Tables(self.catalog, self.commits, self.transaction, self.check_open)
        self.drop = self._tables.drop
        rules = Rules(
            self.catalog, self.commits, self.reads, self._tables, self.transaction, self.begin, self.release,
            self.check_open, self.lateness,
        )  # fmt: skip
        self.create_rule, self.drop_rule, self.rules = rules.create, rules.drop, rules.listed
        self.backfill = Backfill(self, self._tables, ViewFilling(self, self._tables))
        self.event_tables.forget_unknown()
        self.housekeeping = Housekeeping(self)
        self.settler = Settler(self)
        self.settle = self.settler.settle
        self.cooler = Cooler(self, self.settler)
        self.expiry = Expiry(self)
        if settings.background:
            self.engine.give_back_owed()
            self.consolidator.start(self.housekeeping.step)
            if settings.settle:
                self.settler.start()
            if parts.path is not None and not parts.log.is_followed:
                self.cooler.start()
            if not parts.log.is_followed:
                self.expiry.start()
        self._opened_at = self.watermark()
        alone = not (parts.log.is_judged_again or parts.log.is_followed)
        self._resumed = self.backfill.resume(self.backfill.unfinished()) if alone else None

    @staticmethod
    def open(
        path: str | None = None,
        *,
        settings: Settings | None = None,
        engine: Engine | None = None,
        log: CommitLog | None = None,
        make_log: Callable[[Engine], CommitLog] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Opens the store in the directory ``path``, creating it if it is missing or empty; None is in memory.

        ``make_log`` gives the log of a node of a cluster, which is opened when its engine is.

        Raises NotAStore, FormatTooNew, StoreInUse, DataLoss.
        """
        chosen = settings or Settings()
        parts = open_parts(path, chosen, engine, log, make_log, clock)
        try:
            return Store(parts, chosen, clock)
        except BaseException:
            parts.release()
            raise

    def close(self) -> None:
        """Finishes what is in the log, folds and flushes. Harmless twice.

        Without disk space it closes as well: what could not be folded is in the log, and the next opening replays it.
        """
        with self._tables.lock:
            if self._closed:
                return
            self._closed = True
        self.expiry.stop()
        self.cooler.stop()
        self.settler.stop()
        self.consolidator.stop()
        try:
            try:
                if self.consolidator.failure is None:
                    self.consolidator.close()
            finally:
                self.parts.release()
        except Unavailable as error:
            _log.warning("closed without folding (%s): the next opening replays it from the commit log", error.message)

    def forked(self) -> None:
        """This is a child, and the store its parent's: it is not to be touched here, nor closed."""
        self._tables.lock = threading.RLock()
        self._closed = self.is_parents = True
        self._why_closed = "the store was opened before os.fork(), and is the parent's: it has one process at a time"

    def crash(self) -> None:
        """For tests: lets go of everything at once, as if the process had been killed."""
        self._closed = True
        self.expiry.stop()
        self.cooler.stop()
        self.settler.stop()
        self.consolidator.stop()
        self.parts.release()

    # -- tables -------------------------------------------------------------------------------------------

    def table(self, name: str, lease: Lease | None = None, tenant: Tenant | None = None) -> TableSchema:
        """The definition that readers see now, or at a snapshot; to one that sees none, the newest. Raises NotFound,
        and for what a tenant (the snapshot's, if it has one) cannot see PermissionDenied."""
        self.check_open()
        tenant = tenant if lease is None else lease.tenant
        try:
            schema = self.catalog.visible.table(name) if lease is None else self.catalog.table(name, lease.ts)
        except NotFound:  # which names those that there are
            if tenant is not None:
                raise tenant.refusal(name) from None
            raise
        if tenant is not None:
            tenant.check(schema)
        return schema

    def tables(self) -> list[TableSchema]:
        self.check_open()
        return sorted(self.catalog.visible.by_id.values(), key=lambda schema: schema.name)

    def tables_as_seen(self) -> object:
        """The tables that readers see. Compare it by identity: any change of them makes another object."""
        return self.catalog.visible

    def last_change(self, schema: TableSchema, upto: int) -> int:
        """The newest snapshot up to ``upto``, which can be read, that a read of the table may differ at from one before
        it: all between there and ``upto`` are alike. What changed before the store was opened is not told apart.

        A read may ask what lies below a value, so hierarchies and what makes a table one count for every table.
        """
        read = self.pending.changed_at(schema.id), self.hierarchies_changed_at
        return min(upto, max(self._opened_at, self.catalog.changed_at, *read))

    @property
    def hierarchies_changed_at(self) -> int:
        """No commit that was ever applied here, and is newer than that, changed a row of what is a hierarchy now."""
        return max((self.pending.changed_at(table.id) for table in self.hierarchies.tables()), default=0)

    @property
    def changed_at(self) -> int:
        """The CTS of the newest change of a table or of a retention floor."""
        return self.catalog.changed_at

    def create(self, schema: TableSchema, *, progress: Progress | None = None) -> TableSchema:
        """Creates a table; an aggregate or a view of a table that is in use is complete and readable then.

        Raises AlreadyExists, NotFound if a source has gone, RowExists if a view is not as unique as it was declared.
        """
        return self.create_all([schema], progress=progress)[0]

    def create_all(self, schemas: Sequence[TableSchema], *, progress: Progress | None = None) -> list[TableSchema]:
        """``create`` of tables that are all there or none: row and event tables, or aggregates of one source."""
        for schema in schemas:
            if schema.cold is not None:
                self.cold.check(schema.cold)
            if schema.kind == "aggregate":  # it is built from its events
                self.spanning.check(schema)
        created = self._tables.create(schemas)
        return self.backfill.build(created, progress) if created[0].kind in ("aggregate", "view") else created

    def alter_table(
        self, name: str, columns: Mapping[str, object] | None = None, role: str | None = None
    ) -> TableSchema:
        """Adds columns to a row table or an event table, and gives any table a role.

        Raises NotFound, SchemaError, InvalidArgument.
        """

        def altered(schema: TableSchema) -> TableSchema:
            schema = schema if columns is None else with_columns(schema, columns)
            return schema if role is None else with_role(schema, role)

        return self._tables.alter(name, altered)

    def alter_aggregate(
        self,
        name: str,
        measures: Mapping[str, OperatorCall],
        *,
        backfill: bool = True,
        derived: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> TableSchema:
        """Adds measures to an aggregate; returns when they can be read.

        Raises NotFound, SchemaError, InvalidArgument, and what keeps its events from being summed.
        """

        def altered(schema: TableSchema) -> TableSchema:
            if backfill:
                self.spanning.check(schema)
            return altered_schema(self.catalog.entered.table, schema, measures, derived, backfill)

        schema = self._tables.alter(name, altered)
        return self.backfill.build([schema], progress)[0] if backfill else schema

    # -- reads and transactions -----------------------------------------------------------------------------

    def watermark(self) -> int:
        """The snapshot that a reader gets now."""
        return self.moved.value

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of bounded size, in key order (events: in commit order)."""
        if wanted.changes is not None and (wanted.order or wanted.offset):
            raise InvalidArgument("changes come in commit order: read them without order_by and offset")
        if wanted.changes is not None and wanted.changes.retractions == "fail" and schema.expires is not None:
            wanted = replace(wanted, changes=replace(wanted.changes, retractions="ignore"))
        if lease.tenant is not None:
            wanted = lease.tenant.narrowed(schema, wanted)
        wanted = self.hierarchies.resolved(lease, schema, wanted, txn)
        if wanted.changes is not None and txn is None:
            return self.changes.scan(lease, schema, wanted, wanted.changes)
        return self.reads.scan(lease, schema, wanted, txn)

    def answer(self, lease: Lease, schema: TableSchema, wanted: Scan) -> Answer:
        """A rollup, or the answer of a question, as record batches that say how they were made."""
        if lease.tenant is not None:
            wanted = lease.tenant.narrowed(schema, wanted)
        return self.reads.answer(lease, schema, self.hierarchies.resolved(lease, schema, wanted))

    def shared_events(self, lease: Lease) -> SharedEvents:
        """The event tables of a snapshot, for a reader that reads settled files by itself."""
        return self.reads.shared_events(lease)

    def transaction(self, lease: Lease | None = None) -> Txn:
        return Txn(lease or self.begin(), self.settings, self)

    def blind_transaction(self, tenant: Tenant | None = None) -> Txn:
        """One that will read nothing (so no insert either), which keeps no snapshot and costs consolidation nothing."""
        self.check_open()
        return Txn(self.leases.blind(tenant), self.settings, self)

    @property
    def is_node(self) -> bool:
        """Whether it is a node of a cluster."""
        return isinstance(self.committer, ReplicatedCommitter)

    def shared_window(
        self, table: TableSchema, columns: tuple[str, ...], seconds: float, ids_max: int
    ) -> SharedWindow | None:
        """The events of a table that any node of the cluster took lately, by these columns; None: this is no node, and
        who takes events is the only one who does. Transactions with its ``once`` are refused for what was taken.

        Raises InvalidArgument for a sharded table, whose events not every node reads.
        """
        if not isinstance(self.committer, ReplicatedCommitter):
            return None
        if table.shard_by:
            raise InvalidArgument(
                f"{table.name!r} is sharded, and in a cluster its events cannot be kept from being taken twice: name a "
                "table that is not"
            )
        return SharedWindow(self.committer, Once(table.id, columns, int(seconds * 1_000_000)), ids_max)

    # -- operation ------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether a commit would wait for consolidation to make room."""
        return self.committer.is_full

    def consolidate(self) -> int:
        """Folds everything up to the watermark of now into base; returns that watermark."""
        self.check_open()
        return self.consolidator.run()

    def checkpoint(self, path: str) -> None:
        """A copy of the store at one moment, in a new directory: opening it gives the same answers."""
        self.check_open()
        self.before_copy()
        watermark = checkpoint.checkpoint(self, path)
        self.copies.remember(path, watermark)

    def backup(self, repository: str, keep: int | None = None) -> dict[str, Any]:
        """See ``kivi.store.backups.make``."""
        self.check_open()
        self.before_copy()
        made = backups.make(self, repository, keep)
        self.copies.remember(made["path"], made["watermark"])
        return made

    def retracted_in_backups(self, schema: TableSchema) -> list[str]:
        """The paths of backups and checkpoints with events of a table that were retracted since they were made."""
        return self.copies.holding(schema) if schema.kind == "event" else []

    def lateness_of(self, schema: TableSchema) -> list[LatenessDay]:
        """How late the events of the last days came, by the day of their commits; none where it has a part, or cannot
        read them now: the rest of a description does not wait for an object store."""
        if schema.kind != "event" or self.shards.is_partial(schema):
            return []
        try:
            return self.lateness.days(schema)
        except (Unavailable, DataLoss) as error:
            _log.warning("the lateness of events of %s is not known now: %s", schema.name, error.message)
            return []

    def statistics(self, schema: TableSchema) -> dict[str, int]:
        """Numbers about a table's contents that are cheap to have."""
        return statistics.table_statistics(self, schema)

    def split_points(self, schema: TableSchema, rows: int) -> list[tuple[Any, ...]]:
        """See ``kivi.store.splitting``."""
        self.check_open()
        return statistics.split_points(self, schema, rows)

    def stats(self) -> dict[str, int | float]:
        """Flat numbers for metrics and ``kivi status``."""
        return statistics.stats(self)

    def histograms(self) -> dict[str, Histogram]:
        """Distributions, for metrics."""
        return statistics.histograms(self)
