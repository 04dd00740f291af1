"""The store: wiring, and the operations that the embedded database and the server share.

Holds no rules of its own: what a read sees is ``mvcc.snapshot``, what may commit is ``mvcc.verdict``, in which order is
``mvcc.commit``, what reaches base is ``mvcc.consolidate``. Values here are in stored form (``kivi.model.types``).

::

    open      format file and directory lock -> engine -> position -> catalog -> replay the log after it
    begin     a lease on W, or on a past timestamp
    commit    prepare (derive, encode) -> Committer.submit -> done(outcome)
    close     no new commits -> what is in the log queue finishes -> fold, flush

On disk, under one directory: ``KIVI`` (format and store id), ``LOCK``, ``log/`` (segments and the acknowledged mark),
``engine/`` (RocksDB).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from kivi.arrow.columns import arrow_schema
from kivi.arrow.dictionaries import coded
from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.delta.ops import RowOp
from kivi.engine import Engine
from kivi.errors import (
    AlreadyExists,
    CommitUnknown,
    Conflict,
    InvalidArgument,
    KiviError,
    NotFound,
    RowExists,
    SnapshotTooOld,
    Unavailable,
)
from kivi.events.store import EventStore
from kivi.log import CommitLog, Kind
from kivi.model.changes import TailPoints
from kivi.model.expressions import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Aborted, Committer, StaleCatalog
from kivi.mvcc.consolidate import Consolidator
from kivi.mvcc.groups import Answer, Outcome, Part, Single, Tell, Writes, WriteSet, told
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.record import Abort, Stage, StageKind, decode_stage
from kivi.mvcc.shortage import LOG, Shortage
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import FENCED, Tokens, issued_at_us
from kivi.mvcc.turns import Turns
from kivi.mvcc.verdict import Facts
from kivi.mvcc.watermark import Watermark, call_all
from kivi.runtime.forks import told_of_forks
from kivi.runtime.histogram import Histogram
from kivi.runtime.settings import COMPUTING, Settings
from kivi.store import backfill, backups, change_reads, reads, recovery
from kivi.store.catalog import COUNTERS, FIRST_ID, LATE, NAMES, SYSTEM, TABLES, Catalog, changes
from kivi.store.event_commits import prepare_events
from kivi.store.overwrite import new_generations
from kivi.store.plans import GetPlan, WritePlan, plans_of
from kivi.store.retention import Retention, earliest_times, remembered
from kivi.store.splitting import event_points, row_points
from kivi.store.staging import LiveStage, Stages, sequences_of
from kivi.store.transaction import Staged, Txn, check_batch_token, check_events, prepare

__all__ = [
    "Commit",
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

TokenState = Literal["committed", "aborted", "unknown"]
Progress = Callable[[int, int], None]


class Commit(NamedTuple):
    """A transaction to commit, and who is told of its outcome: see ``Store.commit``."""

    txn: Txn
    token: str | None
    batch: tuple[str, int] | None
    done: Tell


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of: opened by ``recovery``, closed in reverse order."""

    engine: Engine
    log: CommitLog
    store_id: bytes
    release: Callable[[], None]
    path: str | None = None


def _no_rows(schema: TableSchema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], arrow_schema(schema))


def check_token(token: str) -> None:
    if not token or len(token.encode()) > 1024:
        raise InvalidArgument("a token is a text of 1 to 1024 bytes")


class _Timed:
    """Passes on what became of a part, and notes how long its commits took."""

    __slots__ = ("_answer", "_began", "_times")

    def __init__(self, answer: Answer, times: Histogram) -> None:
        self._answer, self._times, self._began = answer, times, time.monotonic()

    def entered(self, part: Part, unknown: CommitUnknown | None) -> None:
        if unknown is None:
            self._times.observe(time.monotonic() - self._began, part.members)
        self._answer.entered(part, unknown)

    def apart(self, tag: Any, outcome: Outcome) -> None:
        self._answer.apart(tag, outcome)


