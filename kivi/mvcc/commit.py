"""Committing, in outline (R18). The order of these steps is the invariant.

::

    caller's thread   1  encode and derive; nothing is locked                     store.Txn.prepare
                      2  wait for room in pending (writers slow down, memory does not grow); a retry does not wait
    entry lock        3  token known?  -> its first CTS       fenced? -> aborted      in flight? -> wait with it
    (no I/O inside)   4  lease still held, start_ts >= facts.floor   -> SnapshotTooOld
                      5  catalog as derived with?               -> else back to 1
                      6  verdict against facts                  -> Conflict
                      7  log.append: the record gets its CTS in chain order
                      8  watermark.enter, facts.note, tokens.remember
    log's thread      9  write, sync, acknowledged mark
                     10  applied to pending (invisible: CTS > W)
                     11  watermark.finish: W moves over the gap-free prefix
                     12  acknowledge once W >= CTS (R17)

An abort before 7 leaves no trace. After 7 the outcome is the log's: a failed sync is UNKNOWN, W stays below it for
ever, and the process has to be restarted. A commit that is past 7 completes whatever its client does.

The entry lock is held for microseconds and never across I/O; commits that queue meanwhile share one write and one
sync in the log. ``hold`` lets tests stop commits between 9 and 10, to finish or abort them in any order.

The verdict is the pure function ``verdict.Facts.check`` over records in log order. Here it runs before the append,
under the lock that fixes the order, which is the same decision: with a log that orders records elsewhere, it runs
when the record comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, Final, Protocol

from kivi.delta.ops import RowOp
from kivi.delta.runs import DeltaRun, with_cts
from kivi.errors import (
    CommitUnknown,
    Conflict,
    DiskFull,
    InvalidArgument,
    KiviError,
    ResourceExhausted,
    Retryable,
    SnapshotTooOld,
    Unavailable,
)
from kivi.log import CommitLog, Kind
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.pending import Applied, Pending
from kivi.mvcc.plain import PlainGroup, Touched
from kivi.mvcc.record import Abort, Commit, begin_at
from kivi.mvcc.shortage import BASE, Shortage
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import FENCED, Tokens
from kivi.mvcc.verdict import Collision, Facts, Footprint, Guard
from kivi.mvcc.watermark import Watermark, call_all
from kivi.runtime.histogram import Histogram

__all__ = ["Aborted", "Committer", "Counters", "Flying", "Outcome", "Prepared", "StaleCatalog"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a commit ended: ``commit_ts``, or the error. ``repeated``: the token had committed before."""

    commit_ts: int | None
    error: KiviError | None = None
    repeated: bool = False


class Aborted(Retryable):
    """The attempt was fenced off or given up; it did nothing and never will. Clients get it as a Retryable."""


class StaleCatalog(Exception):
    """The catalog changed since the commit was derived: derive again. Never leaves the store."""


@dataclass(slots=True)
class Prepared:
    """A commit ready to enter. ``schema_guards`` are implied by the tables it names. The hooks are the catalog's
    and the stages': ``on_check`` (may raise) and ``on_enter`` under the entry lock, ``on_apply`` before W passes it."""

    commit: Commit
    body: list[Any]
    applied: Applied
    catalog_version: int
    schema_guards: list[Guard]
    describe: Callable[[Collision], tuple[str, tuple[Any, ...], str | None]]
    aggregate_newest: Callable[[int, bytes], int | None]
    on_check: Callable[[], None] | None = None
    on_enter: Callable[[int], None] | None = None
    on_apply: Callable[[int], None] | None = None
    on_abort: Callable[[int], None] | None = None
    digest: bytes = bytes(16)
    nbytes: int = 0
    begins_late: bool = False
    """It owes nothing to any snapshot: it begins as it enters the log, after all that is there already."""

    @property
    def footprint(self) -> Footprint:
        return Footprint(self.commit.start_ts, self.commit.rows, [*self.commit.guards, *self.schema_guards])


