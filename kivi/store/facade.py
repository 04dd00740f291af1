"""The store: its parts wired together, and the operations that the embedded database and the server share.

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
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from kivi.engine import Engine
from kivi.errors import KiviError, Unavailable
from kivi.log import CommitLog
from kivi.model.expressions import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Committer
from kivi.mvcc.consolidate import Consolidator
from kivi.mvcc.groups import Outcome, Writes, WriteSet
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.shortage import LOG, Shortage
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import Tokens
from kivi.mvcc.turns import Turns
from kivi.mvcc.verdict import Facts
from kivi.mvcc.watermark import Watermark
from kivi.runtime.forks import register_fork_handler
from kivi.runtime.histogram import Histogram
from kivi.runtime.settings import COMPUTING, Settings
from kivi.store import backups, checkpoint, statistics
from kivi.store.backfill import Backfill, Progress
from kivi.store.catalog import Catalog
from kivi.store.change_reads import ChangeReads
from kivi.store.commits import Commits, TokenState
from kivi.store.event_tables import EventTables
from kivi.store.housekeeping import Housekeeping
from kivi.store.opening import Parts, open_parts
from kivi.store.plans import GetPlan, WritePlan
from kivi.store.reads import Reads
from kivi.store.replay import load_base, replay
from kivi.store.retention import Retention
from kivi.store.snapshots import Snapshots
from kivi.store.staging import Stages, Staging
from kivi.store.tables import Tables
from kivi.store.transaction import Txn

__all__ = [
    "GetPlan",
    "Lease",
    "Outcome",
    "Scan",
    "Settings",
    "Store",
    "TokenState",
    "Txn",
    "WritePlan",
    "WriteSet",
    "Writes",
]

_log = logging.getLogger("kivi.store")


class Store:
    """Thread safe. Get one with ``Store.open``.

    Most of its methods are those of its parts, under the same names: see ``_wire``.
    """

    backfill: Backfill

    def __init__(self, parts: Parts, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self.parts = parts
        engine, log = parts.engine, parts.log
        self.engine, self.log = engine, log
        self.catalog = Catalog()
        self.pending = Pending()
        self.timeline = Timeline(engine)
        self.tokens = Tokens(engine, ttl_us=int(settings.request_token_ttl_s * 1_000_000))
        self.stages = Stages(parts.store_id, max_bytes=settings.stage_bytes)
        self.retention = Retention(self)
        self.event_tables = EventTables(engine, self.catalog, settings.block_rows)
        self._closed = False
        self._why_closed = "the store is closed"
        self.is_parents = False
        """This is a child of the process that opened it, which has none of its threads."""
        register_fork_handler(self)
        position = load_base(self)
        replay(self, position)
        lock = threading.RLock()
        self.moved = Watermark(log.last, lock)
        """The watermark, for those who wait until it moves."""
        self.leases = Leases(
            self.moved,
            lock,
            clock=time.monotonic if clock is time.time else clock,
            ttl_s=settings.lease_ttl_s,
            ttl_max_s=settings.lease_ttl_max_s,
            max_leases=settings.max_leases,
        )
        facts = Facts(
            log.last, window_us=int(settings.conflict_window_s * 1_000_000), entries=settings.conflict_entries
        )
        self.shortage = Shortage(clock)
        log.on_room = self._room_in_the_log
        self.committer = Committer(
            log,
            self.pending,
            self.moved,
            self.leases,
            facts,
            self.tokens,
            pending_soft_bytes=settings.pending_soft_bytes,
            pending_hard_bytes=settings.pending_hard_bytes,
            catalog_version=lambda: self.catalog.entered.version,
            is_aggregate=lambda table: (s := self.catalog.schema_of(table)) is not None and s.kind == "aggregate",
            timeline=self.timeline,
            shortage=self.shortage,
            clock=clock,
        )
        self.computing = Turns(COMPUTING)
        self.consolidator = Consolidator(
            engine,
            log,
            self.pending,
            self.leases,
            self.tokens,
            self.timeline,
            settings,
            schema_of=self.catalog.schema_of,
            schemas=lambda: list(self.catalog.entered.by_id.values()),
            sealer_of=self.event_tables.of,
            stages=self.stages,
            before_position=self.retention.save,
            entry_lock=self.committer.entry_lock,
            clock=clock,
            position=position,
            computing=self.computing,
            shortage=self.shortage,
        )
        self.reader = Reader(
            engine,
            self.pending,
            self.leases,
            self.consolidator.sweeper.history_floor_of,
            exists=self.catalog.is_visible,
            missing=self.catalog.missing,
        )
        self.committer.on_pressure = self.consolidator.hurry
        self._wire()
        self.housekeeping = Housekeeping(self)
        if settings.background:
            self.consolidator.start(self.housekeeping.step)
        self._resumed = self.backfill.resume()

    def _wire(self) -> None:
        """The parts of this room, and of each what callers call."""
        opened = self.check_open
        snapshots = self.snapshots = Snapshots(self.leases, self.moved, self.timeline, self.committer, opened)
        self.begin, self.begin_together = snapshots.begin, snapshots.begin_together
        self.renew, self.release = snapshots.renew, snapshots.release

        staging = self.staging = Staging(self.stages, self.log, self.committer, self.settings, self.clock, opened)
        self.stage, self.stage_wait, self.log_stage = staging.stage, staging.stage_wait, staging.log_stage
        self.load_stages, self.discard_stages = staging.load, staging.discard
        self.staged_bytes = staging.held_by

        reads = self.reads = Reads(
            self.catalog, self.reader, self.pending, self.leases, self.retention, self.event_tables, opened
        )
        self.get, self.get_each, self.few_rows = reads.get, reads.get_each, reads.few_rows
        self.has_row, self.has_bounded_rows = reads.has_row, reads.has_bounded_rows
        self.get_plan = GetPlan.of

        changes = self.changes = ChangeReads(reads, self.moved, self.parts.store_id)
        self.tail_points = changes.tail_points

        commits = self.commits = Commits(
            self.settings, self.log, self.catalog, self.committer, self.leases, self.moved, self.tokens, self.retention,
            staging, self.reader, self.computing, opened,
        )  # fmt: skip
        self.commit, self.commit_wait, self.wait = commits.commit, commits.commit_wait, commits.wait
        self.write, self.write_set, self.write_plans = commits.write, commits.write_set, commits.write_plans
        self.append_each, self.floor, self.rollback = commits.append_each, commits.floor, commits.rollback
        self.outcome, self.committed_at = commits.outcome, commits.committed_at
        self.batch_scopes = self.tokens.scopes

        self._tables = Tables(self.catalog, commits, self.transaction, opened)
        self.drop = self._tables.drop
        self.backfill = Backfill(
            self.settings, self.catalog, self.pending, self.retention, self.event_tables, snapshots, staging,
            self._tables, lambda: self.is_open,
        )  # fmt: skip

    @staticmethod
    def open(
        path: str | None = None,
        *,
        settings: Settings | None = None,
        engine: Engine | None = None,
        log: CommitLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Opens the store in the directory ``path``, creating it if it is missing or empty; None is in memory.

        Raises NotAStore, FormatTooNew, StoreInUse, DataLoss.
        """
        chosen = settings or Settings()
        parts = open_parts(path, chosen, engine, log)
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

    def _room_in_the_log(self, error: KiviError | None) -> None:
        if error is None:
            self.shortage.works(LOG)
        else:
            self.shortage.failed(LOG, error)

    def crash(self) -> None:
        """For tests: lets go of everything at once, as if the process had been killed."""
        self._closed = True
        self.consolidator.stop()
        self.parts.release()

    @property
    def is_open(self) -> bool:
        return not self._closed

    def check_open(self) -> None:
        if self._closed:
            raise Unavailable(self._why_closed)
        if self.consolidator.failure is not None:
            failure = self.consolidator.failure
            if isinstance(failure, KiviError):
                raise failure
            raise Unavailable(f"the store stopped: {failure!r}; restart it")

    # -- tables -------------------------------------------------------------------------------------------

    def table(self, name: str, lease: Lease | None = None) -> TableSchema:
        """The definition that readers see now, or at a snapshot; to one that sees none, the newest. Raises NotFound."""
        self.check_open()
        return self.catalog.visible.table(name) if lease is None else self.catalog.table(name, lease.ts)

    def tables(self) -> list[TableSchema]:
        self.check_open()
        return sorted(self.catalog.visible.by_id.values(), key=lambda schema: schema.name)

    def tables_as_seen(self) -> object:
        """The tables that readers see. Compare it by identity: any change of them makes another object."""
        return self.catalog.visible

    @property
    def catalog_version(self) -> int:
        return self.catalog.entered.version

    def create(self, schema: TableSchema, *, progress: Progress | None = None) -> TableSchema:
        """Creates a table; for an aggregate on a table with events, returns when it is complete and readable.

        Raises AlreadyExists, and NotFound if an aggregate's source has gone.
        """
        created = self._tables.create(schema)
        return self.backfill.build(created, progress) if schema.kind == "aggregate" else created

    # -- reads and transactions -----------------------------------------------------------------------------

    def watermark(self) -> int:
        """The snapshot that a reader gets now."""
        return self.moved.value

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of bounded size, in key order (events: in commit order)."""
        if wanted.changes is not None and txn is None:
            return self.changes.scan(lease, schema, wanted, wanted.changes)
        return self.reads.scan(lease, schema, wanted, txn)

    def transaction(self, lease: Lease | None = None) -> Txn:
        self.check_open()
        return Txn(lease or self.begin(), self.settings, self)

    def blind_transaction(self) -> Txn:
        """One that will read nothing (so no insert either), which keeps no snapshot and costs consolidation nothing."""
        self.check_open()
        return Txn(self.leases.blind(), self.settings, self)

    # -- operation ------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether a commit would wait for consolidation to make room."""
        return self.pending.nbytes > self.settings.pending_hard_bytes

    def consolidate(self) -> int:
        """Folds everything up to the watermark of now into base; returns that watermark."""
        self.check_open()
        return self.consolidator.run()

    def checkpoint(self, path: str) -> None:
        """A copy of the store at one moment, in a new directory: opening it gives the same answers."""
        self.check_open()
        checkpoint.checkpoint(self, path)

    def backup(self, repository: str, keep: int | None = None) -> dict[str, Any]:
        """See ``kivi.store.backups.make``."""
        self.check_open()
        return backups.make(self, repository, keep)

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