class Store:
    """Thread safe. Get one with ``Store.open``."""

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
        self._event_stores: dict[int, EventStore] = {}
        self._event_mutex = threading.Lock()
        self._ddl = threading.RLock()
        self._closed = False
        self._why_closed = "the store is closed"
        self.is_parents = False
        """This is a child of the process that opened it, which has none of its threads."""
        told_of_forks(self)
        self.summary_blocks_known = self.summary_blocks_read = self.late_dropped = 0
        position = recovery.load_base(self)
        recovered = recovery.replay(self, position)
        lock = threading.RLock()
        self._watermark = Watermark(log.last, lock)
        self.leases = Leases(
            self._watermark,
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
            self._watermark,
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
            sealer_of=self.event_store,
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
        self.recovered = recovered
        self.housekeeping = recovery.Housekeeping(self)
        if settings.background:
            self.consolidator.start(self.housekeeping.step)
        self._resumed = backfill.resume(self)

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
        parts = recovery.open_parts(path, chosen, engine, log)
        try:
            return Store(parts, chosen, clock)
        except BaseException:
            parts.release()
            raise

    def close(self) -> None:
        """Finishes what is in the log, folds and flushes. Harmless twice.

        Without disk space it closes as well: what could not be folded is in the log, and the next opening replays it.
        """
        with self._ddl:
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
        self._ddl = threading.RLock()
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

    # -- catalog ------------------------------------------------------------------------------------

    def table(self, name: str, lease: Lease | None = None) -> TableSchema:
        """The definition that readers see now, or at a snapshot; to one that sees none, the newest. Raises NotFound."""
        self.check_open()
        return self.catalog.visible.table(name) if lease is None else self.catalog.table(name, lease.ts)

    def tables(self) -> list[TableSchema]:
        self.check_open()
        return sorted(self.catalog.visible.by_id.values(), key=lambda schema: schema.name)

    def create(self, schema: TableSchema, *, progress: Progress | None = None) -> TableSchema:
        """Creates a table; for an aggregate on a table with events, returns when it is complete and readable.

        Raises AlreadyExists, and NotFound if an aggregate's source has gone.
        """
        with self._ddl:
            self.check_open()
            if schema.name in self.catalog.entered.by_name:
                raise AlreadyExists(f"there is a table {schema.name!r} already: drop it first, or use another name")
            if schema.kind == "aggregate":
                source = self.catalog.entered.table(schema.source or "")
                schema = dataclasses.replace(schema, source_id=source.id, state="building")
            created = self._define(schema)
        return backfill.build(self, created, progress) if schema.kind == "aggregate" else created

    def _define(self, schema: TableSchema) -> TableSchema:
        """One catalog transaction: name, counter, definition. Repeated if another one came in between."""
        while True:
            try:
                return self._define_once(schema)
            except Conflict:
                if schema.name in self.catalog.entered.by_name:
                    raise AlreadyExists(f"a table {schema.name!r} was created at the same moment") from None
                if schema.kind == "aggregate" and schema.source not in self.catalog.entered.by_name:
                    raise NotFound(f"the source {schema.source!r} was dropped meanwhile") from None

    def _define_once(self, schema: TableSchema) -> TableSchema:
        txn = self.transaction()
        try:
            counter = txn.get(COUNTERS, [("table",)])[0]
            table_id = (counter["value"] if counter else FIRST_ID - 1) + 1
            if schema.kind == "aggregate":  # which may have been overwritten a moment ago
                schema = dataclasses.replace(schema, source_id=self.catalog.entered.table(schema.source or "").id)
            defined = dataclasses.replace(schema, id=table_id)
            txn.put(COUNTERS, ("table",), {"value": table_id})
            txn.insert(NAMES, (schema.name,), {"id": table_id})
            txn.put(TABLES, (table_id,), {"name": schema.name, "definition": defined.to_json().decode()})
            if schema.source_id:
                txn.guard(TABLES, (schema.source_id,), "name")
            created_ts = self.commit_wait(txn)
        except RowExists:
            raise AlreadyExists(f"a table {schema.name!r} was created at the same moment") from None
        finally:
            self.rollback(txn)
        return dataclasses.replace(defined, created_ts=created_ts)

    def redefine(self, schema: TableSchema, commit_runs: Sequence[int] = ()) -> TableSchema:
        """Replaces a definition; for a finished backfill, together with the stages that hold its sums.

        Returns it as it is then. Raises NotFound if the table was dropped meanwhile.
        """
        txn = self.transaction()
        try:
            txn.put(TABLES, (schema.id,), {"name": schema.name, "definition": schema.to_json().decode()})
            if txn.get(NAMES, [(schema.name,)])[0] != {"name": schema.name, "id": schema.id}:
                raise NotFound(f"table {schema.name!r} was dropped meanwhile")
            txn.guard(NAMES, (schema.name,), "id")
            txn.run_stages[schema.id] = list(commit_runs)
            return dataclasses.replace(schema, created_ts=self.commit_wait(txn))
        finally:
            self.rollback(txn)

    def drop(self, name: str, *, only_id: int | None = None) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates depend on it.

        With ``only_id`` it does nothing if the name belongs to another table by now.
        """
        with self._ddl:
            self.check_open()
            while True:
                txn = self.transaction()
                try:
                    if only_id is not None and only_id not in self.catalog.entered.by_id:
                        return
                    schema = self.catalog.entered.table(name)  # after the snapshot: one in between conflicts
                    dependent = self.catalog.entered.aggregates.get(schema.id, ())
                    if dependent:
                        names = ", ".join(aggregate.name for aggregate in dependent)
                        raise InvalidArgument(f"{name!r} is the source of {names}: drop these first")
                    txn.delete(TABLES, (schema.id,))
                    txn.delete(NAMES, (name,))
                    self.commit_wait(txn)
                    return
                except Conflict:
                    self._watermark.wait_for(self.log.last, 1.0)  # the next attempt begins after the commits in flight
                finally:
                    self.rollback(txn)

    def event_store(self, table: int) -> EventStore | None:
        """The blocks of an event table, or None."""
        found = self._event_stores.get(table)
        if found is None:
            schema = self.catalog.schema_of(table)
            if schema is None or schema.kind != "event":
                return None
            with self._event_mutex:
                found = self._event_stores.get(table)
                if found is None:
                    found = self._event_stores[table] = EventStore(
                        self.engine, schema, block_rows=self.settings.block_rows
                    )
        return found

    def events_in_use(self, table: int) -> bool:
        """Whether somebody still reads the events of a table, which may have been dropped."""
        found = self._event_stores.get(table)
        return found is not None and found.open_views > 0

    def forget_events(self, table: int) -> None:
        """The table was dropped and its events are deleted."""
        self._event_stores.pop(table, None)

    # -- snapshots ------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether a commit would wait for consolidation to make room."""
        return self.pending.nbytes > self.settings.pending_hard_bytes

    def watermark(self) -> int:
        """The snapshot that a reader gets now."""
        return self._watermark.value

    @property
    def moved(self) -> Watermark:
        """For those who wait until it moves."""
        return self._watermark

    def begin(
        self,
        *,
        as_of_ts: int | None = None,
        as_of_us: int | None = None,
        min_snapshot: int | None = None,
        timeout_s: float | None = None,
        ttl_s: float | None = None,
    ) -> Lease:
        """A lease on the watermark, on a commit timestamp or on a moment (microseconds UTC).

        With ``min_snapshot`` it waits until the watermark is there; Unavailable when the time is up. A moment that is
        over waits likewise, for the commits up to it that are still in flight: it has one answer, now and later.
        """
        self.check_open()
        timeout_s = 10.0 if timeout_s is None else timeout_s
        if min_snapshot is not None:
            self._reach(min_snapshot, timeout_s)
        if as_of_us is not None:
            over = as_of_us < self.committer.now_us()
            with self.committer.entry_lock:  # whoever has a commit time by now has told the timeline
                pass
            as_of_ts = self.timeline.at(as_of_us)
            if over:
                self._reach(as_of_ts, timeout_s)
            else:
                as_of_ts = min(as_of_ts, self._watermark.value)
        return self.leases.open(as_of_ts, ttl_s)

    def _reach(self, ts: int, timeout_s: float) -> None:
        """Waits until ``ts`` can be read. Raises Unavailable when the time is up."""
        if not self._watermark.wait_for(ts, timeout_s):
            raise Unavailable(f"the snapshot {ts} is not readable yet; the watermark is {self._watermark.value}")

    def renew(self, lease_id: int, ttl_s: float | None = None) -> None:
        self.leases.renew(self.leases.find(lease_id), ttl_s)

    def release(self, lease: Lease | int) -> None:
        """Ends a snapshot; harmless if it has ended."""
        if isinstance(lease, int):
            try:
                lease = self.leases.find(lease)
            except SnapshotTooOld:
                return
        self.leases.release(lease)

    def get(
        self, lease: Lease, schema: TableSchema, keys: Sequence[tuple[Any, ...]], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any] | None]:
        """Rows by key at the snapshot, in stored form, derived columns included; None where there is no row."""
        self.check_open()
        return reads.get(self, lease, schema, keys, columns, None)

    def begin_together(self, count: int) -> list[Lease]:
        """So many leases on the watermark, all on one timestamp."""
        self.check_open()
        return self.leases.open_together(count)

    def has_bounded_rows(self, name: str) -> bool:
        """Whether there is such a table, and its rows are of fixed width."""
        schema = self.catalog.visible.by_name.get(name)
        return schema is not None and GetPlan.of(schema, None) is not None

    def tables_as_seen(self) -> object:
        """What tables readers see, to be compared by identity: another object after any change of them."""
        return self.catalog.visible

    def get_plan(self, schema: TableSchema, columns: Sequence[str] | None) -> GetPlan | None:
        """By which keys are read for ``get_each``; None if the table's rows may be long."""
        return GetPlan.of(schema, columns)

    def get_each(self, plan: GetPlan, wanted: Sequence[tuple[Lease, bytes]]) -> list[tuple[Any, ...] | None]:
        """Rows by encoded key, each at a snapshot of its own, as the plan's columns; None where there is no row."""
        self.check_open()
        return reads.get_each(self, plan.schema, wanted, plan.columns)

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]:
        """Record batches of bounded size, in key order (events: in commit order)."""
        self.check_open()
        if wanted.changes is not None:
            return change_reads.scan_changes(self, lease, schema, wanted, wanted.changes)
        return reads.scan(self, lease, schema, wanted, None)

    def few_rows(self, lease: Lease, schema: TableSchema, wanted: Scan) -> list[tuple[Any, ...]] | None:
        """A scan of some dozen rows of fixed width, as values of its columns; None: it is not that, call ``scan``."""
        self.check_open()
        return reads.few_rows(self, lease, schema, wanted)

    # -- transactions -----------------------------------------------------------------------------------

    def transaction(self, lease: Lease | None = None) -> Txn:
        self.check_open()
        return Txn(lease or self.begin(), self.settings, self)

    def blind_transaction(self) -> Txn:
        """One that will read nothing (so no insert either), which keeps no snapshot and costs consolidation nothing."""
        self.check_open()
        return Txn(self.leases.blind(), self.settings, self)

    def rollback(self, txn: Txn) -> None:
        """Gives the transaction up, and its lease. Harmless after a commit."""
        txn.closed = txn.closed or "it was rolled back"
        self.leases.release(txn.lease)

    def get_in(
        self, txn: Txn, schema: TableSchema, keys: Sequence[tuple[Any, ...]], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any] | None]:
        """``get`` with the transaction's own writes."""
        self.check_open()
        return reads.get(self, txn.lease, schema, keys, columns, txn)

    def scan_in(self, txn: Txn, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]:
        """``scan`` with the transaction's own writes."""
        self.check_open()
        return reads.scan(self, txn.lease, schema, wanted, txn)

    def row_in(self, txn: Txn, schema: TableSchema, key: bytes) -> bool:
        """Whether the transaction sees a row at ``key``."""
        version = None
        if not txn.sees_none(schema):
            txn.lease.used = True
            version = self.reader.get(txn.lease, schema, [key])[0]
        return txn.overlay(schema, version, txn.rows.get((schema.id, key))) is not None

    def load_stages(self, schema: TableSchema, stage_ids: Sequence[bytes]) -> list[Staged]:
        """The events, or rows, of stages of ``schema``. Raises NotFound for what is no stage of this store.

        A stage that is not live any more loads as no events: whether that is an error is for the commit to say, once
        it has looked its token up. A repeated batch names stages that its first attempt has used up (R16).
        """
        sequences = [self.stages.sequence_of(stage_id) for stage_id in stage_ids]
        if len(set(sequences)) != len(sequences):
            raise InvalidArgument("a stage is named twice")
        with self.committer.entry_lock:
            live = {sequence for sequence in sequences if self.stages.is_live(sequence, schema.origin)}
        loaded: list[Staged] = []
        for sequence in sequences:
            batches: list[pa.RecordBatch] = []
            if sequence in live:
                with contextlib.suppress(NotFound):  # it expired meanwhile, and the log was truncated behind it
                    batches = own_batches(decode_stage(self.log.read(sequence).body).data[0])
            loaded += [Staged(sequence, batch) for batch in batches or [_no_rows(schema)]]
        return loaded

    # -- commit -------------------------------------------------------------------------------------------

    def commit(
        self,
        txn: Txn,
        *,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        done: Callable[[Outcome], None],
    ) -> None:
        """Commits. ``done(outcome)`` is called once, here or later from the log's thread: it must be quick.

        Encodes and derives in the calling thread, which may also wait for room. The lease ends with the commit.
        """
        self.commit_together([Commit(txn, token, batch, done)])

    def commit_together(self, commits: Sequence[Commit]) -> None:
        """``commit`` of several, which enter as a group (R19): one that is refused takes no other with it."""
        began = time.monotonic()
        refused: list[Callable[[], None]] = []
        waiting: list[tuple[Commit, Tell]] = []
        for commit in commits:
            settled: Tell = functools.partial(self._settled, commit, began)
            try:
                if self._commits(commit):
                    waiting.append((commit, settled))
                else:
                    refused.append(functools.partial(settled, Outcome(commit.txn.start_ts)))
            except KiviError as error:
                refused.append(functools.partial(settled, Outcome(None, error)))
        while waiting:
            parts: dict[Part, tuple[Commit, Tell]] = {}
            for commit, settled in waiting:
                try:
                    with self.computing if commit.txn.in_columns else contextlib.nullcontext():
                        part = self._prepare(commit.txn, commit.token, commit.batch)
                    part.lease, part.answer = commit.txn.lease, told(settled)
                    parts[part] = commit, settled
                except KiviError as error:
                    refused.append(functools.partial(settled, Outcome(None, error)))
            waiting = [parts[stale] for stale in self.committer.submit([*parts])] if parts else []
        call_all(refused)

    def _commits(self, commit: Commit) -> bool:
        """Checks it and closes its transaction. False: there is nothing to commit."""
        txn, token, batch, _ = commit
        self.check_open()
        if txn.closed:
            raise InvalidArgument(f"the transaction is over: {txn.closed}")
        txn.closed = "it was committed"
        check_batch_token(batch)
        if token is not None and batch is not None:
            raise InvalidArgument("a commit has a request token or a batch token, not both: a batch token is enough")
        if token is not None:
            check_token(token)
        named = batch is not None or (token is not None and issued_at_us(token) is None)
        if not txn.wrote and not named:
            self.leases.check(txn.lease)
            return False
        return True

    def _settled(self, commit: Commit, began: float, outcome: Outcome) -> None:
        txn = commit.txn
        txn.commit_ts = outcome.commit_ts
        if outcome.commit_ts is not None and not txn.lease.id:
            txn.lease.ts = outcome.commit_ts - 1  # it has read nothing, and began just before its commit (R19)
        if outcome.error is None:
            self.committer.times.observe(time.monotonic() - began)
        self.leases.release(txn.lease)
        commit.done(outcome)
        if outcome.repeated and txn.wrote:
            stages = [staged.sequence for items in txn.staged.values() for staged in items]
            stages += [sequence for items in txn.staged_rows.values() for sequence in items]
            if stages:
                with contextlib.suppress(KiviError):  # they expire by themselves; nobody's answer may depend on it
                    self._drop_stages(stages)

    @property
    def catalog_version(self) -> int:
        return self.catalog.entered.version

    def write_plans(self) -> tuple[int, dict[str, WritePlan] | None]:
        """The catalog's version, and by which deltas and puts of its row tables are read for ``write``; None for now: a
        change of the catalog is on its way."""
        return plans_of(self.catalog, self.settings.max_value_bytes)

    def write_set(self, rows: list[tuple[WritePlan, bytes, RowOp]]) -> WriteSet | None:
        """What a transaction of deltas and puts does, for ``write``; None if a row occurs twice."""
        ordered = [(plan.id, key, op) for plan, key, op in rows]
        guards = [plan.guard for plan, _, _ in rows]
        if len(rows) > 1:
            ordered.sort(key=lambda row: row[:2])
            if any(a[:2] == b[:2] for a, b in itertools.pairwise(ordered)):
                return None
            guards = list(dict.fromkeys(guards))
        sent = None
        if any(plan.origin != plan.id for plan, _, _ in rows):
            sent = sorted(((plan.origin, key, op) for plan, key, op in rows), key=lambda row: row[:2])
        return WriteSet(ordered, guards, sent)

    def write(
        self,
        catalog_version: int,
        does: Sequence[WriteSet],
        tokens: Sequence[str],
        tags: Sequence[Any],
        answer: Answer,
    ) -> Sequence[Any]:
        """Commits transactions of deltas and puts that have read nothing, together, each under a token of its own.

        ``catalog_version`` is that of the catalog by which they were made. If there is another by now, nothing is done
        and nobody told: the tags of all are returned. ``answer`` is called by the log's thread: it must be quick.
        """
        self.check_open()
        part = Writes(catalog_version, does, tokens, tags, _Timed(answer, self.committer.times))
        return [tag for stale in self.committer.submit([part]) for tag in stale.tags]

    def append_each(
        self,
        schema: TableSchema,
        batch: pa.RecordBatch,
        *,
        token: str,
        drop_late: bool = False,
        done: Callable[[Outcome], None],
    ) -> None:
        """Events that are each a transaction of their own, of which event i commits at ``outcome.commit_ts + i``.

        Refused whole, if at all. ``done`` is called once, here or by the log's thread: it must be quick.
        """
        began = time.monotonic()

        def settled(outcome: Outcome) -> None:
            if outcome.error is None and not outcome.repeated:
                self.committer.times.observe(time.monotonic() - began, batch.num_rows)
            done(outcome)

        try:
            self.check_open()
            check_token(token)
            check_events(batch, self.settings)
            if not batch.num_rows:
                raise InvalidArgument("there are no events to append")
            while True:
                with self.computing:
                    view = self.catalog.entered
                    part = prepare_events(
                        schema, batch, token, drop_late, view, self.floor, self.retention, told(settled)
                    )
                if not self.committer.submit([part]):
                    return
        except KiviError as error:
            settled(Outcome(None, error))

    def floor(self, schema: TableSchema) -> int | None:
        """The retention floor that the next commit meets."""
        with self.committer.entry_lock:
            return self.retention.newest(schema.id)

    def _prepare(self, txn: Txn, token: str | None, batch: tuple[str, int] | None) -> Single:
        view = self.catalog.entered
        floors = txn.floors = {table: self.floor(txn.schemas[table]) for table in txn.floors}

        def newest(table: int, key: bytes) -> int | None:
            schema = view.by_id.get(table)
            return self.reader.newest(schema, key) if schema is not None and schema.kind == "aggregate" else None

        new = new_generations(view, [txn.schemas[table] for table in txn.overwritten])
        prepared = prepare(
            txn,
            view,
            new,
            request=token,
            batch=batch,
            newest=newest,
            name_of=lambda t: SYSTEM.get(t) or view.by_id.get(t),
        )
        gone = [schema for table, schema in txn.schemas.items() if not (table in SYSTEM or table in view.by_id)]
        if txn.overwritten and prepared.blind:
            gone = [schema for schema in gone if schema.id not in new.of]
        commit = prepared.commit
        catalog_rows = changes(commit.rows)
        run_stages = [stage for stages in txn.run_stages.values() for stage in stages]
        if run_stages:
            backfill.attach(self, prepared, txn.run_stages)
        named = sequences_of([*commit.appends, *commit.runs])
        earliest = earliest_times(
            (schema, txn.events_of(schema.id)) for schema in txn.schemas.values() if schema.id not in txn.overwritten
        )

        def check() -> None:
            for schema in gone:
                if (now := view.successor(schema)) is not None:
                    flying = now.created_ts > self.watermark()
                    raise Conflict(
                        table=schema.name, start_ts=txn.start_ts, commit_ts=None if flying else now.created_ts
                    )
                raise NotFound(f"table {schema.name!r} was dropped", table=schema.name)
            if any(self.retention.newest(table) != floor_us for table, floor_us in floors.items()):
                raise StaleCatalog  # the floor moved: what is late is to be found again
            self.retention.check(earliest)
            for bulk in (*commit.appends, *commit.runs):
                if bulk.stage:
                    self.stages.live([bulk.stage], new.origin(bulk.table, view))

        def enter(cts: int) -> None:
            self.late_dropped += sum(txn.late.values())
            self.stages.commit(named, cts)
            if catalog_rows:
                self.catalog.enter(catalog_rows, cts)

        prepared.on_check = check if named or earliest or gone or floors else None
        prepared.on_enter = enter if named or catalog_rows or txn.late else None
        if catalog_rows:
            prepared.on_apply = lambda cts: self.catalog.apply(catalog_rows, cts)
        prepared.on_abort = self.stages.undo if named else None
        return prepared

    def commit_wait(
        self,
        txn: Txn,
        *,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """The blocking form: the commit timestamp, or raises. CommitUnknown if the time is up first."""
        commit = functools.partial(self.commit, txn, token=token, batch=batch)
        return self.wait(commit, token=token, timeout_s=timeout_s)

    def wait(self, commit: Callable[..., None], *, token: str | None, timeout_s: float | None = None) -> int:
        """Calls ``commit(done=...)`` and waits: the commit timestamp, or raises. CommitUnknown if the time is up."""
        settled = threading.Event()
        outcomes: list[Outcome] = []

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            settled.set()

        commit(done=done)
        if not settled.wait(self.settings.commit_timeout_s if timeout_s is None else timeout_s):
            raise CommitUnknown(token=token)
        outcome = outcomes[0]
        if outcome.error is not None:
            raise outcome.error
        assert outcome.commit_ts is not None
        return outcome.commit_ts

    def committed_at(self, *, token: str | None = None, batch: tuple[str, int] | None = None) -> int | None:
        """The CTS under which a token has committed and can be read, if it is remembered: a look, no promise."""
        with self.committer.entry_lock:
            cts = self.tokens.committed_at(token, batch)
        return cts if cts is not None and cts <= self.watermark() else None

    def outcome(
        self, token: str, place: int | None = None, *, timeout_s: float = 10.0
    ) -> tuple[TokenState, int | None]:
        """What became of a request token, or of one of its members; without ``place``, of the first.

        Fences it before it says aborted, so that a late attempt cannot commit. Raises InvalidArgument for a place that
        the token has no member at.
        """
        self.check_open()
        while True:
            settled = threading.Event()
            outcomes: list[Outcome] = []

            def arrived(outcome: Outcome, settled: threading.Event = settled, to: list[Outcome] = outcomes) -> None:
                to.append(outcome)
                settled.set()

            found, waits = self.committer.find_token(token, arrived)
            if waits:
                if not settled.wait(timeout_s) or isinstance(outcomes[0].error, Unavailable):
                    return "unknown", None
                if outcomes[0].commit_ts is None:
                    return ("aborted" if isinstance(outcomes[0].error, Aborted) else "unknown"), None
            elif found is not None:
                if found.cts == FENCED:
                    return "aborted", None
                if not 0 <= (place or 0) < found.members:
                    raise InvalidArgument(f"the token {token!r} has the places 0 to {found.members - 1}, not {place}")
                cts = found.cts + (place or 0)
                self._watermark.wait_for(cts, timeout_s)
                return "committed", cts
            else:
                try:
                    self.tokens.check_age(token, self.committer.now_us())
                except InvalidArgument:
                    return "unknown", None
                if self.committer.fence(token):
                    return "aborted", None

    def batch_scopes(self, prefix: str = "") -> list[str]:
        """The scopes under which batches were committed, by prefix."""
        return self.tokens.scopes(prefix)

    # -- stages -------------------------------------------------------------------------------------------

    def stage(
        self,
        schema: TableSchema,
        batch: pa.RecordBatch,
        *,
        owner: str,
        done: Callable[[BaseException | None, bytes | None], None],
    ) -> None:
        """Logs events or rows durably and invisibly; ``done(None, stage id)`` once they are on disk."""
        if schema.kind == "aggregate":
            raise InvalidArgument(f"only events and rows can be staged, and {schema.name!r} is an aggregate")
        check_events(batch, self.settings)
        self.log_stage(StageKind.EVENTS, schema.origin, batch.num_rows, owner, [encode_ipc(coded(batch))], done)

    def log_stage(
        self,
        kind: StageKind,
        table: int,
        rows: int,
        owner: str,
        data: Sequence[Any],
        done: Callable[[BaseException | None, bytes | None], None],
    ) -> None:
        self.check_open()
        body = Stage(kind, table, rows, owner, data).encode()
        nbytes = sum(memoryview(part).nbytes for part in body)
        entered: list[int] = []

        def enter(sequence: int) -> None:
            entered.append(sequence)
            self.stages.add(LiveStage(sequence, kind, table, rows, nbytes, owner, int(self.clock() * 1_000_000)))

        def durable(error: BaseException | None) -> None:
            done(error, None if error else self.stages.id_of(entered[0]))

        with self.committer.entry_lock:
            self.stages.check_quota(nbytes)
        self.committer.log_other(Kind.STAGE, body, durable, enter)

    def staged_bytes(self, owner: str) -> int:
        """Staged and not committed, by owners whose name begins so."""
        with self.committer.entry_lock:
            return self.stages.held_by(owner)

    def stage_wait(self, schema: TableSchema, batch: pa.RecordBatch, *, owner: str) -> bytes:
        """The blocking form of ``stage``."""
        return waited(lambda done: self.stage(schema, batch, owner=owner, done=done))

    def discard_stages(self, stage_ids: Sequence[bytes]) -> None:
        """Gives stages up; those that were committed or dropped before are passed over."""
        self._drop_stages([self.stages.sequence_of(stage_id) for stage_id in stage_ids])

    def _drop_stages(self, sequences: Sequence[int]) -> None:
        with self.committer.entry_lock:
            live = [s for s in sequences if self.stages.is_live(s)]
            self.stages.drop(live)
        if live:
            self.committer.log_other(Kind.ABORT, Abort(stages=tuple(live)).encode(), lambda error: None)

    def drop_stages(self, sequences: Sequence[int]) -> None:
        self._drop_stages(sequences)

    # -- operation ------------------------------------------------------------------------------------------

    def consolidate(self) -> int:
        """Folds everything up to the watermark of now into base; returns that watermark."""
        self.check_open()
        return self.consolidator.run()

    def checkpoint(self, path: str) -> None:
        """A copy of the store at one moment, in a new directory: opening it gives the same answers."""
        self.check_open()
        recovery.checkpoint(self, path)

    def backup(self, repository: str, keep: int | None = None) -> dict[str, Any]:
        """See ``kivi.store.backups.make``."""
        self.check_open()
        return backups.make(self, repository, keep)

    def statistics(self, schema: TableSchema) -> dict[str, int]:
        """What is cheap to know about a table's contents."""
        events = self.event_store(schema.id) if schema.kind == "event" else None
        if events is None:
            return {}
        upto = self.watermark()
        waiting = self.pending.events(schema.id, upto)
        summary = events.view(upto)
        with summary:
            floor = summary.floor_us = self.retention.floor_at(schema.id, upto, summary.floor_us)
            recent = [part.batch for item in waiting if (part := item.after(summary.events_upto)) is not None]
            rows = sum(remembered(batch, schema, floor).num_rows for batch in recent)
            rows += summary.rows if floor is None else summary.summary().rows
            out = {"rows": rows} | ({} if floor is None else {"complete_since_us": floor})
        lease = self.begin()
        try:
            counted = reads.get(self, lease, LATE, [(schema.origin,)], ("dropped",), None)[0]
        finally:
            self.release(lease)
        return out | ({"late_dropped": counted["dropped"]} if counted is not None else {})

    def split_points(self, schema: TableSchema, rows: int) -> list[tuple[Any, ...]]:
        """See ``kivi.store.splitting``."""
        self.check_open()
        if schema.kind != "event":
            return list(row_points(self.engine, schema, rows))
        events = self.event_store(schema.id)
        if events is None:
            return []
        upto = self.watermark()
        recent = [item.batch for item in self.pending.events(schema.id, upto)]
        with events.view(upto) as view:
            return list(event_points(schema, view.blocks, recent, rows))

    def tail_points(self, schema: TableSchema, since: int, rows: int, upto: int | None, most: int) -> TailPoints:
        """Where the commits in (since, upto] of an event table, or of an aggregate's source, can be cut."""
        self.check_open()
        return change_reads.tail_points(self, schema, since, rows, upto, most)

    def stats(self) -> dict[str, int | float]:
        """Flat numbers for metrics and ``kivi status``."""
        counters = self.committer.counters
        oldest = self.leases.oldest()
        watermark = self._watermark.value  # first: it is never above what was handed out before
        last = self.log.last
        return {
            "watermark": watermark,
            "last_ts": last,
            "watermark_lag": last - watermark,
            "in_flight": self._watermark.in_flight,
            "commits": counters.commits,
            "commits_grouped": counters.commits_grouped,
            "aborts_conflict": counters.conflicts,
            "aborts_too_old": counters.too_old,
            "aborts_no_room": counters.no_room,
            "aborts_storage": counters.storage,
            "commits_unknown": counters.unknown,
            "rederived": counters.rederived,
            "token_hits": self.tokens.hits,
            "tokens_unsaved": self.tokens.unsaved,
            "conflict_facts": self.committer.facts_size,
            "conflict_floor": self.committer.facts_floor,
            "leases": len(self.leases),
            "leases_cut": self.leases.cut,
            "oldest_snapshot": oldest if oldest is not None else watermark,
            "oldest_snapshot_age_s": self.leases.oldest_age_s(),
            "pending_bytes": self.pending.nbytes,
            "pending_operations": self.pending.operations,
            "consolidated_upto": self.consolidator.position,
            "consolidated_durable_upto": self.consolidator.durable_position,
            "consolidations": self.consolidator.passes,
            "consolidated_rows": self.consolidator.rows_folded,
            "consolidation_seconds": self.consolidator.busy_s,
            "block_compactions": self.consolidator.compactions,
            "block_compacted_rows": self.consolidator.compacted_rows,
            "version_bytes": self.consolidator.sweeper.versions_bytes,
            "stages": len(self.stages),
            "stage_bytes": self.stages.live_bytes,
            "late_dropped": self.late_dropped,
            "summary_blocks_known": self.summary_blocks_known,
            "summary_blocks_read": self.summary_blocks_read,
            "tables": len(self.catalog.visible.by_id),
            "engine_errors_open": self.consolidator.engine_errors,
            **self.shortage.stats(),
            **{f"log_{name}": value for name, value in self.log.stats().items()},
            **{f"engine_{name}": value for name, value in self.engine.stats().items()},
        }

    def histograms(self) -> dict[str, Histogram]:
        """Distributions, for metrics."""
        return {
            "commit_s": self.committer.times,
            "log_sync_s": self.log.sync_times,
            "consolidation_s": self.consolidator.pass_times,
            "read_runs": self.reader.runs_searched,
        }


def waited(call: Callable[[Callable[[BaseException | None, bytes | None], None]], None]) -> bytes:
    """Runs an asynchronous stage call and waits for it."""
    settled = threading.Event()
    results: list[tuple[BaseException | None, bytes | None]] = []

    def done(error: BaseException | None, stage_id: bytes | None) -> None:
        results.append((error, stage_id))
        settled.set()

    call(done)
    settled.wait()
    error, stage_id = results[0]
    if error is not None:
        raise error
    assert stage_id is not None
    return stage_id