@dataclass(slots=True)
class Counters:
    commits: int = 0
    commits_grouped: int = 0
    """Of these, the ones that entered together with at least one other (R19)."""
    conflicts: int = 0
    too_old: int = 0
    unknown: int = 0
    rederived: int = 0
    no_room: int = 0
    storage: int = 0


class Flying(Protocol):
    """A commit between its CTS and its finish: what others that meet it there need to know."""

    cts: int
    waiters: list[Callable[[Outcome], None]]
    unknown: CommitUnknown | None

    @property
    def digest(self) -> bytes: ...

    @property
    def rows(self) -> Iterable[tuple[int, bytes, RowOp]]: ...

    @property
    def runs(self) -> Sequence[tuple[int, DeltaRun]]: ...


@dataclass(slots=True)
class _Entered:
    """Any commit but a plain one."""

    prepared: Prepared
    waiters: list[Callable[[Outcome], None]]
    cts: int = 0
    unknown: CommitUnknown | None = None

    @property
    def digest(self) -> bytes:
        return self.prepared.digest

    @property
    def rows(self) -> Sequence[tuple[int, bytes, RowOp]]:
        return self.prepared.applied.rows

    @property
    def runs(self) -> Sequence[tuple[int, DeltaRun]]:
        return self.prepared.applied.runs

    def settle(self, outcome: Outcome) -> None:
        call_all([partial(done, outcome) for done in self.waiters])


_ADMISSION_TIMEOUT_S: Final = 10.0
_second: Final = itemgetter(1)


