"""Committing: from a transaction, write sets or events to parts of a group, and to outcomes.

::

    prepare    in the caller's thread, without a lock: derive, validate, encode; again if the catalog changed meanwhile
    submit     ``mvcc.commit``
    done       called once, here or by the log's thread, so it must be quick
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

import pyarrow as pa

from kivi.delta.ops import RowOp
from kivi.delta.runs import DeltaRun
from kivi.errors import (
    CommitUnknown,
    Conflict,
    InvalidArgument,
    KiviError,
    NotFound,
    ResourceExhausted,
    RowExists,
    SnapshotTooOld,
    Unavailable,
)
from kivi.log import CommitLog
from kivi.log.features import LATE_STAGES
from kivi.log.shards import EVERY
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Aborted, Committer
from kivi.mvcc.groups import Answer, Events, Outcome, Part, Single, Tell, Writes, WriteSet, told
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.record import Bulk
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.tokens import FENCED, Tokens, issued_at_us
from kivi.mvcc.turns import Turns
from kivi.mvcc.watermark import Watermark, call_all
from kivi.runtime.histogram import Histogram
from kivi.runtime.settings import Settings
from kivi.store.catalog import SYSTEM, Catalog, View, changes, features_of
from kivi.store.checks import check_batch_token, check_events, check_token
from kivi.store.event_commits import derived_together, prepare_events
from kivi.store.judging import Judgement, Judging
from kivi.store.overwrite import new_generations
from kivi.store.plans import WritePlan
from kivi.store.retention import Retention, earliest_times
from kivi.store.retraction import Retractions
from kivi.store.shards import Shards
from kivi.store.staging import Staging, sequences_of, staged_data
from kivi.store.transaction import Brought, Derived, Txn, prepare
from kivi.store.view_rows import ViewRows

__all__ = ["Commit", "Commits", "Opened", "TokenState"]

R = TypeVar("R")
TokenState = Literal["committed", "aborted", "unknown"]
_DERIVING_S: Final = 10.0
"""How long commits that have read nothing are derived again from rows that others change, before that is a conflict."""
_NO_TURN: Final = contextlib.nullcontext()


class Commit(NamedTuple):
    """A transaction to commit, and who is told of its outcome: see ``Commits.commit``."""

    txn: Txn
    token: str | None
    batch: tuple[str, int] | None
    done: Tell


class _Timed:
    """Passes on what became of a part, and notes how long its commits took, from when they were asked for."""

    __slots__ = ("_answer", "_began", "_times")

    def __init__(self, answer: Answer, times: Histogram) -> None:
        self._answer, self._times, self._began = answer, times, time.monotonic()

    def entered(self, part: Part, unknown: CommitUnknown | None) -> None:
        if unknown is None:
            self._times.observe(time.monotonic() - self._began, part.members)
        self._answer.entered(part, unknown)

    def apart(self, tag: Any, outcome: Outcome) -> None:
        self._answer.apart(tag, outcome)


class Opened(contextlib.ExitStack):
    """Snapshots of those that have none, and are derived from rows; they end with the block."""

    def __init__(self, leases: Leases) -> None:
        super().__init__()
        self._leases = leases
        self._common: Lease | None = None

    def another(self) -> Lease:
        """One that was not open before."""
        lease = self._leases.open()
        self.callback(self._leases.release, lease)
        return lease

    def common(self) -> Lease:
        """One for all commits of a group."""
        if self._common is None:
            self._common = self.another()
        return self._common


@dataclass(slots=True)
class Commits:
    """Thread safe."""

    settings: Settings
    log: CommitLog
    catalog: Catalog
    committer: Committer
    leases: Leases
    watermark: Watermark
    tokens: Tokens
    retention: Retention
    staging: Staging
    reader: Reader
    computing: Turns
    retractions: Retractions
    view_rows: ViewRows
    judging: Judging
    shards: Shards
    check_open: Callable[[], None]
    late_dropped: int = 0

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

    def commit_together(self, commits: Sequence[Commit], *, may_wait: bool = True) -> Sequence[Commit]:
        """``commit`` of several, which enter as a group (R19): one that is refused takes no other with it.

        Gives back, as if they had not been handed in, those that would have to wait for room and may not.
        """
        began = time.monotonic()
        refused: list[Callable[[], None]] = []
        waiting: list[Commit] = []
        for commit in commits:
            try:
                if self._close(commit):
                    waiting.append(commit)
                else:
                    refused.append(functools.partial(self._settled, commit, began, Outcome(commit.txn.start_ts)))
            except KiviError as error:
                refused.append(functools.partial(self._settled, commit, began, Outcome(None, error)))
        try:
            return self._enter(waiting, began, may_wait)
        finally:
            call_all(refused)

    def _enter(self, waiting: list[Commit], began: float, may_wait: bool) -> Sequence[Commit]:
        """Prepares and submits commits whose transactions are closed, again where something changed meanwhile."""
        refused: list[Callable[[], None]] = []
        while waiting:
            parts: dict[Part, Commit] = {}
            again = time.monotonic() - began < _DERIVING_S
            with Opened(self.leases) as opened:
                derived_at, view = self.catalog.changed_at, self.catalog.entered
                brought = self._brought([commit.txn for commit in waiting], view, opened)
                for i, commit in enumerate(waiting):
                    try:
                        with self.computing if commit.txn.in_columns else _NO_TURN:
                            part = self._prepare(commit, derived_at, view, opened, brought.get(i))
                        if commit.txn.retracted:
                            self.retractions.prepare(part, commit.txn, self.catalog.entered, opened)
                        answer = told(functools.partial(self._settled, commit, began))
                        part.answer = answer
                        part.derives_again = again and part.lease is not commit.txn.lease
                        part.derive_again = functools.partial(self._enter, [commit], began, True)
                        parts[part] = commit
                    except KiviError as error:
                        refused.append(functools.partial(self._settled, commit, began, Outcome(None, error)))
                given_back = self.committer.submit([*parts], may_wait=may_wait) if parts else ()
                waiting = [parts[back] for back in given_back]
            if not waiting:
                break
            behind = max((back.behind for back in given_back if isinstance(back, Single)), default=0)
            if not may_wait and (self.committer.is_full or behind > self.watermark.value):
                break
            self.watermark.wait_for(behind, _DERIVING_S)
        for commit in waiting:
            commit.txn.closed = ""
        call_all(refused)
        return waiting

    def _close(self, commit: Commit) -> bool:
        """Closes its transaction. Raises if that may not commit; False if it has nothing to commit."""
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
                    self.staging.drop(stages)

    def write_plans(self) -> tuple[int, dict[str, WritePlan] | None]:
        """``Catalog.changed_at``, and by which deltas and puts of its row tables are read for ``write``, but for those
        with views, whose writes read rows; None for now: a change of the catalog is on its way."""
        derived_at, view = self.catalog.changed_at, self.catalog.entered
        if view.version != self.catalog.visible.version:
            return derived_at, None
        rows = [schema for schema in view.by_id.values() if schema.kind == "row" and schema.id not in view.views]
        return derived_at, {schema.name: WritePlan(schema, self.settings.max_value_bytes) for schema in rows}

    def write_set(self, rows: list[tuple[WritePlan, bytes, RowOp]]) -> WriteSet | None:
        """The deltas and puts of a transaction, for ``write``; None if a row occurs twice."""
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
        derived_at: int,
        write_sets: Sequence[WriteSet],
        tokens: Sequence[str],
        tags: Sequence[Any],
        answer: Answer,
    ) -> Sequence[Any]:
        """Commits transactions of deltas and puts that have read nothing, together, each under a token of its own.

        ``derived_at`` came with the plans by which they were made. If their tables have changed since, or they would
        have to wait for room, none enters: the tags are returned of those that were not answered by what is known of
        their tokens. ``answer`` is called here or by the log's thread: it must be quick.
        """
        self.check_open()
        part = Writes(derived_at, write_sets, tokens, tags, _Timed(answer, self.committer.times))
        return [tag for back in self.committer.submit([part], may_wait=False) for tag in back.tags]

    def append_each(
        self,
        schema: TableSchema,
        batch: pa.RecordBatch,
        *,
        token: str,
        drop_late: bool = False,
        may_wait: bool = True,
        done: Callable[[Outcome], None],
    ) -> bool:
        """Events that are each a transaction of their own, of which event i commits at ``outcome.commit_ts + i``.

        Refused whole, if at all. ``done`` is called once, here or by the log's thread: it must be quick. False, and
        nobody is told: they would have to wait for room, and may not.
        """
        answer = _Timed(told(done), self.committer.times)
        try:
            self.check_open()
            check_token(token)
            check_events(batch, self.settings)
            if not batch.num_rows:
                raise InvalidArgument("there are no events to append")

            return self._append_each(schema, batch, token, drop_late, may_wait, answer)
        except KiviError as error:
            done(Outcome(None, error))
            return True

    def _append_each(
        self, schema: TableSchema, batch: pa.RecordBatch, token: str, drop_late: bool, may_wait: bool, answer: Answer
    ) -> bool:
        def enter(part: Events, cts: int) -> None:
            self.late_dropped += part.members - part.batch.num_rows

        def again() -> None:
            try:
                self._append_each(schema, batch, token, drop_late, True, answer)
            except KiviError as error:
                answer.apart(None, Outcome(None, error))

        while True:
            with self.computing, Opened(self.leases) as opened:
                derived_at, view = self.catalog.changed_at, self.catalog.entered
                rules = Judgement(self.judging, view, opened.another, adds_own=False)
                part = prepare_events(
                    schema,
                    batch,
                    token,
                    drop_late,
                    view,
                    derived_at,
                    self.floor,
                    self.retention,
                    self.shards,
                    answer,
                    rules,
                )
            part.on_enter, part.derive_again = functools.partial(enter, part), again
            if not self.committer.submit([part], may_wait=may_wait):
                return True
            if not may_wait and self.committer.is_full:
                return False

    def floor(self, schema: TableSchema) -> int | None:
        """The retention floor that the next commit meets."""
        with self.committer.entry_lock:
            return self.retention.newest(schema.id)

    def _brought(self, txns: Sequence[Txn], view: View, opened: Opened) -> dict[int, Brought | Unavailable]:
        """What those that bring one event each derive and raise, of each table together; by their places."""
        of_table: dict[int, list[tuple[int, pa.RecordBatch]]] = {}
        for i, txn in enumerate(txns):
            if txn.floors:
                txn.floors = {table: self.floor(txn.schemas[table]) for table in txn.floors}
            if txn.appends and (lone := txn.lone_event()) is not None:
                of_table.setdefault(lone[0].id, []).append((i, lone[1]))
        found: dict[int, Brought | Unavailable] = {}
        for table, members in of_table.items():
            if len(members) > 1 and (schema := view.by_id.get(table)) is not None:
                rules = Judgement(self.judging, view, opened.another, adds_own=False, members=len(members))
                try:
                    derived = derived_together(schema, [batch for _, batch in members], view, self.retention, rules)
                    found.update(zip((i for i, _ in members), derived or (), strict=False))
                except KiviError as error:  # of one of them: alone it fails alone; but other nodes are asked once
                    if isinstance(error, Unavailable) and not isinstance(error, ResourceExhausted):
                        found.update((i, error) for i, _ in members)
        return found

    def asks_others(self, txn: Txn) -> bool:
        """Whether rules may have other nodes asked for rows, and somebody has to wait for these."""
        if self.shards.held == EVERY or not txn.event_tables:
            return False
        view = self.catalog.entered
        return any(view.table(against.table).shard_by for rule in view.rules.values() for _, against in rule.against)

    def _prepare(
        self, commit: Commit, derived_at: int, view: View, opened: Opened, brought: Brought | Unavailable | None = None
    ) -> Single:
        txn, token, batch, _ = commit
        if isinstance(brought, Unavailable):
            raise brought

        def newest(table: int, key: bytes) -> int | None:
            schema = view.by_id.get(table)
            return self.reader.newest(schema, key) if schema is not None and schema.kind == "aggregate" else None

        new = new_generations(view, [txn.schemas[table] for table in txn.overwritten])
        rules, row_floors = None, dict[int, int | None]()
        event_tables = txn.event_tables
        if event_tables and brought is None:
            named: Iterable[TableSchema] = [view.by_id[table] for table in event_tables if table in view.by_id]
            if view.rules:
                rules = Judgement(self.judging, view, lambda: txn.judged_at or opened.another())
                named = rules.order(named)
            grown = {table.id for table in named} - txn.overwritten
            row_floors = self.retention.newest_of(a for table in grown for a in view.aggregates.get(table, ()))
        refused: KiviError | None = txn.refused  # unless its token is known, which is looked up first (R16)
        try:
            in_views = self.view_rows.derive(txn, view, new, opened.common) or Derived()
        except (RowExists, SnapshotTooOld) as error:
            in_views, refused = Derived(), refused or error
        prepared = prepare(
            txn,
            view,
            derived_at,
            new,
            request=token,
            batch=batch,
            row_floors=row_floors,
            newest=newest,
            name_of=lambda t: SYSTEM.get(t) or view.by_id.get(t),
            in_views=in_views,
            rules=rules,
            shards=self.shards,
            brought=brought,
        )
        prepared.lease = in_views.lease or txn.lease
        gone = [schema for table, schema in txn.schemas.items() if not (table in SYSTEM or table in view.by_id)]
        if txn.overwritten and prepared.blind:
            gone = [schema for schema in gone if schema.id not in new.of]
        record = prepared.commit
        catalog_rows = changes(record.rows)
        if catalog_rows or txn.late:
            late_stages = (LATE_STAGES,) if txn.has_late_stages() else ()
            prepared.needs = features_of(catalog_rows) + late_stages
            self.committer.need(prepared.needs)
        if any(txn.run_stages.values()):
            self._attach(prepared, txn.run_stages)
        staged = sequences_of([*record.appends, *record.runs])
        added_to = [txn.schemas[table] for table in sorted(event_tables - txn.overwritten)]
        forgetting = [schema for schema in added_to if schema.retention_us is not None]
        earliest = earliest_times((schema, txn.events_of(schema.id)) for schema in forgetting) if forgetting else []

        def check() -> None:
            if refused is not None:
                raise refused
            for schema in gone:
                if (now := view.successor(schema)) is not None:
                    flying = now.created_ts > self.watermark.value
                    raise Conflict(
                        table=schema.name, start_ts=txn.start_ts, commit_ts=None if flying else now.created_ts
                    )
                raise NotFound(f"table {schema.name!r} was dropped", table=schema.name)
            self.retention.check(earliest)
            for bulk in (*record.appends, *record.runs):
                if bulk.stage:
                    self.staging.index.check_live(bulk.stage, new.origin(bulk.table, view))

        def enter(cts: int) -> None:
            self.late_dropped += sum(txn.late.values())
            self.staging.index.use(staged, cts)
            if catalog_rows:
                self.catalog.enter(catalog_rows, cts)

        prepared.on_check = check if staged or earliest or gone or refused else None
        prepared.on_enter = enter if staged or catalog_rows or txn.late else None
        if catalog_rows:
            prepared.on_apply = lambda cts: self.catalog.apply(catalog_rows, cts)
        prepared.on_abort = self.staging.index.undo if staged else None
        return prepared

    def _attach(self, prepared: Single, run_stages: dict[int, list[int]]) -> None:
        """Makes staged runs part of a prepared commit: their deltas apply at its CTS."""
        for table, sequences in run_stages.items():
            schema = self.catalog.entered.by_id.get(table)  # one whose drop is in the log has no rows to come
            if schema is None:
                raise NotFound(f"table {table} was dropped meanwhile")
            for sequence in sequences:
                run = DeltaRun.from_buffer(schema, 0, staged_data(self.log, sequence))
                prepared.runs.append((table, run))
                prepared.commit.runs.append(Bulk(table, sequence, []))
        prepared.body = prepared.commit.encode()

    def commit_wait(
        self,
        txn: Txn,
        *,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
    ) -> int:
        """The blocking form: the commit timestamp, or raises. CommitUnknown if the time is up first."""
        commit = functools.partial(self.commit, txn, token=token, batch=batch)
        return self.wait(commit, token=token)

    def wait(self, commit: Callable[..., object], *, token: str | None) -> int:
        """Calls ``commit(done=...)`` and waits: the commit timestamp, or raises. CommitUnknown if the time is up."""
        settled: Future[Outcome] = Future()
        commit(done=settled.set_result)
        try:
            outcome = settled.result(self.settings.commit_timeout_s)
        except TimeoutError:
            raise CommitUnknown(token=token) from None
        if outcome.error is not None:
            raise outcome.error
        assert outcome.commit_ts is not None
        return outcome.commit_ts

    def again(self, begin: Callable[[], Txn], work: Callable[[Txn], R]) -> R:
        """What ``work`` returns, which commits the transaction that it is given; after a Conflict once more, with
        another one that begins after what was in flight."""
        while True:
            txn = begin()
            try:
                return work(txn)
            except Conflict:
                self.wait_for_entered(1.0)
            finally:
                self.rollback(txn)

    def wait_for_entered(self, timeout_s: float) -> bool:
        """Waits until every commit that has entered the log by now is finished. False when the time is up."""
        with self.committer.entry_lock:
            last = self.log.last
        return self.watermark.wait_for(last, timeout_s)

    def rollback(self, txn: Txn) -> None:
        """Gives the transaction up, and its lease. Harmless after a commit."""
        txn.closed = txn.closed or "it was rolled back"
        self.leases.release(txn.lease)

    def committed_at(self, *, token: str | None = None, batch: tuple[str, int] | None = None) -> int | None:
        """The CTS under which a token has committed and can be read, if it is remembered: a look, no promise."""
        with self.committer.entry_lock:
            cts = self.tokens.committed_at(token, batch)
        return cts if cts is not None and cts <= self.watermark.value else None

    def outcome(
        self, token: str, place: int | None = None, *, timeout_s: float = 10.0
    ) -> tuple[TokenState, int | None]:
        """The outcome of the commits under a request token: of the member at ``place``, or of the first.

        Fences it before it says aborted, so that a late attempt cannot commit. Raises InvalidArgument for a place that
        the token has no member at.
        """
        self.check_open()
        while True:
            arrived: Future[Outcome] = Future()
            found, waits = self.committer.find_token(token, arrived.set_result)
            if waits:
                try:
                    outcome = arrived.result(timeout_s)
                except TimeoutError:
                    return "unknown", None
                if outcome.commit_ts is None:
                    return ("aborted" if isinstance(outcome.error, Aborted) else "unknown"), None
            elif found is not None:
                if found.cts == FENCED:
                    return "aborted", None
                if not 0 <= (place or 0) < found.members:
                    raise InvalidArgument(f"the token {token!r} has the places 0 to {found.members - 1}, not {place}")
                cts = found.cts + (place or 0)
                self.watermark.wait_for(cts, timeout_s)
                return "committed", cts
            else:
                try:
                    self.tokens.check_age(token, self.committer.now_us())
                except InvalidArgument:
                    return "unknown", None
                if self.committer.fence(token):
                    return "aborted", None
