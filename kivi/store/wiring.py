"""The parts of a store, each wired to those that it uses.

What works with many of them, as statistics and housekeeping do, names those that it may use: ``kivi.store.host``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from kivi.encoding.event_names import EventNames
from kivi.errors import KiviError, Unavailable
from kivi.events.cold_tier import ColdTier
from kivi.log import CommitLog
from kivi.log.followed import FollowedLog
from kivi.log.replicated import ReplicatedLog
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Committer
from kivi.mvcc.consolidate import AHEAD, Consolidator
from kivi.mvcc.following import FollowingCommitter
from kivi.mvcc.forgetting import Forgetting
from kivi.mvcc.groups import Part
from kivi.mvcc.leases import Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.prefix import Prefix
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.mvcc.row_floors import RowFloors
from kivi.mvcc.shortage import LOG, Shortage
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import Tokens
from kivi.mvcc.turns import Turns
from kivi.mvcc.verdict import Facts
from kivi.mvcc.watermark import Watermark
from kivi.runtime.settings import COMPUTING, Settings
from kivi.store.catalog import TABLES, Catalog
from kivi.store.change_reads import ChangeReads
from kivi.store.commits import Commits
from kivi.store.copies import Copies
from kivi.store.event_tables import EventTables
from kivi.store.hierarchies import Hierarchies
from kivi.store.judging import Judging
from kivi.store.known_rows import KnownRows
from kivi.store.lateness import Lateness
from kivi.store.opening import Parts
from kivi.store.plans import GetPlan
from kivi.store.questions import Questions
from kivi.store.reads import Reads
from kivi.store.replay import enter_other
from kivi.store.retention import Retention
from kivi.store.retraction import Retractions
from kivi.store.shards import Shards
from kivi.store.snapshots import Snapshots
from kivi.store.staging import Stages, Staging
from kivi.store.transaction import Txn
from kivi.store.view_rows import ViewRows

__all__ = ["Wiring"]


def _committer_of(log: CommitLog) -> type[Committer]:
    if isinstance(log, FollowedLog):
        return FollowingCommitter
    return ReplicatedCommitter if isinstance(log, ReplicatedLog) else Committer


class Wiring:
    """The parts. ``_wire`` makes those that look at the others' memory, once ``kivi.store.replay`` has filled it."""

    def __init__(self, parts: Parts, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.parts = parts
        engine, log = parts.engine, parts.log
        self.engine, self.log = engine, log
        self.catalog = Catalog()
        self.pending = Pending()
        self.timeline = Timeline(engine)
        self.tokens = Tokens(engine, ttl_us=int(settings.request_token_ttl_s * 1_000_000))
        self.stages = Stages(parts.store_id, max_bytes=settings.stage_bytes)
        self.cold = ColdTier(parts.path, cache_bytes=settings.cold_cache_bytes, timeout_s=settings.cold_timeout_s)
        self.shards = Shards()
        self.event_tables = EventTables(engine, self.catalog, settings.block_rows, parts.path, self.cold)
        self._closed = False
        self._why_closed = "the store is closed"
        self.is_parents = False
        """This is a child of the process that opened it, which has none of its threads."""
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
        self.prefix = Prefix(engine) if log.is_judged_again else None
        self._ahead = int.from_bytes(engine.get(AHEAD) or b"", "little") if log.is_judged_again else 0
        self.committer = _committer_of(log)(
            log,
            self.pending,
            self.moved,
            self.leases,
            facts,
            self.tokens,
            pending_soft_bytes=settings.pending_soft_bytes,
            pending_hard_bytes=settings.pending_hard_bytes,
            is_behind=self._is_behind,
            is_aggregate=lambda table: (s := self.catalog.schema_of(table)) is not None and s.kind == "aggregate",
            timeline=self.timeline,
            shortage=self.shortage,
            clock=clock,
        )
        if isinstance(self.committer, ReplicatedCommitter) and self.prefix is not None:
            self.committer.prefix = self.prefix
            self.committer.is_sharded = lambda table: (
                (s := self.catalog.schema_of(table)) is not None and bool(s.shard_by)
            )
        self.row_floors = RowFloors(engine)
        self.retention = Retention(
            engine, self.event_tables, self.row_floors, self.committer, self.catalog.schema_of, self.catalog.touch
        )
        self.computing = Turns(COMPUTING)

    def _wire(self, position: int) -> None:
        """The parts that begin with what base and the log hold, and of each part what callers call."""
        self.consolidator = Consolidator(
            self.engine,
            self.log,
            self.pending,
            self.leases,
            self.tokens,
            self.timeline,
            self.settings,
            schema_of=self.catalog.schema_of,
            schemas=lambda: list(self.catalog.entered.by_id.values()),
            sealer_of=self.event_tables.of,
            stages=self.stages,
            before_position=self.retention.save,
            with_position=self.committer.rows,
            entry_lock=self.committer.entry_lock,
            now_us=self.committer.now_us,
            position=position,
            computing=self.computing,
            shortage=self.shortage,
        )
        self.reader = Reader(
            self.engine,
            self.pending,
            self.leases,
            self.consolidator.sweeper.history_floor_of,
            row_floor=self.retention.row_floor,
            schema_of=self.catalog.schema_of,
            exists=self.catalog.is_visible,
            missing=self.catalog.missing,
        )
        self.forgetting = Forgetting(self.engine, self.leases, self.row_floors, self.consolidator.sweeper)
        self.committer.on_pressure = self.consolidator.hurry
        self.committer.enter_other = partial(enter_other, self)

        opened = self.check_open
        snapshots = self.snapshots = Snapshots(self.leases, self.moved, self.timeline, self.committer, opened)
        self.begin, self.begin_together = snapshots.begin, snapshots.begin_together
        self.renew, self.release = snapshots.renew, snapshots.release
        self.begin_shared, self.find_shared = snapshots.begin_shared, snapshots.find_shared
        self.renew_shared = snapshots.renew_shared

        staging = self.staging = Staging(self.stages, self.log, self.committer, self.settings, opened)
        self.stage, self.stage_wait, self.log_stage = staging.stage, staging.stage_wait, staging.log_stage
        self.load_stages, self.discard_stages = staging.load, staging.discard
        self.staged_bytes = staging.held_by

        questions = self.questions = Questions(self.catalog, self.retention, self.timeline, self.settings.query_bytes)
        reads = self.reads = Reads(
            self.catalog,
            self.reader,
            self.pending,
            self.leases,
            self.retention,
            self.event_tables,
            questions,
            self.shards,
            snapshots,
            opened,
        )
        self.spanning = reads.spanning
        self.leases.has_no_room = lambda: self.pending.nbytes > self.settings.pending_soft_bytes
        self.get, self.get_each, self.few_rows = reads.get, reads.get_each, reads.few_rows
        self.has_rows, self.has_bounded_rows = reads.has_rows, reads.has_bounded_rows
        self.maybe_there = reads.maybe_there
        self.get_plan = GetPlan.of

        changes = self.changes = ChangeReads(reads, self.row_floors, self.moved, self.parts.store_id)
        self.tail_points = changes.tail_points

        retractions = Retractions(
            reads,
            self.computing,
            self.settings,
            lambda: self.moved.value,
            lambda s: commits.wait_for_entered(s),
            self.log.is_judged_again,
        )
        self.hierarchies = Hierarchies(self.catalog, reads, snapshots)
        self.lateness = Lateness(snapshots, reads, self.committer.now_us)
        self._retractable = retractions.find
        views = self.view_rows = ViewRows(self.catalog, self.reader)
        self.own_view_ops = views.own_ops
        judging = Judging(
            self.catalog,
            self.reader,
            self.settings,
            lambda schema: commits.floor(schema),
            self.retention.newest_of,
            KnownRows(self.pending, self.reader, lambda: self.log.last),
            self.retention,
            self.spanning,
        )
        commits = self.commits = Commits(
            self.settings, self.log, self.catalog, self.committer, self.leases, self.moved, self.tokens, self.retention,
            staging, self.reader, self.computing, retractions, views, judging, self.shards, opened,
        )  # fmt: skip
        self.commit, self.commit_together = commits.commit, commits.commit_together
        self.asks_others = commits.asks_others
        self.commit_wait, self.wait = commits.commit_wait, commits.wait
        self.write, self.write_set, self.write_plans = commits.write, commits.write_set, commits.write_plans
        self.append_each, self.floor, self.rollback = commits.append_each, commits.floor, commits.rollback
        self.outcome, self.committed_at = commits.outcome, commits.committed_at
        self.batch_scopes = self.tokens.scopes
        self.copies = Copies(self.engine, changes)

    def find_events(self, txn: Txn, schema: TableSchema, wanted: Scan) -> EventNames:
        """The names of the events of a scan, without those that the transaction has retracted already."""
        if txn.lease.tenant is not None:
            wanted = txn.lease.tenant.narrowed(schema, wanted)
        return self._retractable(txn, schema, self.hierarchies.resolved(txn.lease, schema, wanted, txn))

    def _is_behind(self, part: Part) -> bool:
        if part.derived_at >= self.catalog.changed_at:
            return False
        tables = part.tables()
        return TABLES.id in tables or self.catalog.is_behind(part.derived_at, tables)

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def is_follower(self) -> bool:
        """Whether another process commits, and this one reads: see ``kivi.store.following``."""
        return isinstance(self.log, FollowedLog)

    @property
    def is_catching_up(self) -> bool:
        """Base has more than W says, so that nothing can be read, nor derived: see ``kivi.mvcc.replicated``."""
        return self.moved.value < self._ahead

    def check_open(self) -> None:
        if self._closed:
            raise Unavailable(self._why_closed)
        if (stopped := self.log.failed) is not None:
            raise Unavailable(f"this node has stopped ({stopped.message}): ask another one")
        if self._ahead and self.is_catching_up:
            raise Unavailable("this node has not caught up with what it had before it was stopped: ask another one")
        if (failure := self.consolidator.failure) is not None:
            if isinstance(failure, KiviError):
                raise failure
            raise Unavailable(f"the store stopped: {failure!r}; restart it")

    def _room_in_the_log(self, error: KiviError | None) -> None:
        if error is None:
            self.shortage.works(LOG)
        else:
            self.shortage.failed(LOG, error)