class Committer:
    """Thread safe. The only way into the log."""

    def __init__(
        self,
        log: CommitLog,
        pending: Pending,
        watermark: Watermark,
        leases: Leases,
        facts: Facts,
        tokens: Tokens,
        *,
        pending_soft_bytes: int,
        pending_hard_bytes: int,
        catalog_version: Callable[[], int],
        is_aggregate: Callable[[int], bool],
        timeline: Timeline,
        shortage: Shortage,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._pending = pending
        self._watermark = watermark
        self._leases = leases
        self._facts = facts
        self._tokens = tokens
        self._soft_bytes = pending_soft_bytes
        self._hard_bytes = pending_hard_bytes
        self._catalog_version = catalog_version
        self._is_aggregate = is_aggregate
        self._timeline = timeline
        self._shortage = shortage
        self._clock = clock
        self._entry = threading.Lock()
        self._by_token: dict[str, Flying | PlainGroup] = {}
        self._by_batch: dict[tuple[str, int], _Entered] = {}
        self._in_flight: dict[int, Flying | PlainGroup] = {}  # by their CTS, or the first of them
        self._held: dict[int, _Entered] = {}
        self._fencing: dict[str, list[Callable[[Outcome], None]]] = {}
        self.hold: Callable[[Commit], bool] | None = None
        self.counters = Counters()
        self.times = Histogram()  # from when a commit was asked for until it was acknowledged; of those that committed
        self.on_pressure: Callable[[], None] = lambda: None

    @property
    def entry_lock(self) -> threading.Lock:
        """Held while a record enters the log; tokens and stages live under it too."""
        return self._entry

    @property
    def facts_floor(self) -> int:
        return self._facts.floor

    @property
    def facts_size(self) -> int:
        return len(self._facts)

    def now_us(self) -> int:
        """Microseconds UTC, never before the newest record: a clock that was set back revives no token."""
        return max(int(self._clock() * 1_000_000), self._log.last_time_us)

    # -- 2 to 8 ---------------------------------------------------------------------------------

    def submit(self, prepared: Prepared, lease: Lease | None, done: Callable[[Outcome], None]) -> None:
        """Enters the commit; ``done`` is called once, now or from the log's thread. Raises only StaleCatalog."""
        try:
            known = self._admit(prepared, done) or self._enter(prepared, lease, done)
        except KiviError as error:
            known = Outcome(None, error)
        if not isinstance(known, Outcome):
            return
        outcome = known
        if outcome.commit_ts is not None:
            self._watermark.when(outcome.commit_ts, lambda: done(outcome))  # a repeat, of what nobody may see yet
        else:
            done(outcome)

    def _admit(self, prepared: Prepared, done: Callable[[Outcome], None]) -> Outcome | bool | None:
        """Waits for room in pending, unless the token is known: what was applied before needs none (as ``_known``)."""
        if self._pending.nbytes <= self._soft_bytes:
            return None
        self.on_pressure()
        if self._pending.nbytes > self._hard_bytes:
            with self._entry:
                known = self._known(prepared, done)
            if known is not None:
                return known
            short = self._shortage.why(BASE)
            if short is not None or not self._pending.wait_for_room(self._hard_bytes, _ADMISSION_TIMEOUT_S):
                short = short or self._shortage.why(BASE)
                if short is not None:
                    raise self._base_takes_nothing(short)
                self.counters.no_room += 1
                raise ResourceExhausted(
                    f"{self._pending.nbytes} bytes are waiting to be consolidated; nothing was applied: try again"
                )
        return None

    def _base_takes_nothing(self, short: KiviError) -> KiviError:
        self._shortage.refused()
        self.counters.storage += 1
        full = isinstance(short, DiskFull)
        todo = "make room on the disk, and try again" if full else "restart the server if this stays, and try again"
        return (DiskFull if full else Unavailable)(
            f"{self._pending.nbytes} bytes in memory cannot be written ({short.message}); nothing was applied: {todo}",
            **short.details,
        )

    def _enter(self, prepared: Prepared, lease: Lease | None, done: Callable[[Outcome], None]) -> Outcome | bool:
        """Steps 3 to 8. An outcome if there is one already, True if ``done`` will be called."""
        commit = prepared.commit
        with self._entry:
            known = self._known(prepared, done)
            if known is not None:
                return known
            try:
                if lease is not None:
                    self._leases.check(lease)
                if commit.start_ts < self._facts.floor:
                    raise SnapshotTooOld(
                        f"the transaction began at {commit.start_ts}, and conflicts are only known from "
                        f"{self._facts.floor} on; nothing was applied: begin again"
                    )
            except SnapshotTooOld:
                self.counters.too_old += 1
                raise
            if prepared.catalog_version != self._catalog_version():
                self.counters.rederived += 1
                raise StaleCatalog
            if prepared.begins_late:
                commit.start_ts = self._log.last
                begin_at(prepared.body, commit.start_ts)
            if prepared.on_check:
                prepared.on_check()
            footprint = prepared.footprint
            collision = self._facts.check(footprint, self._newest_of(prepared)) or self._derived_collision(prepared)
            if collision is not None:
                self.counters.conflicts += 1
                table, key, column = prepared.describe(collision)
                flying = collision.commit_ts > self._watermark.value
                raise Conflict(
                    table=table,
                    key=key,
                    column=column,
                    start_ts=commit.start_ts,
                    commit_ts=None if flying else collision.commit_ts,
                )
            entered = _Entered(prepared, [done])
            try:
                ticket = self._log.append([(Kind.COMMIT, prepared.body)], lambda error: self._durable(entered, error))
            except DiskFull:
                self.counters.storage += 1
                self._shortage.refused()
                raise
            cts = entered.cts = ticket.first
            self._watermark.enter(cts)
            self._in_flight[cts] = entered
            for guard in commit.guards:
                if self._is_aggregate(guard.table):
                    self._facts.is_aggregate(guard.table)
            self._facts.note(footprint, cts, ticket.time_us)
            self._timeline.note(cts, ticket.time_us)
            if commit.request:
                self._by_token[commit.request[0]] = entered
            if commit.batch:
                self._by_batch[commit.batch] = entered
                self._tokens.remember_batch(*commit.batch, cts)
            if prepared.on_enter:
                prepared.on_enter(cts)
        return True

    def _known(self, prepared: Prepared, done: Callable[[Outcome], None]) -> Outcome | bool | None:
        """An outcome if the token has one, True if ``done`` now waits with the first attempt, None if it is new."""
        commit = prepared.commit
        if commit.request:
            token, digest = commit.request
            flying = self._attempt(token)
            if flying is not None:
                if flying.digest != digest:
                    raise InvalidArgument(f"the token {token!r} is in use for another payload; nothing was applied")
                return self._joined(flying, done)
            if token in self._fencing:
                self._fencing[token].append(done)
                return True
            found = self._tokens.find(token)
            if found is not None:
                if found.cts == FENCED:
                    raise Aborted(f"the attempt {token!r} was given up before it arrived; nothing was applied")
                if found.digest != digest:
                    raise InvalidArgument(f"the token {token!r} was used for another payload; nothing was applied")
                return Outcome(found.cts, repeated=True)
            self._tokens.check_age(token, self.now_us())
        if commit.batch:
            flying = self._by_batch.get(commit.batch)
            if flying is not None:
                return self._joined(flying, done)
            first = self._tokens.find_batch(*commit.batch)
            if first is not None:
                return Outcome(first, repeated=True)
        return None

    def _joined(self, flying: Flying, done: Callable[[Outcome], None]) -> Outcome | bool:
        """Waits with the attempt in flight; if the log failed under that one, nobody will ever tell."""
        if flying.unknown is not None:
            return Outcome(None, flying.unknown)
        flying.waiters.append(done)
        return True

    def _newest_of(self, prepared: Prepared) -> Callable[[int, bytes], int | None]:
        def newest(table: int, key: bytes) -> int | None:
            stamp = prepared.aggregate_newest(table, key)
            if stamp is None:
                return None
            for cts, entered in self._in_flight.items():
                if any(t == table and k == key for t, k, _ in entered.rows) or any(
                    t == table and run.find(key) for t, run in entered.runs
                ):
                    stamp = max(stamp, cts)
            return stamp

        return newest

    def _derived_collision(self, prepared: Prepared) -> Collision | None:
        """Deltas that an append derives, against guards on the aggregate rows they touch."""
        start = prepared.commit.start_ts
        for table, key, _ in prepared.commit.derived:
            stamp = self._facts.guarded(table, key)
            if stamp > start:
                return Collision(table, key, None, stamp)
        for table, run in prepared.applied.runs:
            for key, stamp in self._facts.guarded_rows(table, start):
                if run.find(key):
                    return Collision(table, key, None, stamp)
        return None

    # -- the same for many plain ones -------------------------------------------------------------

    def submit_plain(
        self, group: PlainGroup, catalog_version: int, done: Callable[[PlainGroup, CommitUnknown | None], None]
    ) -> Sequence[int]:
        """Enters commits of deltas and puts together; the places of those that have to go through ``submit``, in order.

        ``done`` is called once, from the log's thread, with those that were entered: committed at their CTS, or
        with an error that concerns all of them. It must be quick.
        """
        everything = range(len(group))
        if self._pending.nbytes > self._soft_bytes:
            self.on_pressure()
            if self._pending.nbytes > self._hard_bytes:
                return everything
        with self._entry:
            if catalog_version != self._catalog_version() or self.hold is not None:
                return everything
            left = self._irregular(group)
            if len(left) == len(group):
                return left
            entered = group.without(left) if left else group
            try:
                ticket = self._log.append_many(
                    Kind.COMMIT, entered.bodies(), lambda error: self._plain_durable(entered, error, done)
                )
            except KiviError:
                return everything
            entered.first = ticket.first
            self._watermark.enter_many(ticket.first, ticket.last)
            self._timeline.note_many(ticket.first, ticket.last, ticket.time_us)
            self._in_flight[ticket.first] = entered
            self._by_token.update(zip(entered.tokens, repeat(entered)))
            last = {does: i for i, does in enumerate(entered.does)}  # of those that do the same ...
            last_of = {does.cells: i for does, i in sorted(last.items(), key=_second)}  # ... and write the same cells
            for i in sorted(last_of.values()):
                self._facts.note_patches(entered.does[i], ticket.first + i, ticket.time_us)
        return left

    def _irregular(self, group: PlainGroup) -> Sequence[int]:
        """The places of those about which steps 3 to 6 may have something to say."""
        tokens, start = group.tokens, group.start_ts
        if start < self._facts.floor:
            return range(len(group))
        seen = self._tokens.known(tokens, self.now_us())
        flying, fencing = self._by_token.keys(), self._fencing.keys()
        if not (flying.isdisjoint(tokens) and fencing.isdisjoint(tokens)):
            seen = seen.union(flying & tokens, fencing & tokens)
        distinct = {does.cells: does for does in set(group.does)}
        taken = {cells for cells, does in distinct.items() if self._facts.collides(does, start)}
        if not (seen or taken or any(does.puts for does in distinct.values())) and len(set(tokens)) == len(tokens):
            return ()
        left, touched = [], Touched()
        for i, (does, token) in enumerate(zip(group.does, tokens, strict=True)):
            if token in seen or does.cells in taken or not touched.may_join(does):
                left.append(i)
            seen.add(token)
        return left

    def _plain_durable(
        self,
        group: PlainGroup,
        error: BaseException | None,
        done: Callable[[PlainGroup, CommitUnknown | None], None],
    ) -> None:
        if error is not None:
            unknown = CommitUnknown(
                f"the log failed while these commits were being made durable ({error}): "
                "restart the store, then ask outcome()"
            )
            with self._entry:
                self.counters.unknown += len(group)
                self._in_flight.pop(group.first, None)
                group.unknown = unknown
                attempts = [*group.attempts.items()]
                for token, attempt in attempts:
                    attempt.unknown = CommitUnknown(unknown.message, token=token)
            done(group, unknown)
            for _, attempt in attempts:
                call_all([partial(waiter, Outcome(None, attempt.unknown)) for waiter in attempt.waiters])
            return
        with self._entry:  # the log may be faster than ``submit_plain``, which gives them their CTS under this lock
            pass
        self._pending.apply_plain(group)
        with self._entry:
            del self._in_flight[group.first]
            self._tokens.remember_many(group.tokens, group.first, [does.digest for does in group.does])
            for token in group.tokens:
                del self._by_token[token]
        self.counters.commits += len(group)
        if len(group) > 1:
            self.counters.commits_grouped += len(group)

        def acknowledge() -> None:
            done(group, None)
            for attempt in group.attempts.values():
                outcome = Outcome(attempt.cts, repeated=True)
                call_all([partial(waiter, outcome) for waiter in attempt.waiters])

        self._watermark.finish(group.last, acknowledge)

    def _attempt(self, token: str) -> Flying | None:
        """The attempt of this token that is in flight."""
        found = self._by_token.get(token)
        return found.attempt(token) if isinstance(found, PlainGroup) else found

    # -- 9 to 12 --------------------------------------------------------------------------------

    def _durable(self, entered: _Entered, error: BaseException | None) -> None:
        """Called by the log, in log order, on its thread."""
        with self._entry:
            cts = entered.cts
            if error is not None:
                self.counters.unknown += 1
                self._in_flight.pop(cts, None)
                request = entered.prepared.commit.request
                entered.unknown = CommitUnknown(
                    f"the log failed while this commit was being made durable ({error}): "
                    "restart the store, then ask outcome()",
                    token=request[0] if request else None,
                )
            elif self.hold is not None and self.hold(entered.prepared.commit):
                self._held[cts] = entered
                return
        if entered.unknown is not None:
            entered.settle(Outcome(None, entered.unknown))
            return
        self._finish(entered)

    def _finish(self, entered: _Entered) -> None:
        cts, prepared = entered.cts, entered.prepared
        applied = prepared.applied
        self._pending.apply(cts, applied._replace(runs=[(table, with_cts(run, cts)) for table, run in applied.runs]))
        if prepared.on_apply:
            prepared.on_apply(cts)
        with self._entry:
            commit = prepared.commit
            self._in_flight.pop(cts, None)
            if commit.request:
                self._tokens.remember(commit.request[0], cts, commit.request[1])
                self._by_token.pop(commit.request[0], None)
            if commit.batch:
                self._by_batch.pop(commit.batch, None)
            waiters = entered.waiters
        self.counters.commits += 1

        def acknowledge() -> None:
            call_all([partial(done, Outcome(cts, repeated=i > 0)) for i, done in enumerate(waiters)])

        self._watermark.finish(cts, acknowledge)

    # -- held commits: for tests ------------------------------------------------------------------

    @property
    def held(self) -> list[int]:
        """The CTS of commits that are durable and not finished."""
        return sorted(self._held)

    def finish_held(self, cts: int) -> None:
        self._finish(self._held.pop(cts))

    def abort_held(self, cts: int) -> None:
        """Aborts a commit after its CTS was taken: W passes it once the abort record is durable."""
        entered = self._held.pop(cts)
        settled = threading.Event()

        def durable(error: BaseException | None) -> None:
            if error is None:
                with self._entry:
                    commit = entered.prepared.commit
                    self._in_flight.pop(cts, None)
                    if commit.request:
                        self._by_token.pop(commit.request[0], None)
                        self._tokens.forget(commit.request[0])
                    if commit.batch:
                        self._by_batch.pop(commit.batch, None)
                        self._tokens.forget_batch(*commit.batch)
                    if entered.prepared.on_abort:
                        entered.prepared.on_abort(cts)
                aborted = Outcome(None, Aborted("the commit was aborted; it did nothing"))
                self._watermark.finish(cts, lambda: entered.settle(aborted))
            settled.set()

        self.log_other(Kind.ABORT, Abort(commits=(cts,)).encode(), durable)
        settled.wait()

    # -- records that are not commits ---------------------------------------------------------------

    def log_other(
        self,
        kind: Kind,
        body: list[Any],
        done: Callable[[BaseException | None], None],
        on_enter: Callable[[int], None] | None = None,
    ) -> int:
        """Enters a stage, abort or floor record; ``done`` runs once it is durable. Returns its sequence number."""
        entered = threading.Event()
        sequence = 0

        def durable(error: BaseException | None) -> None:
            entered.wait()
            done(error)
            if error is None:
                self._watermark.finish(sequence)

        try:
            with self._entry:
                ticket = self._log.append([(kind, body)], durable)
                sequence = ticket.first
                self._watermark.enter(sequence)
                if on_enter:
                    on_enter(sequence)
        except DiskFull:
            if kind is Kind.STAGE:
                self._shortage.refused()
            raise
        finally:
            entered.set()
        return sequence

    def find_token(self, token: str, done: Callable[[Outcome], None]) -> tuple[int | None, bool]:
        """(CTS or FENCED or None, whether ``done`` now waits for an attempt or a fence in flight)."""
        with self._entry:
            flying = self._attempt(token)
            if flying is not None:
                joined = self._joined(flying, done)
            elif token in self._fencing:
                self._fencing[token].append(done)
                joined = True
            else:
                found = self._tokens.find(token)
                return (None if found is None else found.cts), False
        if isinstance(joined, Outcome):
            done(joined)
        return None, True

    def fence(self, token: str) -> bool:
        """Makes sure that ``token`` never commits, durably. False if it has an attempt in flight or an outcome."""
        settled = threading.Event()
        failure: list[BaseException] = []

        def durable(error: BaseException | None) -> None:
            outcome = Outcome(None, Aborted(f"the attempt {token!r} was given up; it did nothing and never will"))
            if error is not None:
                failure.append(error)
                outcome = Outcome(None, CommitUnknown(f"the log failed while fencing {token!r}", token=token))
            with self._entry:
                if error is None:
                    self._tokens.forget(token)
                waiters = self._fencing.pop(token)
            call_all([partial(done, outcome) for done in waiters])
            settled.set()

        with self._entry:
            if token in self._by_token or token in self._fencing or self._tokens.find(token) is not None:
                return False
            ticket = self._log.append([(Kind.ABORT, Abort(tokens=(token,)).encode())], durable)
            self._fencing[token] = []
            self._watermark.enter(ticket.first)
        settled.wait()
        if failure:
            raise CommitUnknown(f"the log failed while fencing {token!r}: restart the store", token=token)
        self._watermark.finish(ticket.first)
        return True
